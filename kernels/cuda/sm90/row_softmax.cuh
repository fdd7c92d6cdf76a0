// The running softmax of a consumer thread.
#ifndef KERNELS_CUDA_SM90_ROW_SOFTMAX_CUH_
#define KERNELS_CUDA_SM90_ROW_SOFTMAX_CUH_

#include <cmath>

#include "kernels/cuda/sm90/ptx.cuh"

namespace mla::sm90 {

/// Running softmax of the two rows that a thread shares with the other lanes of its quad. Scores
/// are in units of log2: s * scale with scale = softmax_scale * log2(e).
struct RowSoftmax {
  // Rows keep an older maximum while the new one is at most this much larger (in log2): powers then
  // reach 2^8, far from overflow in fp16 as well, and O needs no rescaling for most blocks.
  static constexpr float kSlack = 8.0f;

  float max[2];     // reference maximum, unscaled
  float sum[2];     // this lane's part
  float factor[2];  // what the last block's new reference multiplies O by

  __device__ void reset() {
    for (int r = 0; r < 2; ++r) {
      max[r] = -INFINITY;
      sum[r] = 0.0f;
    }
  }

  /// What is subtracted from scaled scores. 0 while a row has seen no key: its scores are -inf.
  __device__ float offset(int r, float scale) const {
    return max[r] == -INFINITY ? 0.0f : max[r] * scale;
  }

  /// Replaces scores by their powers, moves the reference and adds up. Returns whether O must be
  /// multiplied by `factor` (or a sum is NaN). A row's bits depend on its own scores alone.
  template <int kCount>
  __device__ __forceinline__ bool apply(float (&s)[kCount], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float a = fmaxf(s[2 * r], s[2 * r + 1]);
      float b = fmaxf(s[4 + 2 * r], s[4 + 2 * r + 1]);
#pragma unroll
      for (int j = 8; j < kCount; j += 8) {
        a = fmaxf(a, fmaxf(s[j + 2 * r], s[j + 2 * r + 1]));
        b = fmaxf(b, fmaxf(s[j + 4 + 2 * r], s[j + 4 + 2 * r + 1]));
      }
      a = fmaxf(a, b);
      a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
      a = fmaxf(a, __shfl_xor_sync(~0u, a, 2));
      const float growth = (a - max[r]) * scale;  // NaN for -inf - -inf: then nothing moves
      const bool move = growth > kSlack;
      factor[r] = move ? fast_exp2(-growth) : 1.0f;
      max[r] = move ? a : max[r];
      const float subtract = offset(r, scale);
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int j = 0; j < kCount; j += 4) {
        s[j + 2 * r] = fast_exp2(fmaf(s[j + 2 * r], scale, -subtract));
        s[j + 2 * r + 1] = fast_exp2(fmaf(s[j + 2 * r + 1], scale, -subtract));
        even += s[j + 2 * r];
        odd += s[j + 2 * r + 1];
      }
      sum[r] = fmaf(sum[r], factor[r], even + odd);
    }
    return __any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f || !(sum[0] + sum[1] >= 0.0f));
  }
};

}  // namespace mla::sm90

#endif  // KERNELS_CUDA_SM90_ROW_SOFTMAX_CUH_
