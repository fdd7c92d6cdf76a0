// Products of bf16 rows with bf16 weights, in float32, through cuBLASLt.
#ifndef KERNELS_CUDA_GEMM_H_
#define KERNELS_CUDA_GEMM_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <map>
#include <mutex>

#include "kernels/cuda/cublas_loader.h"

namespace mla::cuda {

/// out[b][m, n] = rows[b][m, k] w[b], for b in [0, batch): w[b] is [k, n] in memory, or [n, k]
/// where `weight_by_output`. All bf16; strides in elements.
struct Product {
  struct Matrix {
    const void* data = nullptr;
    int64_t row_stride = 0;
    int64_t batch_stride = 0;
  };
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t batch = 1;
  bool weight_by_output = true;
  Matrix rows;
  Matrix weight;
  Matrix out;  // written
};

/// The algorithm is chosen once for each (n, k, batch, layout) with many rows in mind, uses neither
/// split K nor a workspace, and then serves every m: a row's bits don't depend on how many others
/// come with it. Thread-safe.
class Gemm {
 public:
  Gemm();  // for the current device
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  /// Throws kUnsupported unless all data lie at multiples of 16 bytes and strides are multiples of
  /// 8, kDevice where the launch fails.
  void multiply(const Product& product, cudaStream_t stream);

 private:
  struct Shape {
    int64_t n, k, batch;
    bool weight_by_output;
    auto operator<=>(const Shape&) const = default;
  };
  cublasLtMatmulAlgo_t algorithm(const Shape& shape);

  const CublasLt& lt_;
  cublasLtHandle_t handle_ = nullptr;
  std::mutex mutex_;
  std::map<Shape, cublasLtMatmulAlgo_t> algorithms_;
};

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_GEMM_H_
