// A kernel compiled by cuda_library links into a program, which also starts without a driver.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/build/scale.h"

namespace mla::build_test {
namespace {

TEST(CudaToolchain, LaunchesAKernel) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";

  std::vector<float> values = {1, 2, 3, 4};
  const size_t bytes = values.size() * sizeof(float);
  float* device = nullptr;
  ASSERT_EQ(cudaMalloc(&device, bytes), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(device, values.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
  ASSERT_EQ(scale(device, static_cast<int>(values.size()), 2.0f, nullptr), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(values.data(), device, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(cudaFree(device), cudaSuccess);
  EXPECT_EQ(values, (std::vector<float>{2, 4, 6, 8}));
}

TEST(CudaToolchain, RuntimeMatchesItsHeaders) {
  int version = 0;
  ASSERT_EQ(cudaRuntimeGetVersion(&version), cudaSuccess);
  EXPECT_EQ(version, CUDART_VERSION);
}

}  // namespace
}  // namespace mla::build_test
