// A block merges 64 rows (token, head): first the weights of each, then the values, eight at a
// time. A tile is 8 heads wide where there are as many, so that reads of either layout of the LSE
// use whole sectors and reads of values are long.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/merge_attn_states.h"
#include "kernels/lse.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 64;
constexpr int kUnroll = 2;  // vectors a thread has in flight on each side

struct MergeTiles {
  int head_shift = 0;  // a tile has 1 << head_shift heads
  uint32_t head_tiles = 0;
  bool prefix_aligned = false;
  bool suffix_aligned = false;
  bool output_aligned = false;
};

__device__ float2 merge_lse(const MergeAttnStatesParams& p, int64_t token, int64_t head) {
  const bool has_prefix = p.prefix_tokens < 0 || token < p.prefix_tokens;
  const auto at = [&](const auto& lse) {
    return lse.data + head * lse.head_stride + token * lse.row_stride;
  };
  const MergeWeights weights =
      merge_weights(has_prefix ? *at(p.prefix_lse) : -INFINITY, *at(p.suffix_lse));
  if (p.output_lse.data != nullptr) *at(p.output_lse) = weights.lse;
  return {weights.prefix, weights.suffix};
}

template <typename Prefix, typename Suffix, typename Output>
__global__ void __launch_bounds__(kThreads, 4)
    merge_kernel(const __grid_constant__ MergeAttnStatesParams p,
                 const __grid_constant__ MergeTiles tiles) {
  __shared__ float2 row_weights[kTileRows];
  const int64_t tokens = length(p.num_tokens);
  const int64_t first_token =
      int64_t{blockIdx.x / tiles.head_tiles} * (kTileRows >> tiles.head_shift);
  const int first_head = static_cast<int>(blockIdx.x % tiles.head_tiles) << tiles.head_shift;
  if (first_token >= tokens) return;

  const auto token_of = [&](int row) { return first_token + (row >> tiles.head_shift); };
  const auto head_of = [&](int row) { return first_head + (row & ((1 << tiles.head_shift) - 1)); };
  const auto exists = [&](int row) { return token_of(row) < tokens && head_of(row) < p.num_heads; };

  if (threadIdx.x < kTileRows && exists(threadIdx.x)) {
    row_weights[threadIdx.x] = merge_lse(p, token_of(threadIdx.x), head_of(threadIdx.x));
  }
  __syncthreads();

  const auto address = [&](const auto& view, int row, int column, auto* type) {
    return static_cast<decltype(type)>(view.data) + token_of(row) * view.row_stride +
           head_of(row) * view.head_stride + column;
  };
  const float scale = p.output_scale == nullptr ? 1.0f : *p.output_scale;
  const int row_vectors = p.head_dim / 8;
  const int vectors = kTileRows * row_vectors;
  for (int first = threadIdx.x; first < vectors; first += kThreads * kUnroll) {
    Vector8<Prefix> prefix[kUnroll];
    Vector8<Suffix> suffix[kUnroll];
    MergeWeights weights[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int row = (first + j * kThreads) / row_vectors;
      const int column = (first + j * kThreads - row * row_vectors) * 8;
      if (row >= kTileRows || !exists(row)) continue;
      weights[j].prefix = row_weights[row].x;
      weights[j].suffix = row_weights[row].y;
      if (weights[j].prefix != 0.0f) {
        prefix[j] = load8(address(p.prefix_out, row, column, static_cast<const Prefix*>(nullptr)),
                          tiles.prefix_aligned);
      }
      if (weights[j].suffix != 0.0f) {
        suffix[j] = load8(address(p.suffix_out, row, column, static_cast<const Suffix*>(nullptr)),
                          tiles.suffix_aligned);
      }
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int row = (first + j * kThreads) / row_vectors;
      const int column = (first + j * kThreads - row * row_vectors) * 8;
      if (row >= kTileRows || !exists(row)) continue;
      Vector8<Output> output;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float value = merge_values(weights[j], static_cast<float>(prefix[j].e[i]),
                                         static_cast<float>(suffix[j].e[i]));
        if constexpr (sizeof(Output) == 1) {
          output.e[i] = Output(value / scale);  // saturates
        } else {
          output.e[i] = static_cast<Output>(value);
        }
      }
      store8(address(p.output, row, column, static_cast<Output*>(nullptr)), output,
             tiles.output_aligned);
    }
  }
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
    case DType::kBFloat16:
      return kernel_for_output<Prefix, __nv_bfloat16>(output);
    default:
      return nullptr;
  }
}

MergeKernel find_kernel(const MergeAttnStatesParams& p) {
  switch (p.prefix_out.dtype) {
    case DType::kFloat32:
      return kernel_for_suffix<float>(p.suffix_out.dtype, p.output.dtype);
    case DType::kFloat16:
      return kernel_for_suffix<__half>(p.suffix_out.dtype, p.output.dtype);
    case DType::kBFloat16:
      return kernel_for_suffix<__nv_bfloat16>(p.suffix_out.dtype, p.output.dtype);
    default:
      return nullptr;
  }
}

template <typename Pointer>
bool is_aligned(const BasicHeadRows<Pointer>& view) {
  return vector_aligned(view.data, view.dtype, view.row_stride, view.head_stride);
}

}  // namespace

void merge_attn_states(const MergeAttnStatesParams& p, cudaStream_t stream) {
  MergeTiles tiles;
  while (tiles.head_shift < 3 && (1 << tiles.head_shift) < p.num_heads) ++tiles.head_shift;
  tiles.head_tiles = static_cast<uint32_t>(divide_up(p.num_heads, 1 << tiles.head_shift));
  tiles.prefix_aligned = is_aligned(p.prefix_out);
  tiles.suffix_aligned = is_aligned(p.suffix_out);
  tiles.output_aligned = is_aligned(p.output);
  const int64_t token_tiles = divide_up(p.num_tokens.capacity, kTileRows >> tiles.head_shift);
  launch("launching merge_attn_states", find_kernel(p), token_tiles * tiles.head_tiles, kThreads, 0,
         stream, p, tiles);
}

}  // namespace mla::cuda
