// A block merges tile after tile of 64 rows (token, head): first the weights of each row, then the
// values; the lse of the next tile are on their way meanwhile. A tile is 8 heads wide where there
// are as many, so that reads of either layout of the lse use whole sectors and reads of values are
// long.
#include <algorithm>

#include "kernels/convert.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/merge_attn_states.h"
#include "kernels/cuda/vector8.cuh"
#include "kernels/lse.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 64;
constexpr int kBlocksPerMultiprocessor = 3;

/// Vectors a thread has in flight on each side, within 80 registers.
template <typename Prefix, typename Suffix>
constexpr int kUnroll = sizeof(Prefix) + sizeof(Suffix) > 4 ? 2 : 4;

/// How rows lie in tiles.
struct MergeTiles {
  int head_shift = 0;  // a tile has 1 << head_shift heads
  int64_t head_tiles = 0;
  int64_t count = 0;
};

/// The rows of a tile; none where `index` is past the last one.
struct MergeTile {
  int64_t first_token = 0;
  int first_head = 0;
  int head_shift = 0;
  int tokens = 0;  // that exist
  int heads = 0;

  __device__ MergeTile(const MergeAttnStatesParams& p, const MergeTiles& tiles, int64_t index)
      : head_shift(tiles.head_shift) {
    const int tile_heads = 1 << head_shift;
    const int tile_tokens = kTileRows >> head_shift;
    first_token = index / tiles.head_tiles * tile_tokens;
    first_head = static_cast<int>(index % tiles.head_tiles) * tile_heads;
    tokens = static_cast<int>(
        max(min(length(p.num_tokens) - first_token, int64_t{tile_tokens}), int64_t{0}));
    heads = min(p.num_heads - first_head, tile_heads);
  }

  __device__ int token(int row) const { return row >> head_shift; }
  __device__ int head(int row) const { return row & ((1 << head_shift) - 1); }
  __device__ bool has(int row) const {
    return row < kTileRows && token(row) < tokens && head(row) < heads;
  }
  /// Elements from the start of a view to the row.
  template <typename View>
  __device__ int64_t offset(const View& view, int row) const {
    return (first_token + token(row)) * view.row_stride +
           (first_head + head(row)) * view.head_stride;
  }
};

/// The lse of this thread's row of the tile, as they were given: x the prefix's, y the suffix's.
__device__ float2 load_lse(const MergeAttnStatesParams& p, const MergeTile& tile) {
  const int row = static_cast<int>(threadIdx.x);
  if (!tile.has(row)) return {};
  const bool has_prefix =
      p.prefix_tokens < 0 || tile.first_token + tile.token(row) < p.prefix_tokens;
  return {has_prefix ? p.prefix_lse.data[tile.offset(p.prefix_lse, row)] : -INFINITY,
          p.suffix_lse.data[tile.offset(p.suffix_lse, row)]};
}

/// Finds this thread's row's weights and writes its lse. The thread that read a row's lse writes
/// it: in place is safe.
__device__ void merge_lse(const MergeAttnStatesParams& p, const MergeTile& tile, float2 lse,
                          float2 (&weights)[kTileRows]) {
  const int row = static_cast<int>(threadIdx.x);
  if (!tile.has(row)) return;
  const MergeWeights merged = merge_weights(lse.x, lse.y);
  weights[row] = {merged.prefix, merged.suffix};
  if (p.output_lse.data != nullptr) {
    p.output_lse.data[tile.offset(p.output_lse, row)] = merged.lse;
  }
}

/// Calls merge(tile, weights) for the block's tiles.
template <typename Merge>
__device__ void for_each_tile(const MergeAttnStatesParams& p, const MergeTiles& tiles,
                              const Merge& merge) {
  __shared__ float2 weights[2][kTileRows];  // of this tile and the next
  MergeTile tile(p, tiles, blockIdx.x);
  merge_lse(p, tile, load_lse(p, tile), weights[0]);
  __syncthreads();
  int current = 0;
  for (int64_t index = blockIdx.x; index < tiles.count; index += gridDim.x) {
    const MergeTile next(p, tiles, index + gridDim.x);
    const float2 next_lse = load_lse(p, next);
    merge(tile, weights[current]);
    current = 1 - current;
    merge_lse(p, next, next_lse, weights[current]);
    __syncthreads();
    tile = next;
  }
}

