// cuBLASLt, loaded when a backend is made: programs start on machines that have none.
#ifndef KERNELS_CUDA_CUBLAS_LOADER_H_
#define KERNELS_CUDA_CUBLAS_LOADER_H_

#include <cublasLt.h>

#include <string>

#include "metadata/error.h"

namespace mla::cuda {

/// The functions in use, under their own names.
struct CublasLt {
  decltype(&::cublasLtCreate) Create = nullptr;
  decltype(&::cublasLtDestroy) Destroy = nullptr;
  decltype(&::cublasLtGetVersion) GetVersion = nullptr;
  decltype(&::cublasLtGetStatusName) GetStatusName = nullptr;
  decltype(&::cublasLtMatmulDescCreate) MatmulDescCreate = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) MatmulDescDestroy = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) MatrixLayoutCreate = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy = nullptr;
  decltype(&::cublasLtMatrixLayoutSetAttribute) MatrixLayoutSetAttribute = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic = nullptr;
  decltype(&::cublasLtMatmul) Matmul = nullptr;

  /// Throws kDevice, naming the call and its status, unless it succeeded.
  void check(cublasStatus_t status, const char* call) const {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw_error(ErrorCode::kDevice, "{} failed: {}", call, GetStatusName(status));
  }
};

/// Loads the library once a process, from the loader's path or else from CUDA_HOME or
/// /usr/local/cuda, and keeps it. Throws kDevice, saying what was looked for, where it is not
/// there.
const CublasLt& load_cublas_lt();

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_CUBLAS_LOADER_H_
