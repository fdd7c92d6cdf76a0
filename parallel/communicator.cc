#include "parallel/communicator.h"

#include "metadata/error.h"

namespace mla {

std::string_view collective_name(Collective collective) {
  switch (collective) {
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kAllToAll:
      return "all_to_all";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kBarrier:
      return "barrier";
    case Collective::kHostExchange:
      return "exchange_host";
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown collective {}", static_cast<int>(collective));
}

}  // namespace mla
