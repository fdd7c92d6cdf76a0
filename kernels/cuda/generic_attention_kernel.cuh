// Prefill attention on mma.sync: a block takes 64 queries of one item and head through its keys, 64
// at a time, with running maximum and sum (Milakov and Gimelshein, "Online normalizer calculation
// for softmax", 2018). Each of 4 warps has 16 queries.
//
// K and V have one buffer each in shared memory: the next K is on its way during softmax and P V,
// the next V during Q K^T. Dims are padded with zeros to those of the variant.
#ifndef KERNELS_CUDA_GENERIC_ATTENTION_KERNEL_CUH_
#define KERNELS_CUDA_GENERIC_ATTENTION_KERNEL_CUH_

#include "kernels/cuda/generic_attention_args.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/lse.h"

namespace mla::cuda {

/// Rows of shared memory are 16 bytes longer than their values, an odd multiple of 16 bytes, so
/// that the eight rows of a fragment lie in different banks.
template <typename T, int kQkDim, int kVDim>
struct AttentionTiles {
  static constexpr int kQkRow = kQkDim + 8;
  static constexpr int kVRow = kVDim + 8;

  T q[kQueryTile * kQkRow];
  T k[kKeyTile * kQkRow];
  T v[kKeyTile * kVRow];
};

/// What a block works on.
struct QueryTile {
  AttentionItem item;
  int64_t head = 0;
  int32_t first = 0;  // query of the item

  /// Keys that query `i` of the item sees.
  __device__ int32_t visible(int64_t i) const {
    const int64_t keys = i + item.causal_offset + 1;
    if (item.causal_offset == kUnmasked) return item.k_len;
    return static_cast<int32_t>(keys < 0 ? 0 : (keys < item.k_len ? keys : item.k_len));
  }
};

/// Starts the copy of `rows` rows of `dim` columns; the rest of the tile is filled with zeros.
template <int kRows, int kDim, int kTileStride, typename T>
__device__ inline void copy_rows(T* tile, const T* source, int64_t stride, int rows, int dim) {
  constexpr int kUnits = kDim / 8;
  for (int i = threadIdx.x; i < kRows * kUnits; i += kAttentionThreads) {
    const int row = i / kUnits;
    const int column = i % kUnits * 8;
    const bool valid = row < rows && column < dim;
    copy16_async(tile + row * kTileStride + column, valid ? source + row * stride + column : source,
                 valid);
  }
}

template <typename T, int kQkDim, int kVDim>
class AttentionBlock {
  using Tiles = AttentionTiles<T, kQkDim, kVDim>;
  using Math = Half2<T>;
  static constexpr int kKeyGroups = kKeyTile / 8;  // 8 keys: one fragment of scores
  static constexpr int kVGroups = kVDim / 8;

 public:
  __device__ AttentionBlock(const PrefillAttentionParams& p, const QueryTile& tile, Tiles& tiles)
      : p_(p), tile_(tile), tiles_(tiles) {}

