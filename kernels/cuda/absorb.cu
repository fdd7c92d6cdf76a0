// What surrounds absorbed attention and is no bf16 product: the queries' RoPE part, and the values
// of its float32 output.
#include <cuda_bf16.h>

#include "kernels/cuda/expand.h"
#include "kernels/cuda/launch.cuh"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    copy_rope_kernel(const __grid_constant__ AbsorbQueryParams p) {
  const int64_t row_values = int64_t{p.dims.num_heads} * p.dims.qk_rope_head_dim;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = index / row_values;
  if (row >= length(p.num_rows)) return;
  const int64_t head = index % row_values / p.dims.qk_rope_head_dim;
  const int64_t column = index % p.dims.qk_rope_head_dim;
  const auto* const q = static_cast<const uint16_t*>(p.q.data) + row * p.q.row_stride +
                        head * p.q.head_stride + p.dims.qk_nope_head_dim;
  auto* const absorbed = static_cast<uint16_t*>(p.absorbed.data) + row * p.absorbed.row_stride +
                         head * p.absorbed.head_stride + p.dims.kv_lora_rank;
  absorbed[column] = q[column];
}

constexpr int kTile = 64;        // rows, and columns, of a block's tile of one head's values
constexpr int kTileLatent = 32;  // latent values at a time
constexpr int kThreadTile = 4;   // a thread computes 4 x 4 values

/// float32 through and through: the latent output is not rounded once more. Each value is one sum
/// in order of l.
__global__ void __launch_bounds__(kThreads)
    project_value_kernel(const __grid_constant__ ProjectValueParams p, int64_t row_tiles,
                         int column_tiles) {
  __shared__ float latent_tile[kTileLatent][kTile + 1];
  __shared__ float weight_tile[kTileLatent][kTile + 1];
  const int64_t rows = length(p.num_rows);
  const int64_t first_row = blockIdx.x % row_tiles * kTile;
  const int first_column = static_cast<int>(blockIdx.x / row_tiles % column_tiles) * kTile;
  const int64_t head = blockIdx.x / row_tiles / column_tiles;
  if (first_row >= rows) return;
  const int latent_dim = p.dims.kv_lora_rank;
  const auto* const latent =
      static_cast<const float*>(p.latent_out.data) + head * p.latent_out.head_stride;
  const auto* const weight =
      static_cast<const __nv_bfloat16*>(p.kv_b_proj) +
      (head * (p.dims.qk_nope_head_dim + p.dims.v_head_dim) + p.dims.qk_nope_head_dim) * latent_dim;

  const int thread_row = threadIdx.x / 16;
  const int thread_column = threadIdx.x % 16;
  float sums[kThreadTile][kThreadTile] = {};
  for (int first = 0; first < latent_dim; first += kTileLatent) {
    for (int i = threadIdx.x; i < kTile * kTileLatent; i += kThreads) {
      const int row = i / kTileLatent;
      const int l = i % kTileLatent;
      const bool in_latent = first + l < latent_dim;
      latent_tile[l][row] = in_latent && first_row + row < rows
                                ? latent[(first_row + row) * p.latent_out.row_stride + first + l]
                                : 0.0f;
      weight_tile[l][row] =
          in_latent && first_column + row < p.dims.v_head_dim
              ? __bfloat162float(weight[int64_t{first_column + row} * latent_dim + first + l])
              : 0.0f;
    }
    __syncthreads();
#pragma unroll 8
    for (int l = 0; l < kTileLatent; ++l) {
#pragma unroll
      for (int i = 0; i < kThreadTile; ++i) {
#pragma unroll
        for (int j = 0; j < kThreadTile; ++j) {
          sums[i][j] +=
              latent_tile[l][thread_row + 16 * i] * weight_tile[l][thread_column + 16 * j];
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kThreadTile; ++i) {
#pragma unroll
    for (int j = 0; j < kThreadTile; ++j) {
      const int64_t row = first_row + thread_row + 16 * i;
      const int column = first_column + thread_column + 16 * j;
      if (row >= rows || column >= p.dims.v_head_dim) continue;
      static_cast<float*>(
          p.values.data)[row * p.values.row_stride + head * p.values.head_stride + column] =
          sums[i][j];
    }
  }
}

}  // namespace

void copy_rope(const AbsorbQueryParams& p, cudaStream_t stream) {
  const int64_t values = p.num_rows.capacity * p.dims.num_heads * p.dims.qk_rope_head_dim;
  launch("launching copy_rope", copy_rope_kernel, divide_up(values, kThreads), kThreads, 0, stream,
         p);
}

void project_value(const ProjectValueParams& p, cudaStream_t stream) {
  const int64_t row_tiles = divide_up(p.num_rows.capacity, kTile);
  const int column_tiles = static_cast<int>(divide_up(p.dims.v_head_dim, kTile));
  launch("launching project_value", project_value_kernel,
         row_tiles * column_tiles * p.dims.num_heads, kThreads, 0, stream, p, row_tiles,
         column_tiles);
}

}  // namespace mla::cuda
