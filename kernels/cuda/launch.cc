#include "kernels/cuda/launch.h"

#include <limits>

#include "kernels/cuda/check.h"
#include "metadata/error.h"

namespace mla::cuda {

cudaLaunchConfig_t launch_config(const char* what, int64_t blocks, int threads, size_t shared_bytes,
                                 cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
  if (blocks > kMaxBlocks) {
    throw_error(ErrorCode::kInvalidArgument, "{} would take {} blocks, at most {}", what, blocks,
                kMaxBlocks);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return config;
}

void check_launch(cudaError_t error, const char* what) { check_cuda(error, what); }

}  // namespace mla::cuda
