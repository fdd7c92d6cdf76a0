// CUDA runtime errors as mla::Error.
#ifndef KERNELS_CUDA_CHECK_H_
#define KERNELS_CUDA_CHECK_H_

#include <cuda_runtime_api.h>

#include "metadata/error.h"

namespace mla {

/// Throws kDevice, naming `what` was done, unless `error` is cudaSuccess.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw_error(ErrorCode::kDevice, "{} failed: {} ({})", what, cudaGetErrorString(error),
              cudaGetErrorName(error));
}

}  // namespace mla

#endif  // KERNELS_CUDA_CHECK_H_
