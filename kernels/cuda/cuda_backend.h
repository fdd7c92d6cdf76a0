// The CUDA backend. This header needs no CUDA header: a Stream's handle is a cudaStream_t.
#ifndef KERNELS_CUDA_CUDA_BACKEND_H_
#define KERNELS_CUDA_CUDA_BACKEND_H_

#include <memory>

#include "kernels/backend.h"

namespace mla {

/// Throws kDevice, saying what is missing, where there is no driver, no device of that index, no
/// compute capability 8.0 or later, or no cuBLAS to load. Ops leave the current device as it was.
std::unique_ptr<Backend> make_cuda_backend(int device = 0);

}  // namespace mla

#endif  // KERNELS_CUDA_CUDA_BACKEND_H_