  __device__ void run() {
    const int32_t last = min(tile_.first + kQueryTile, tile_.item.q_len) - 1;
    keys_ = tile_.visible(last);  // the most that any query of the tile sees
    const int32_t seen_by_all = tile_.visible(tile_.first);
    if (keys_ > 0) {
      load_q(last + 1 - tile_.first);
      load_k(0);
      commit_copies();
      for (int32_t first_key = 0; first_key < keys_; first_key += kKeyTile) {
        load_v(first_key);
        commit_copies();
        wait_copies<1>();  // q and k
        __syncthreads();
        float scores[kKeyGroups][4] = {};
        multiply_q_k(scores);
        __syncthreads();
        if (first_key + kKeyTile < keys_) load_k(first_key + kKeyTile);
        commit_copies();
        const bool masked = seen_by_all < first_key + kKeyTile;
        if (masked) mask(scores, first_key);
        update_softmax(scores);
        wait_copies<1>();  // v
        __syncthreads();
        if (masked) {
          accumulate_values<true>(scores, first_key);
        } else {
          accumulate_values<false>(scores, first_key);
        }
        __syncthreads();
      }
      wait_copies<0>();
    }
    write();
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp_row() { return threadIdx.x / 32 * 16; }
  /// Query of the item that half (0 or 1) of this lane's fragments belongs to.
  __device__ int32_t query(int half) const {
    return tile_.first + warp_row() + lane() / 4 + half * 8;
  }

  __device__ void load_q(int rows) {
    const T* const q = static_cast<const T*>(p_.q.data) +
                       (int64_t{tile_.item.q_begin} + tile_.first) * p_.q.row_stride +
                       tile_.head * p_.q.head_stride;
    copy_rows<kQueryTile, kQkDim, Tiles::kQkRow>(tiles_.q, q, p_.q.row_stride, rows,
                                                 p_.qk_nope_head_dim + p_.qk_rope_head_dim);
  }

  /// [k_nope, k_pe, zeros]
  __device__ void load_k(int32_t first_key) {
    const int64_t key = int64_t{tile_.item.k_begin} + first_key;
    const T* const nope = static_cast<const T*>(p_.k_nope.data) + key * p_.k_nope.row_stride +
                          tile_.head * p_.k_nope.head_stride;
    const T* const rope = static_cast<const T*>(p_.k_pe.data) + key * p_.k_pe.row_stride;
    const int rows = min(kKeyTile, keys_ - first_key);
    constexpr int kUnits = kQkDim / 8;
    for (int i = threadIdx.x; i < kKeyTile * kUnits; i += kAttentionThreads) {
      const int row = i / kUnits;
      const int column = i % kUnits * 8;
      const int rope_column = column - p_.qk_nope_head_dim;
      const T* source = rope_column < 0 ? nope + row * p_.k_nope.row_stride + column
                                        : rope + row * p_.k_pe.row_stride + rope_column;
      const bool valid = row < rows && rope_column < p_.qk_rope_head_dim;
      copy16_async(tiles_.k + row * Tiles::kQkRow + column, valid ? source : nope, valid);
    }
  }

  __device__ void load_v(int32_t first_key) {
    const T* const v = static_cast<const T*>(p_.v.data) +
                       (int64_t{tile_.item.k_begin} + first_key) * p_.v.row_stride +
                       tile_.head * p_.v.head_stride;
    copy_rows<kKeyTile, kVDim, Tiles::kVRow>(tiles_.v, v, p_.v.row_stride,
                                             min(kKeyTile, keys_ - first_key), p_.v_head_dim);
  }

  __device__ void multiply_q_k(float (&scores)[kKeyGroups][4]) const {
    const int row = lane() % 16;
    const int column = lane() / 16 * 8;
    // Of 16 keys: matrices (keys 0-7, d 0-7), (keys 0-7, d 8-15), (keys 8-15, ..), (.., ..).
    const int key = lane() % 8 + lane() / 16 * 8;
    const int key_column = lane() / 8 % 2 * 8;
#pragma unroll 4
    for (int d = 0; d < kQkDim; d += 16) {
      uint32_t a[4];
      load_matrices(a, tiles_.q + (warp_row() + row) * Tiles::kQkRow + d + column);
#pragma unroll
      for (int group = 0; group < kKeyGroups; group += 2) {
        uint32_t b[4];
        load_matrices(b, tiles_.k + (group * 8 + key) * Tiles::kQkRow + d + key_column);
        Math::multiply_add(scores[group], a, b[0], b[1]);
        Math::multiply_add(scores[group + 1], a, b[2], b[3]);
      }
    }
  }

  /// Whether value i of fragment `group` is seen by its query.
  __device__ bool sees(const int32_t (&visible)[2], int32_t first_key, int group, int i) const {
    return first_key + group * 8 + lane() % 4 * 2 + i % 2 < visible[i / 2];
  }

  __device__ void mask(float (&scores)[kKeyGroups][4], int32_t first_key) const {
    const int32_t visible[2] = {tile_.visible(query(0)), tile_.visible(query(1))};
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!sees(visible, first_key, group, i)) scores[group][i] = -INFINITY;
      }
    }
  }

  /// Turns scores into weights exp(score - max), and rescales what was summed before.
  __device__ void update_softmax(float (&scores)[kKeyGroups][4]) {
    const float log2_scale = p_.softmax_scale * 1.4426950408889634f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = max_[half];
#pragma unroll
      for (int group = 0; group < kKeyGroups; ++group) {
        largest = fmaxf(largest, fmaxf(scores[group][2 * half], scores[group][2 * half + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      // A row that has seen no key yet has no maximum to subtract.
      const float shift = largest == -INFINITY ? 0.0f : largest * log2_scale;
      const float rescale = exp2f(max_[half] * log2_scale - shift);
      max_[half] = largest;
      float sum = 0.0f;
#pragma unroll
      for (int group = 0; group < kKeyGroups; ++group) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[group][i] = exp2f(fmaf(scores[group][i], log2_scale, -shift));
          sum += scores[group][i];
        }
      }
      sum_[half] = sum_[half] * rescale + sum;
#pragma unroll
      for (int group = 0; group < kVGroups; ++group) {
        out_[group][2 * half] *= rescale;
        out_[group][2 * half + 1] *= rescale;
      }
    }
  }

  /// out += weights V. Where the mask cuts through the block, a value that is not finite must reach
  /// the queries that see it and no other, though 0 * NaN is NaN: it counts as 0 in the product,
  /// and a second product, of who sees a key and which values are not finite, says what is NaN.
  template <bool kMasked>
  __device__ void accumulate_values(const float (&weights)[kKeyGroups][4], int32_t first_key) {
    const int32_t visible[2] = {tile_.visible(query(0)), tile_.visible(query(1))};
    const int key = lane() % 16;
    const int column = lane() / 16 * 8;
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step) {
      const float(&low)[4] = weights[2 * step];
      const float(&high)[4] = weights[2 * step + 1];
      const uint32_t a[4] = {Math::pack(low[0], low[1]), Math::pack(low[2], low[3]),
                             Math::pack(high[0], high[1]), Math::pack(high[2], high[3])};
#pragma unroll
      for (int group = 0; group < kVGroups; group += 2) {
        uint32_t b[4];
        load_matrices_transposed(b,
                                 tiles_.v + (step * 16 + key) * Tiles::kVRow + group * 8 + column);
        if constexpr (kMasked) {
          uint32_t odd[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) odd[i] = not_finite<T>(b[i]);
          if (__any_sync(~0u, (odd[0] | odd[1] | odd[2] | odd[3]) != 0)) {
            uint32_t seen[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int keys = 2 * step + i / 2;
              seen[i] = (sees(visible, first_key, keys, i % 2 * 2) ? 0xffffu : 0u) |
                        (sees(visible, first_key, keys, i % 2 * 2 + 1) ? 0xffff0000u : 0u);
              seen[i] &= Math::kOnes;
            }
            spread_nan(out_[group], seen, odd[0], odd[1]);
            spread_nan(out_[group + 1], seen, odd[2], odd[3]);
#pragma unroll
            for (int i = 0; i < 4; ++i) b[i] &= ~odd[i];
          }
        }
        Math::multiply_add(out_[group], a, b[0], b[1]);
        Math::multiply_add(out_[group + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ static void spread_nan(float (&sums)[4], const uint32_t (&seen)[4], uint32_t odd0,
                                    uint32_t odd1) {
    float count[4] = {};
    Math::multiply_add(count, seen, odd0 & Math::kOnes, odd1 & Math::kOnes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (count[i] > 0.0f) sums[i] = NAN;
    }
  }

  __device__ void write() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int32_t i = query(half);
      const int64_t row = int64_t{tile_.item.out_row} + i;
      const bool exists = i < tile_.item.q_len;
      const bool empty = !exists || tile_.visible(i) == 0;
      const float lse = empty ? -INFINITY : max_[half] * p_.softmax_scale + logf(sum);
      const float factor = empty ? 0.0f : 1.0f / sum;

      MergeWeights weights{0.0f, empty ? 0.0f : 1.0f, lse};
      const bool has_prefix = exists && p_.prefix_out.data != nullptr;
      if (has_prefix) {
        weights = merge_weights(
            p_.prefix_lse
                .data[tile_.head * p_.prefix_lse.head_stride + row * p_.prefix_lse.row_stride],
            lse);
      }
      __syncwarp();  // the prefix's lse may be where the lse goes
      if (!exists) continue;
      if (p_.lse.data != nullptr && lane() % 4 == 0) {
        p_.lse.data[tile_.head * p_.lse.head_stride + row * p_.lse.row_stride] = weights.lse;
      }
#pragma unroll
      for (int group = 0; group < kVGroups; ++group) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = group * 8 + lane() % 4 * 2 + j;
          if (column >= p_.v_head_dim) continue;
          float value = out_[group][2 * half + j] * factor;
          if (has_prefix) {
            const float* const prefix = static_cast<const float*>(p_.prefix_out.data) +
                                        row * p_.prefix_out.row_stride +
                                        tile_.head * p_.prefix_out.head_stride;
            value = merge_values(weights, weights.prefix == 0.0f ? 0.0f : prefix[column], value);
          }
          const int64_t at = row * p_.out.row_stride + tile_.head * p_.out.head_stride + column;
          if (p_.out.dtype == DType::kFloat32) {
            static_cast<float*>(p_.out.data)[at] = value;
          } else {
            static_cast<T*>(p_.out.data)[at] = static_cast<T>(value);
          }
        }
      }
    }
  }

  const PrefillAttentionParams& p_;
  const QueryTile& tile_;
  Tiles& tiles_;
  int32_t keys_ = 0;
  float max_[2] = {-INFINITY, -INFINITY};
  float sum_[2] = {0.0f, 0.0f};  // of this lane's columns
  float out_[kVGroups][4] = {};
};

