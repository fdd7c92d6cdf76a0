#include <algorithm>

#include "kernels/cuda/empty_rows.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector8.cuh"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// Output 0 and lse -inf for all heads of a row, by one block, in stores of `Unit`.
template <typename Unit>
__device__ void empty_row(const MaskEmptyContextParams& p, int64_t row, int element_bytes) {
  const int head_units = p.head_dim * element_bytes / static_cast<int>(sizeof(Unit));
  auto* const bytes =
      static_cast<std::byte*>(p.output.data) + row * p.output.row_stride * element_bytes;
  const int64_t head_bytes = p.output.head_stride * element_bytes;
  for (int64_t unit = threadIdx.x; unit < int64_t{p.num_heads} * head_units; unit += kThreads) {
    const int64_t head = unit / head_units;
    reinterpret_cast<Unit*>(bytes + head * head_bytes)[unit - head * head_units] = Unit{};
  }
  for (int head = threadIdx.x; head < p.num_heads; head += kThreads) {
    p.lse.data[head * p.lse.head_stride + row * p.lse.row_stride] = -INFINITY;
  }
}

/// Every block looks for the requests without context, 256 at a time, and all blocks share the rows
/// of those, one by one in turn. So no thread searches for a row's request, and rows that are to
/// stay as they are cost nothing.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    mask_kernel(const __grid_constant__ MaskEmptyContextParams p, int element_bytes) {
  __shared__ uint32_t empty_requests[kWarps];
  const int64_t requests = length(p.num_requests);
  int64_t turn = blockIdx.x;  // rows until this block's next one
  for (int64_t first = 0; first < requests; first += kThreads) {
    const int64_t candidate = first + threadIdx.x;
    const bool empty = candidate < requests &&
                       p.context_start_loc[candidate + 1] == p.context_start_loc[candidate] &&
                       p.query_start_loc[candidate + 1] > p.query_start_loc[candidate];
    const uint32_t votes = __ballot_sync(~0u, empty);
    if (threadIdx.x % 32 == 0) empty_requests[threadIdx.x / 32] = votes;
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) {
      for (uint32_t left = empty_requests[warp]; left != 0; left &= left - 1) {
        const int64_t request = first + warp * 32 + __ffs(left) - 1;
        const int64_t begin = int64_t{p.query_start_loc[request]} - p.first_token;
        const int64_t rows = int64_t{p.query_start_loc[request + 1]} - p.first_token - begin;
        for (; turn < rows; turn += gridDim.x) empty_row<Unit>(p, begin + turn, element_bytes);
        turn -= rows;
      }
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads)
    clear_kernel(const __grid_constant__ ClearPartialParams p, int64_t token_blocks) {
  const int64_t head = blockIdx.x / token_blocks;
  const int64_t token = blockIdx.x % token_blocks * kThreads + threadIdx.x;
  if (token < length(p.num_tokens)) {
    p.lse.data[head * p.lse.head_stride + token * p.lse.row_stride] = -INFINITY;
  }
}

}  // namespace

void mask_empty_context(const MaskEmptyContextParams& p, int multiprocessors, cudaStream_t stream) {
  const int64_t most_rows = p.num_requests.capacity * p.max_query_len;
  const int64_t blocks = std::min<int64_t>(most_rows, int64_t{4} * multiprocessors);
  const bool aligned =
      vector_aligned(p.output.data, p.output.dtype, p.output.row_stride, p.output.head_stride);
  const int element_bytes = dtype_bytes(p.output.dtype);
  launch("launching mask_empty_context", aligned ? mask_kernel<uint4> : mask_kernel<uint16_t>,
         blocks, kThreads, 0, stream, p, element_bytes);
}

void clear_partial(const ClearPartialParams& p, cudaStream_t stream) {
  const int64_t token_blocks = divide_up(p.num_tokens.capacity, kThreads);
  launch("launching clear_partial", clear_kernel, token_blocks * p.num_heads, kThreads, 0, stream,
         p, token_blocks);
}

}  // namespace mla::cuda
