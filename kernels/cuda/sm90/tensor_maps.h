// Tensor maps: how the copy engine sees q, k_nope, k_pe and v.
#ifndef KERNELS_CUDA_SM90_TENSOR_MAPS_H_
#define KERNELS_CUDA_SM90_TENSOR_MAPS_H_

#include <cuda.h>

#include <array>
#include <cstdint>

#include "kernels/tensor.h"

namespace mla::sm90 {

/// The arguments of a tensor map, dimensions from the contiguous one on: {dim, heads, rows} or
/// {dim, rows}. Boxes are one panel wide (64 elements, 128 bytes, swizzled) and rows past the end
/// read as zeros.
struct TensorMapSpec {
  DType dtype = DType::kBFloat16;
  const void* data = nullptr;
  uint32_t rank = 0;
  std::array<uint64_t, 3> dims{};
  std::array<uint64_t, 2> stride_bytes{};  // of dimensions 1 and 2
  std::array<uint32_t, 3> box{};
};

/// One head at a time. Where the heads share rows (stride 0), or there is one head, the map has one
/// head and the head coordinate stays 0: head_step() says what to multiply head numbers by.
TensorMapSpec head_rows_spec(const ConstHeadRows& view, int32_t dim, int32_t num_heads,
                             int64_t rows, int32_t box_rows);
TensorMapSpec rows_spec(const ConstRows& view, int32_t dim, int64_t rows, int32_t box_rows);
int32_t head_step(const ConstHeadRows& view, int32_t num_heads);

/// Asks the driver; throws kDevice where it refuses or there is none.
CUtensorMap encode(const TensorMapSpec& spec);

}  // namespace mla::sm90

#endif  // KERNELS_CUDA_SM90_TENSOR_MAPS_H_
