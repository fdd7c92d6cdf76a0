#include "kernels/cuda/gemm.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

namespace mla::cuda {
namespace {

// The algorithm is the best one for this many rows.
constexpr int64_t kTypicalRows = 65536;
constexpr uint32_t kAlignment = 16;  // bytes

/// cuBLASLt's descriptors of a product. cuBLAS counts by columns, so row-major [m, n] is its [n, m]
/// and the weight comes first.
class Descriptors {
 public:
  Descriptors(const CublasLt& lt, const Product& p) : lt_(lt) {
    lt_.check(lt_.MatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              "cublasLtMatmulDescCreate");
    const cublasOperation_t transpose = p.weight_by_output ? CUBLAS_OP_T : CUBLAS_OP_N;
    lt_.check(lt_.MatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                         sizeof(transpose)),
              "cublasLtMatmulDescSetAttribute");
    weight_ = p.weight_by_output ? layout(p.k, p.n, p.weight, p.batch)
                                 : layout(p.n, p.k, p.weight, p.batch);
    rows_ = layout(p.k, p.m, p.rows, p.batch);
    out_ = layout(p.n, p.m, p.out, p.batch);
  }
  ~Descriptors() {
    for (const cublasLtMatrixLayout_t layout : {weight_, rows_, out_}) {
      if (layout != nullptr) lt_.MatrixLayoutDestroy(layout);
    }
    if (operation_ != nullptr) lt_.MatmulDescDestroy(operation_);
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

  cublasLtMatmulDesc_t operation() const { return operation_; }
  cublasLtMatrixLayout_t weight() const { return weight_; }
  cublasLtMatrixLayout_t rows() const { return rows_; }
  cublasLtMatrixLayout_t out() const { return out_; }

 private:
  cublasLtMatrixLayout_t layout(int64_t contiguous, int64_t count, const Product::Matrix& matrix,
                                int64_t batch) {
    cublasLtMatrixLayout_t result = nullptr;
    // A single row may come with any stride.
    const int64_t stride = count == 1 ? contiguous : matrix.row_stride;
    lt_.check(lt_.MatrixLayoutCreate(&result, CUDA_R_16BF, static_cast<uint64_t>(contiguous),
                                     static_cast<uint64_t>(count), stride),
              "cublasLtMatrixLayoutCreate");
    if (batch > 1) {
      const int32_t matrices = static_cast<int32_t>(batch);
      lt_.MatrixLayoutSetAttribute(result, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &matrices,
                                   sizeof(matrices));
      lt_.MatrixLayoutSetAttribute(result, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                   &matrix.batch_stride, sizeof(matrix.batch_stride));
    }
    return result;
  }

  const CublasLt& lt_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t weight_ = nullptr;
  cublasLtMatrixLayout_t rows_ = nullptr;
  cublasLtMatrixLayout_t out_ = nullptr;
};

void check_alignment(const Product::Matrix& matrix, std::string_view name) {
  if (reinterpret_cast<uintptr_t>(matrix.data) % kAlignment != 0) {
    throw_error(ErrorCode::kUnsupported, "{} is at {}, CUDA products need multiples of {} bytes",
                name, matrix.data, kAlignment);
  }
  for (const int64_t stride : {matrix.row_stride, matrix.batch_stride}) {
    if (stride % 8 == 0) continue;
    throw_error(ErrorCode::kUnsupported, "{} has stride {}, CUDA products need multiples of 8",
                name, stride);
  }
}

}  // namespace

Gemm::Gemm() : lt_(load_cublas_lt()) { lt_.check(lt_.Create(&handle_), "cublasLtCreate"); }

Gemm::~Gemm() { lt_.Destroy(handle_); }

cublasLtMatmulAlgo_t Gemm::algorithm(const Shape& shape) {
  const std::lock_guard lock(mutex_);
  if (const auto found = algorithms_.find(shape); found != algorithms_.end()) return found->second;

  const Product typical{
      .m = kTypicalRows,
      .n = shape.n,
      .k = shape.k,
      .batch = shape.batch,
      .weight_by_output = shape.weight_by_output,
      .rows = {nullptr, shape.k * shape.batch, shape.k},
      .weight = {nullptr, shape.weight_by_output ? shape.k : shape.n, shape.n * shape.k},
      .out = {nullptr, shape.n * shape.batch, shape.n}};
  const Descriptors descriptors(lt_, typical);
  cublasLtMatmulPreference_t preference = nullptr;
  lt_.check(lt_.MatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const std::unique_ptr<cublasLtMatmulPreferenceOpaque_t,
                        cublasStatus_t (*)(cublasLtMatmulPreference_t)>
      owner(preference, lt_.MatmulPreferenceDestroy);
  const uint64_t workspace = 0;
  const uint32_t no_split_k = CUBLASLT_REDUCTION_SCHEME_NONE;
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    lt_.check(lt_.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
              "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, no_split_k);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kAlignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kAlignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kAlignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kAlignment);

  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  const cublasStatus_t status = lt_.MatmulAlgoGetHeuristic(
      handle_, descriptors.operation(), descriptors.weight(), descriptors.rows(), descriptors.out(),
      descriptors.out(), preference, 1, &result, &found);
  lt_.check(status, "cublasLtMatmulAlgoGetHeuristic");
  if (found == 0) {
    throw_error(ErrorCode::kDevice, "cuBLASLt has no algorithm for n = {}, k = {}, batch {}",
                shape.n, shape.k, shape.batch);
  }
  algorithms_.emplace(shape, result.algo);
  return result.algo;
}

void Gemm::multiply(const Product& p, cudaStream_t stream) {
  if (p.m == 0) return;
  check_alignment(p.rows, "the input");
  check_alignment(p.weight, "kv_b_proj");
  check_alignment(p.out, "the output");
  const cublasLtMatmulAlgo_t algo = algorithm({p.n, p.k, p.batch, p.weight_by_output});
  const Descriptors descriptors(lt_, p);
  const float one = 1.0f;
  const float zero = 0.0f;
  void* const out = const_cast<void*>(p.out.data);
  lt_.check(lt_.Matmul(handle_, descriptors.operation(), &one, p.weight.data, descriptors.weight(),
                       p.rows.data, descriptors.rows(), &zero, out, descriptors.out(), out,
                       descriptors.out(), &algo, nullptr, 0, stream),
            "cublasLtMatmul");
}

}  // namespace mla::cuda
