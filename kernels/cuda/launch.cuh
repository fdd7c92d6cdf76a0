// What the kernels of this folder share: launching, and the lengths that launches serve.
#ifndef KERNELS_CUDA_LAUNCH_CUH_
#define KERNELS_CUDA_LAUNCH_CUH_

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

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_LAUNCH_CUH_