/// Blocks in the order of query tiles, heads, items: neighbours share keys. Late query tiles, which
/// see most keys, come first.
template <typename T, int kQkDim, int kVDim>
__global__ void __launch_bounds__(kAttentionThreads)
    generic_attention_kernel(const __grid_constant__ PrefillAttentionParams p,
                             int64_t query_tiles) {
  extern __shared__ __align__(16) std::byte shared[];
  const int64_t item = blockIdx.x / query_tiles / p.num_heads;
  if (item >= length(p.num_items)) return;
  QueryTile tile;
  tile.item = p.items[item];
  tile.head = blockIdx.x / query_tiles % p.num_heads;
  tile.first = static_cast<int32_t>(query_tiles - 1 - blockIdx.x % query_tiles) * kQueryTile;
  if (tile.first >= tile.item.q_len) return;
  AttentionBlock<T, kQkDim, kVDim>(p, tile,
                                   *reinterpret_cast<AttentionTiles<T, kQkDim, kVDim>*>(shared))
      .run();
}

template <typename T, int kQkDim, int kVDim>
AttentionVariant attention_variant(DType dtype) {
  return {kQkDim, kVDim, dtype, sizeof(AttentionTiles<T, kQkDim, kVDim>),
          generic_attention_kernel<T, kQkDim, kVDim>};
}

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_GENERIC_ATTENTION_KERNEL_CUH_
