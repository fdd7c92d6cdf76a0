#include "metadata/context_parallel.h"

#include "metadata/error.h"

namespace mla {

void validate_shard(const ContextShard& shard) {
  if (shard.world < 1) {
    throw_error(ErrorCode::kInvalidArgument, "context-parallel world is {}, at least 1 is needed",
                shard.world);
  }
  if (shard.rank < 0 || shard.rank >= shard.world) {
    throw_error(ErrorCode::kInvalidArgument, "context-parallel rank {} is outside [0, {})",
                shard.rank, shard.world);
  }
  if (shard.interleave < 1) {
    throw_error(ErrorCode::kInvalidArgument,
                "context-parallel interleave is {} tokens, at least 1 is needed", shard.interleave);
  }
}

int32_t owner_rank(int32_t t, const ContextShard& shard) {
  return t / shard.interleave % shard.world;
}

int32_t local_position(int32_t t, const ContextShard& shard) {
  const int64_t cycle = int64_t{shard.interleave} * shard.world;
  return static_cast<int32_t>(t / cycle * shard.interleave + t % shard.interleave);
}

}  // namespace mla
