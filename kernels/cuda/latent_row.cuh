// One row of the latent cache, eight values at a time.
#ifndef KERNELS_CUDA_LATENT_ROW_CUH_
#define KERNELS_CUDA_LATENT_ROW_CUH_

#include "kernels/cuda/vector8.cuh"
#include "kernels/latent_cache.h"

namespace mla::cuda {

// Layout of a kFp8DsMla row.
inline constexpr int kDsMlaLatent = 512;
inline constexpr int kDsMlaTile = 128;
inline constexpr int kDsMlaScales = 512;  // byte offsets
inline constexpr int kDsMlaRope = 528;

using Bf16x8 = Vector8<__nv_bfloat16>;
using E4m3x8 = Vector8<__nv_fp8_e4m3>;

/// Values rounded once from value * scale in float32.
__device__ inline Bf16x8 dequantise(const E4m3x8& stored, float scale) {
  Bf16x8 values;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float2 pair = to_floats(stored.e, i);
    from_floats({pair.x * scale, pair.y * scale}, values.e, i);
  }
  return values;
}

__device__ inline E4m3x8 quantise(const Bf16x8& values, const Divider& scale) {
  E4m3x8 stored;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float2 pair = to_floats(values.e, i);
    from_floats({scale.divide(pair.x), scale.divide(pair.y)}, stored.e, i);
  }
  return stored;
}

template <KvCacheFormat kFormat>
__host__ __device__ constexpr int64_t row_bytes(int latent, int rope) {
  switch (kFormat) {
    case KvCacheFormat::kBf16:
      return (latent + rope) * 2;
    case KvCacheFormat::kFp8E4M3:
      return latent + rope;
    case KvCacheFormat::kFp8DsMla:
      return kDsMlaRope + rope * 2;
  }
  return 0;
}

/// Values [8 * unit, 8 * unit + 8) of the row.
template <KvCacheFormat kFormat>
__device__ inline Bf16x8 read_unit(const std::byte* row, int unit, float cache_scale) {
  if constexpr (kFormat == KvCacheFormat::kBf16) {
    return reinterpret_cast<const Bf16x8*>(row)[unit];
  } else if constexpr (kFormat == KvCacheFormat::kFp8E4M3) {
    return dequantise(reinterpret_cast<const E4m3x8*>(row)[unit], cache_scale);
  } else {
    if (unit >= kDsMlaLatent / 8) {
      return reinterpret_cast<const Bf16x8*>(row + kDsMlaRope)[unit - kDsMlaLatent / 8];
    }
    const float scale = reinterpret_cast<const float*>(row + kDsMlaScales)[unit * 8 / kDsMlaTile];
    return dequantise(reinterpret_cast<const E4m3x8*>(row)[unit], scale);
  }
}

/// The scale of 128 values, eight in each of 16 neighbouring lanes. All lanes of the warp call it.
__device__ inline float ds_mla_scale(const Bf16x8& values) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(__bfloat162float(values.e[i])));
#pragma unroll
  for (int lanes = 8; lanes > 0; lanes /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
  }
  return largest == 0.0f ? 1.0f : largest / 448.0f;
}

/// Stores values [8 * unit, 8 * unit + 8) of the latent part, and by every 16th unit the scale.
__device__ inline void write_ds_mla_unit(std::byte* row, int unit, const Bf16x8& values,
                                         float scale) {
  reinterpret_cast<E4m3x8*>(row)[unit] = quantise(values, Divider(scale));
  if (unit % 16 == 0) reinterpret_cast<float*>(row + kDsMlaScales)[unit / 16] = scale;
}

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_LATENT_ROW_CUH_
