// Row-major float32 products, each computed by the calling thread alone.
#ifndef KERNELS_CPU_GEMM_H_
#define KERNELS_CPU_GEMM_H_

#include <cstdint>

namespace mla::cpu {

/// c[m, n] = a[m, k] b[n, k]^T
void gemm_nt(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
             int64_t ldb, float* c, int64_t ldc);

/// c[m, n] = a[m, k] b[k, n], added to what c holds where `accumulate`; c is not read otherwise.
void gemm_nn(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
             int64_t ldb, bool accumulate, float* c, int64_t ldc);

}  // namespace mla::cpu

#endif  // KERNELS_CPU_GEMM_H_
