#include "tests/build/scale.h"

namespace mla::build_test {
namespace {

__global__ void scale_kernel(float* values, int n, float factor) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) values[i] *= factor;
}

}  // namespace

cudaError_t scale(float* values, int n, float factor, cudaStream_t stream) {
  constexpr int kThreads = 256;
  scale_kernel<<<(n + kThreads - 1) / kThreads, kThreads, 0, stream>>>(values, n, factor);
  return cudaGetLastError();
}

}  // namespace mla::build_test
