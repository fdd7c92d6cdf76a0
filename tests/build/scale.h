#ifndef TESTS_BUILD_SCALE_H_
#define TESTS_BUILD_SCALE_H_

#include <cuda_runtime.h>

namespace mla::build_test {

// Multiplies the `n` floats at `values`, in device memory, by `factor`, on `stream`.
cudaError_t scale(float* values, int n, float factor, cudaStream_t stream);

}  // namespace mla::build_test

#endif  // TESTS_BUILD_SCALE_H_
