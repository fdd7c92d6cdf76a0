// How the ranks of a context-parallel group talk: collectives on backend memory, ordered by a
// stream, and a small exchange between hosts.
//
// Every rank calls the same collectives in the same order with the same sizes; where contents
// differ in length, blocks are padded to the longest and what lies behind a rank's own content is
// carried along unread. Errors are kCommunication: a peer that left, is late or calls something
// else. After one the communicator is aborted: every later call throws at once, on every rank.
//
// Thread-safety: one communicator is used from one thread and one stream at a time; abort() alone
// may come from any thread.
#ifndef PARALLEL_COMMUNICATOR_H_
#define PARALLEL_COMMUNICATOR_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/backend.h"

namespace mla {

enum class Collective { kAllGather, kAllToAll, kBroadcast, kBarrier, kHostExchange };
std::string_view collective_name(Collective collective);  // "all_gather", "all_to_all", ...

/// One call, as every rank makes it. `bytes` is the block that goes from one rank to another.
struct CollectiveCall {
  Collective collective = Collective::kBarrier;
  size_t bytes = 0;

  bool operator==(const CollectiveCall&) const = default;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int32_t rank() const = 0;
  virtual int32_t size() const = 0;

  /// Block r of `receive` [size, block_bytes] becomes rank r's `send` [block_bytes]. `send` may be
  /// this rank's block of `receive`, and overlaps it nowhere else.
  virtual void all_gather(const void* send, void* receive, size_t block_bytes, Stream stream) = 0;

  /// Block s of `receive` becomes block r of rank s's `send`, r being this rank; both are
  /// [size, block_bytes] and do not overlap.
  virtual void all_to_all(const void* send, void* receive, size_t block_bytes, Stream stream) = 0;

  /// `data` becomes the root's.
  virtual void broadcast(void* data, size_t bytes, int32_t root, Stream stream) = 0;

  /// Work enqueued after it runs when every rank has come so far.
  virtual void barrier(Stream stream) = 0;

  /// Block r of `all` [size, mine.size()] becomes rank r's `mine`. Host memory, over the connection
  /// that the group was made with: no stream is touched, and it has returned when this does.
  virtual void exchange_host(std::span<const std::byte> mine, std::span<std::byte> all) = 0;

  /// Waits until work enqueued on the stream is done. This is where an asynchronous communicator
  /// notices a lost peer: it throws within the time limit, never waits for ever.
  virtual void wait(Stream stream) = 0;

  /// Fails every pending and later call, on all ranks that still listen. Captured graphs that hold
  /// collectives may not be launched any more.
  virtual void abort(std::string_view reason) noexcept = 0;

  /// Whether collectives may be captured in a CUDA graph.
  virtual bool capturable() const = 0;
};

}  // namespace mla

#endif  // PARALLEL_COMMUNICATOR_H_
