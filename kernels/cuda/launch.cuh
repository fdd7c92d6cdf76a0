// What the kernels of this folder share: launching, counts, and access to eight elements at a time.
#ifndef KERNELS_CUDA_LAUNCH_CUH_
#define KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cuda/launch.h"
#include "kernels/tensor.h"

namespace mla::cuda {

/// Launches kernel<<<blocks, threads, shared_bytes, stream>>>(args...). No blocks: nothing to do.
template <typename... Params, typename... Args>
void launch(const char* what, void (*kernel)(Params...), int64_t blocks, int threads,
            size_t shared_bytes, cudaStream_t stream, Args&&... args) {
  if (blocks <= 0) return;
  const cudaLaunchConfig_t config = launch_config(what, blocks, threads, shared_bytes, stream);
  check_launch(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), what);
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// The length that a count stands for now.
__device__ inline int64_t length(const Count& count) {
  if (count.actual == nullptr) return count.capacity;
  const int64_t actual = *count.actual;
  return actual < 0 ? 0 : (actual < count.capacity ? actual : count.capacity);
}

/// Eight consecutive elements, moved in units of up to 16 bytes.
template <typename T>
struct alignas(sizeof(T) == 1 ? 8 : 16) Vector8 {
  T e[8];
};

template <typename T>
__device__ inline Vector8<T> load8(const T* data, bool aligned) {
  if (aligned) return *reinterpret_cast<const Vector8<T>*>(data);
  Vector8<T> vector;
#pragma unroll
  for (int i = 0; i < 8; ++i) vector.e[i] = data[i];
  return vector;
}

template <typename T>
__device__ inline void store8(T* data, const Vector8<T>& vector, bool aligned) {
  if (aligned) {
    *reinterpret_cast<Vector8<T>*>(data) = vector;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) data[i] = vector.e[i];
}

/// Whether data, and what lies multiples of the strides further on, can be moved as Vector8.
inline bool vector_aligned(const void* data, DType dtype, int64_t stride,
                           int64_t other_stride = 0) {
  const size_t alignment = dtype_bytes(dtype) == 1 ? 8 : 16;
  const int64_t elements = static_cast<int64_t>(alignment) / dtype_bytes(dtype);
  return reinterpret_cast<uintptr_t>(data) % alignment == 0 && stride % elements == 0 &&
         other_stride % elements == 0;
}

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_LAUNCH_CUH_
