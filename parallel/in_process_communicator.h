// Threads as ranks: collectives are copies between them. For backends whose memory the host can
// reach and whose ops have run when they return, that is the CPU's.
//
//   InProcessGroup group(2);
//   std::thread peer([&] { serve(*group.join(1)); });
//   serve(*group.join(0));
#ifndef PARALLEL_IN_PROCESS_COMMUNICATOR_H_
#define PARALLEL_IN_PROCESS_COMMUNICATOR_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/communicator.h"

namespace mla {

/// Every rank checks that all make the same call, so that ranks of another opinion get an error
/// and not each other's bytes. A rank whose communicator is destroyed has left: those that wait
/// for it get an error at once. Thread-safe.
class InProcessGroup {
 public:
  /// `time_limit`: the longest that a rank waits for the others in one call. Throws
  /// kInvalidArgument unless size >= 1 and the limit is positive.
  explicit InProcessGroup(int32_t size,
                          std::chrono::milliseconds time_limit = std::chrono::seconds(30));

  /// The rank's communicator, which may outlive the group. Throws kInvalidArgument for a rank
  /// outside [0, size) or one that has joined before.
  std::unique_ptr<Communicator> join(int32_t rank);

  /// What the rank has called so far, host exchanges apart.
  std::vector<CollectiveCall> calls(int32_t rank) const;

 private:
  friend class InProcessCommunicator;
  class State;

  std::shared_ptr<State> state_;
};

}  // namespace mla

#endif  // PARALLEL_IN_PROCESS_COMMUNICATOR_H_
