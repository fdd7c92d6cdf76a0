// Where a cached token lives when the cache is sharded over the ranks of a context-parallel group.
#ifndef METADATA_CONTEXT_PARALLEL_H_
#define METADATA_CONTEXT_PARALLEL_H_

#include <algorithm>
#include <cstdint>

namespace mla {

/// Cached token t lives on rank (t / interleave) mod world, at local position
/// (t / (interleave * world)) * interleave + t mod interleave.
struct ContextShard {
  int32_t world = 1;       // N
  int32_t rank = 0;        // 0 <= rank < world
  int32_t interleave = 1;  // I, in tokens

  bool operator==(const ContextShard&) const = default;
};

/// Throws kInvalidArgument unless world >= 1, 0 <= rank < world and interleave >= 1.
void validate_shard(const ContextShard& shard);

/// How many of the first `length` tokens live on the shard's rank.
inline int32_t local_length(int32_t length, const ContextShard& shard) {
  if (shard.world == 1) return length;
  const int64_t interleave = shard.interleave;
  const int64_t cycle = interleave * shard.world;
  const int64_t cycles = length / cycle;
  const int64_t rest = length - cycles * cycle - shard.rank * interleave;
  return static_cast<int32_t>(cycles * interleave + std::clamp<int64_t>(rest, 0, interleave));
}

/// How many tokens of the span [begin, end) live on the shard's rank: a difference of two prefix
/// lengths, right for any begin.
inline int32_t local_span_length(int32_t begin, int32_t end, const ContextShard& shard) {
  return local_length(end, shard) - local_length(begin, shard);
}

/// The rank that token `t` lives on, and its position there.
int32_t owner_rank(int32_t t, const ContextShard& shard);
int32_t local_position(int32_t t, const ContextShard& shard);

}  // namespace mla

#endif  // METADATA_CONTEXT_PARALLEL_H_
