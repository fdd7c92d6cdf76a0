// Orders the items of a launch, numbers their tiles and resets the counter that hands them out.
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/sm90/ptx.cuh"
#include "kernels/cuda/sm90/tile_schedule.cuh"

namespace mla::sm90 {
namespace {

constexpr int kThreads = 512;
constexpr int kClasses = 256;
using Scan = cub::BlockScan<int64_t, kThreads>;

/// Class of an item by the keys that its last query sees, eight classes an octave; class 0 has
/// most. Long tiles handed out first leave short ones to even out the end.
__device__ int32_t length_class(const AttentionItem& item) {
  const int32_t last = max(item.q_len - 1, 0);
  const int32_t keys =
      visible_keys(tile_limit(last, item.causal_offset, item.k_len), 0, item.k_len);
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
  const int64_t given = args.num_items.actual != nullptr ? *args.num_items.actual
                                                         : args.num_items.capacity;
  const int32_t n = static_cast<int32_t>(max(int64_t{0}, min(given, args.num_items.capacity)));

  if (thread < kClasses) position[thread] = 0;
  __syncthreads();
  for (int32_t i = thread; i < n; i += kThreads) {
    atomicAdd(&position[length_class(args.items[i])], 1);
  }
  __syncthreads();
  int64_t first = thread < kClasses ? position[thread] : 0;
  Scan(scan).ExclusiveSum(first, first);
  if (thread < kClasses) position[thread] = static_cast<int32_t>(first);
  __syncthreads();
  for (int32_t i = thread; i < n; i += kThreads) {
    const AttentionItem item = args.items[i];
    args.tiles.items[atomicAdd(&position[length_class(item)], 1)] = item;
  }
  __syncthreads();

  int64_t before = 0;  // tiles of the items of earlier rounds
  for (int32_t round = 0; round < n; round += kThreads) {
    const int32_t i = round + thread;
    int64_t count = i < n ? int64_t{query_tiles(args.tiles.items[i].q_len)} * args.num_heads : 0;
    int64_t sum = 0;
    Scan(scan).ExclusiveSum(count, count, sum);
    if (i < n) args.tiles.first_tile[i] = before + count;
    before += sum;
    __syncthreads();  // `scan` is used again
  }
  if (thread == 0) {
    args.tiles.first_tile[n] = before;
    *args.tiles.num_items = n;
    *args.tiles.next_tile = static_cast<uint64_t>(args.num_blocks);
  }
}

}  // namespace

cudaError_t launch_prepare_tiles(const PrepareTilesArgs& args, cudaStream_t stream) {
  prepare_tiles_kernel<<<1, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace mla::sm90
