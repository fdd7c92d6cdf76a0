// The host's part of a launch. It stands apart since nvcc does not read {fmt}'s format checks,
// which mla::Error comes with.
#ifndef KERNELS_CUDA_LAUNCH_H_
#define KERNELS_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace mla::cuda {

/// A grid in one dimension: y and z end at 65,535 blocks. Throws kInvalidArgument, naming `what`,
/// above 2^31 - 1.
cudaLaunchConfig_t launch_config(const char* what, int64_t blocks, int threads, size_t shared_bytes,
                                 cudaStream_t stream);

/// Throws kDevice, naming `what`, unless `error` is cudaSuccess.
void check_launch(cudaError_t error, const char* what);

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_LAUNCH_H_
