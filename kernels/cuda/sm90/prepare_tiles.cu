// Orders the items of a launch, numbers their tiles and resets the counter that hands them out.
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/sm90/ptx.cuh"
#include "kernels/cuda/sm90/tile_schedule.cuh"

namespace mla::sm90 {
namespace {

constexpr int kThreads = 512;
constexpr int kClasses = 256;
using Scan = cub::BlockScan<int64_t, kThreads>;

/// The most keys that a query of the item sees.
__device__ int32_t most_keys(const AttentionItem& item) {
  const int32_t last = max(item.q_len - 1, 0);
  return visible_keys(tile_limit(last, item.causal_offset, item.k_len), 0, item.k_len);
}

__device__ int32_t splits_of(const AttentionItem& item, int32_t num_heads) {
  return key_splits(int64_t{query_tiles(item.q_len)} * num_heads, most_keys(item));
}

/// Class by the keys of the item's longest tile, eight classes an octave; class 0 has most. Long
/// tiles handed out first leave short ones to even out the end.
__device__ int32_t length_class(int32_t keys) {
  if (keys == 0) return kClasses - 1;
  const int32_t exponent = 31 - __clz(keys);
  const int32_t mantissa = exponent >= 3 ? (keys >> (exponent - 3)) & 7 : 0;
  return kClasses - 2 - (8 * exponent + mantissa);
}

__global__ void __launch_bounds__(kThreads) prepare_tiles_kernel(const PrepareTilesArgs args) {
  __shared__ Scan::TempStorage scan;
  __shared__ int32_t position[kClasses];  // counts, then the next free place of the class
  allow_dependent_launch();

  const int thread = static_cast<int>(threadIdx.x);
  const int64_t given =
      args.num_items.actual != nullptr ? *args.num_items.actual : args.num_items.capacity;
  const int32_t n = static_cast<int32_t>(max(int64_t{0}, min(given, args.num_items.capacity)));

  if (thread < kClasses) position[thread] = 0;
  __syncthreads();
  for (int32_t i = thread; i < n; i += kThreads) {
    const AttentionItem item = args.items[i];
    const int32_t splits = splits_of(item, args.num_heads);
    atomicAdd(&position[length_class(most_keys(item) / splits)], 1);
  }
  __syncthreads();
  int64_t first = thread < kClasses ? position[thread] : 0;
  Scan(scan).ExclusiveSum(first, first);
  if (thread < kClasses) position[thread] = static_cast<int32_t>(first);
  __syncthreads();
  for (int32_t i = thread; i < n; i += kThreads) {
    const AttentionItem item = args.items[i];
    const int32_t splits = splits_of(item, args.num_heads);
    const int32_t place = atomicAdd(&position[length_class(most_keys(item) / splits)], 1);
    args.tiles.items[place] = {item, splits, 0};
  }
  __syncthreads();

  int64_t tiles_before = 0, partials_before = 0;  // of the items of earlier rounds
  for (int32_t round = 0; round < n; round += kThreads) {
    const int32_t i = round + thread;
    ScheduledItem scheduled;
    if (i < n) scheduled = args.tiles.items[i];
    const int64_t tiles = int64_t{query_tiles(scheduled.item.q_len)} * args.num_heads;
    int64_t partial = scheduled.splits > 1 ? tiles * scheduled.splits : 0;
    const int64_t end = partial;
    int64_t sum = 0;
    Scan(scan).ExclusiveSum(partial, partial, sum);
    partial += partials_before;
    partials_before += sum;
    if (partial + end > args.tiles.max_partials) scheduled.splits = 1;
    scheduled.first_partial = static_cast<int32_t>(partial);
    __syncthreads();  // `scan` is used again
    int64_t first_tile = tiles * scheduled.splits;
    Scan(scan).ExclusiveSum(first_tile, first_tile, sum);
    if (i < n) {
      args.tiles.first_tile[i] = static_cast<int32_t>(tiles_before + first_tile);
      args.tiles.items[i] = scheduled;
    }
    tiles_before += sum;
    __syncthreads();
  }
  const int64_t partials = min(partials_before, int64_t{args.tiles.max_partials});
  for (int64_t i = thread; i < partials * kConsumerWarps; i += kThreads) {
    args.tiles.arrivals[i] = 0;
  }
  if (thread == 0) {
    args.tiles.first_tile[n] = static_cast<int32_t>(tiles_before);
    *args.tiles.num_items = n;
    *args.tiles.next_tile = args.num_blocks;
  }
}

}  // namespace

cudaError_t launch_prepare_tiles(const PrepareTilesArgs& args, cudaStream_t stream) {
  prepare_tiles_kernel<<<1, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace mla::sm90
