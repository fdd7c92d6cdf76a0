// Eight consecutive elements: how kernels move and convert them.
#ifndef KERNELS_CUDA_VECTOR8_CUH_
#define KERNELS_CUDA_VECTOR8_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"

namespace mla::cuda {

/// Moved in units of 16 bytes, e4m3 in units of 8.
template <typename T>
struct alignas(sizeof(T) == 1 ? 8 : 16) Vector8 {
  T e[8];
};

/// Whether data, and what lies multiples of the strides further on, can be moved as Vector8.
inline bool vector_aligned(const void* data, DType dtype, int64_t stride,
                           int64_t other_stride = 0) {
  const int64_t alignment = dtype_bytes(dtype) == 1 ? 8 : 16;
  const int64_t elements = alignment / dtype_bytes(dtype);
  return reinterpret_cast<uintptr_t>(data) % alignment == 0 && stride % elements == 0 &&
         other_stride % elements == 0;
}

template <bool kAligned, typename T>
__device__ inline Vector8<T> load8(const T* data) {
  if constexpr (kAligned) {
    return *reinterpret_cast<const Vector8<T>*>(data);
  } else {
    Vector8<T> vector;
#pragma unroll
    for (int i = 0; i < 8; ++i) vector.e[i] = data[i];
    return vector;
  }
}

template <bool kAligned, typename T>
__device__ inline void store8(T* data, const Vector8<T>& vector) {
  if constexpr (kAligned) {
    *reinterpret_cast<Vector8<T>*>(data) = vector;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) data[i] = vector.e[i];
  }
}

// Conversions of two values take one instruction, of one value as many.

__device__ inline float2 to_floats(const float (&e)[8], int i) { return {e[i], e[i + 1]}; }
__device__ inline float2 to_floats(const __half (&e)[8], int i) {
  return __half22float2({e[i], e[i + 1]});
}
__device__ inline float2 to_floats(const __nv_bfloat16 (&e)[8], int i) {
  return __bfloat1622float2({e[i], e[i + 1]});
}
__device__ inline float2 to_floats(const __nv_fp8_e4m3 (&e)[8], int i) {
  const auto pair = static_cast<__nv_fp8x2_storage_t>(e[i].__x | e[i + 1].__x << 8);
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
}

// All round to nearest even; e4m3 saturates.

__device__ inline void from_floats(float2 x, float (&e)[8], int i) {
  e[i] = x.x;
  e[i + 1] = x.y;
}
__device__ inline void from_floats(float2 x, __half (&e)[8], int i) {
  const __half2 pair = __float22half2_rn(x);
  e[i] = pair.x;
  e[i + 1] = pair.y;
}
__device__ inline void from_floats(float2 x, __nv_bfloat16 (&e)[8], int i) {
  const __nv_bfloat162 pair = __float22bfloat162_rn(x);
  e[i] = pair.x;
  e[i + 1] = pair.y;
}
__device__ inline void from_floats(float2 x, __nv_fp8_e4m3 (&e)[8], int i) {
  const __nv_fp8x2_storage_t pair = __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3);
  e[i].__x = static_cast<__nv_fp8_storage_t>(pair & 0xff);
  e[i + 1].__x = static_cast<__nv_fp8_storage_t>(pair >> 8);
}

/// Divides by one positive number again and again: x / divisor rounded to nearest, as operator/
/// does, in three operations (Markstein, "Computation of elementary functions on the IBM RISC
/// System/6000 processor", 1990, theorem 8.1) where the reciprocal is a normal number.
class Divider {
 public:
  __device__ explicit Divider(float divisor)
      : divisor_(divisor),
        reciprocal_(1.0f / divisor),
        is_normal_(divisor > 1e-30f && divisor < 1e30f) {}

  __device__ float divide(float x) const {
    if (!is_normal_) return x / divisor_;
    const float quotient = x * reciprocal_;
    const float corrected = fmaf(fmaf(-quotient, divisor_, x), reciprocal_, quotient);
    // Corrected, infinity would turn into NaN and -0 into 0.
    return isfinite(quotient) && quotient != 0.0f ? corrected : quotient;
  }

 private:
  float divisor_;
  float reciprocal_;
  bool is_normal_;
};

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_VECTOR8_CUH_
