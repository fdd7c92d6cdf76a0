#include "kernels/cuda/sm90/tensor_maps.h"

#include <cuda_runtime_api.h>

#include "kernels/cuda/check.h"
#include "kernels/cuda/sm90/tile_config.h"
#include "metadata/error.h"

namespace mla::sm90 {
namespace {

constexpr uint64_t kElementBytes = 2;

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

/// Found at run time, so that programs start where there is no driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    constexpr unsigned kFirstVersion = 12000;
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kFirstVersion,
                                                cudaEnableDefault, &result),
               "looking up cuTensorMapEncodeTiled");
    if (entry == nullptr || result != cudaDriverEntryPointSuccess) {
      throw_error(ErrorCode::kDevice,
                  "the driver has no cuTensorMapEncodeTiled (CUDA {} is needed)",
                  kFirstVersion / 1000);
    }
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

}  // namespace

int32_t head_step(const ConstHeadRows& view, int32_t num_heads) {
  return num_heads > 1 && view.head_stride != 0 ? 1 : 0;
}

TensorMapSpec head_rows_spec(const ConstHeadRows& view, int32_t dim, int32_t num_heads,
                             int64_t rows, int32_t box_rows) {
  const bool shared = head_step(view, num_heads) == 0;
  // A stride of a single head is never used, but must be a valid one.
  const int64_t head_stride = shared ? view.row_stride : view.head_stride;
  TensorMapSpec spec;
  spec.dtype = view.dtype;
  spec.data = view.data;
  spec.rank = 3;
  spec.dims = {static_cast<uint64_t>(dim), shared ? 1 : static_cast<uint64_t>(num_heads),
               static_cast<uint64_t>(rows)};
  spec.stride_bytes = {static_cast<uint64_t>(head_stride) * kElementBytes,
                       static_cast<uint64_t>(view.row_stride) * kElementBytes};
  spec.box = {kPanelColumns, 1, static_cast<uint32_t>(box_rows)};
  return spec;
}

TensorMapSpec rows_spec(const ConstRows& view, int32_t dim, int64_t rows, int32_t box_rows) {
  TensorMapSpec spec;
  spec.dtype = view.dtype;
  spec.data = view.data;
  spec.rank = 2;
  spec.dims = {static_cast<uint64_t>(dim), static_cast<uint64_t>(rows), 0};
  spec.stride_bytes = {static_cast<uint64_t>(view.row_stride) * kElementBytes, 0};
  spec.box = {kPanelColumns, static_cast<uint32_t>(box_rows), 0};
  return spec;
}

CUtensorMap encode(const TensorMapSpec& spec) {
  CUtensorMap map{};
  const std::array<uint32_t, 3> element_strides = {1, 1, 1};
  const CUresult result =
      encode_tiled()(&map,
                     spec.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                     spec.rank, const_cast<void*>(spec.data), spec.dims.data(),
                     spec.stride_bytes.data(), spec.box.data(), element_strides.data(),
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw_error(
        ErrorCode::kDevice,
        "the driver refused a tensor map of {} x {} x {} elements with strides of {} and {} "
        "bytes: error {}",
        spec.dims[0], spec.dims[1], spec.dims[2], spec.stride_bytes[0], spec.stride_bytes[1],
        static_cast<int>(result));
  }
  return map;
}

}  // namespace mla::sm90