template <typename Prefix, typename Suffix, typename Output>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    merge_kernel(const __grid_constant__ MergeAttnStatesParams p,
                 const __grid_constant__ MergeTiles tiles) {
  // A thread keeps to its eight columns, so that it divides once.
  const int row_vectors = p.head_dim / 8;
  const int pass_rows = kThreads / row_vectors;
  const int thread_row = static_cast<int>(threadIdx.x) / row_vectors;
  const int column = (static_cast<int>(threadIdx.x) - thread_row * row_vectors) * 8;
  const int first_row = thread_row < pass_rows ? thread_row : kTileRows;
  const auto* const prefixes = static_cast<const Prefix*>(p.prefix_out.data) + column;
  const auto* const suffixes = static_cast<const Suffix*>(p.suffix_out.data) + column;
  auto* const outputs = static_cast<Output*>(p.output.data) + column;
  const Divider scale(p.output_scale == nullptr ? 1.0f : *p.output_scale);
  constexpr int kVectors = kUnroll<Prefix, Suffix>;

  for_each_tile(p, tiles, [&](const MergeTile& tile, const float2(&weights)[kTileRows]) {
    for (int first = first_row; first < kTileRows; first += pass_rows * kVectors) {
      Vector8<Prefix> prefix[kVectors];
      Vector8<Suffix> suffix[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int row = first + j * pass_rows;
        if (!tile.has(row)) continue;
        const float2 w = weights[row];
        if (w.x != 0.0f) prefix[j] = load8<true>(prefixes + tile.offset(p.prefix_out, row));
        if (w.y != 0.0f) suffix[j] = load8<true>(suffixes + tile.offset(p.suffix_out, row));
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int row = first + j * pass_rows;
        if (!tile.has(row)) continue;
        const MergeWeights w{weights[row].x, weights[row].y};
        Vector8<Output> output;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const float2 a = to_floats(prefix[j].e, i);
          const float2 b = to_floats(suffix[j].e, i);
          float2 merged{merge_values(w, a.x, b.x), merge_values(w, a.y, b.y)};
          if constexpr (sizeof(Output) == 1) {
            merged = {scale.divide(merged.x), scale.divide(merged.y)};
          }
          from_floats(merged, output.e, i);
        }
        store8<true>(outputs + tile.offset(p.output, row), output);
      }
    }
  });
}

__device__ float load_value(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kFloat16:
      return fp16_to_float(static_cast<const uint16_t*>(data)[at]);
    case DType::kBFloat16:
      return bf16_to_float(static_cast<const uint16_t*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

__device__ void store_value(float value, void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      static_cast<uint8_t*>(data)[at] = float_to_e4m3(value);
      break;
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[at] = float_to_fp16(value);
      break;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[at] = float_to_bf16(value);
      break;
    default:
      static_cast<float*>(data)[at] = value;
  }
}

/// Value by value, for views that vectors can't be loaded from.
__global__ void __launch_bounds__(kThreads)
    merge_unaligned_kernel(const __grid_constant__ MergeAttnStatesParams p,
                           const __grid_constant__ MergeTiles tiles) {
  const bool scaled = p.output.dtype == DType::kFloat8E4M3;
  for_each_tile(p, tiles, [&](const MergeTile& tile, const float2(&weights)[kTileRows]) {
    for (int i = threadIdx.x; i < kTileRows * p.head_dim; i += kThreads) {
      const int row = i / p.head_dim;
      const int column = i - row * p.head_dim;
      if (!tile.has(row)) continue;
      const auto load = [&](const ConstHeadRows& view, float weight) {
        return weight == 0.0f ? 0.0f
                              : load_value(view.data, view.dtype, tile.offset(view, row) + column);
      };
      const MergeWeights w{weights[row].x, weights[row].y};
      const float value =
          merge_values(w, load(p.prefix_out, w.prefix), load(p.suffix_out, w.suffix));
      store_value(scaled ? value / *p.output_scale : value, p.output.data, p.output.dtype,
                  tile.offset(p.output, row) + column);
    }
  });
}

using MergeKernel = void (*)(MergeAttnStatesParams, MergeTiles);

template <typename Prefix, typename Suffix>
MergeKernel kernel_for_output(DType output) {
  switch (output) {
    case DType::kFloat32:
      return merge_kernel<Prefix, Suffix, float>;
    case DType::kFloat16:
      return merge_kernel<Prefix, Suffix, __half>;
    case DType::kBFloat16:
      return merge_kernel<Prefix, Suffix, __nv_bfloat16>;
    case DType::kFloat8E4M3:
      return merge_kernel<Prefix, Suffix, __nv_fp8_e4m3>;
  }
  return nullptr;
}

template <typename Prefix>
MergeKernel kernel_for_suffix(DType suffix, DType output) {
  switch (suffix) {
    case DType::kFloat32:
      return kernel_for_output<Prefix, float>(output);
    case DType::kFloat16:
      return kernel_for_output<Prefix, __half>(output);
    default:
      return kernel_for_output<Prefix, __nv_bfloat16>(output);
  }
}

MergeKernel find_kernel(const MergeAttnStatesParams& p) {
  const auto aligned = [](const auto& view) {
    return vector_aligned(view.data, view.dtype, view.row_stride, view.head_stride);
  };
  if (!aligned(p.prefix_out) || !aligned(p.suffix_out) || !aligned(p.output)) {
    return merge_unaligned_kernel;
  }
  switch (p.prefix_out.dtype) {
    case DType::kFloat32:
      return kernel_for_suffix<float>(p.suffix_out.dtype, p.output.dtype);
    case DType::kFloat16:
      return kernel_for_suffix<__half>(p.suffix_out.dtype, p.output.dtype);
    default:
      return kernel_for_suffix<__nv_bfloat16>(p.suffix_out.dtype, p.output.dtype);
  }
}

}  // namespace

void merge_attn_states(const MergeAttnStatesParams& p, int multiprocessors, cudaStream_t stream) {
  MergeTiles tiles;
  while (tiles.head_shift < 3 && (1 << tiles.head_shift) < p.num_heads) ++tiles.head_shift;
  tiles.head_tiles = divide_up(p.num_heads, 1 << tiles.head_shift);
  tiles.count = divide_up(p.num_tokens.capacity, kTileRows >> tiles.head_shift) * tiles.head_tiles;
  const int64_t blocks = std::min(tiles.count, int64_t{kBlocksPerMultiprocessor} * multiprocessors);
  launch("launching merge_attn_states", find_kernel(p), blocks, kThreads, 0, stream, p, tiles);
}

}  // namespace mla::cuda
