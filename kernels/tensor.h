// Views of tensors in the caller's memory. Strides are in elements and 64 bits wide; the last
// dimension is contiguous. A view whose data is null stands for "not given".
#ifndef KERNELS_TENSOR_H_
#define KERNELS_TENSOR_H_

#include <cstdint>

#include "metadata/model.h"

namespace mla {

/// [rows, columns]
template <typename Pointer>
struct BasicRows {
  Pointer data = nullptr;
  DType dtype = DType::kBFloat16;
  int64_t row_stride = 0;
};
/// [rows, heads, dim]. A head stride of 0 shares one row among all heads.
template <typename Pointer>
struct BasicHeadRows {
  Pointer data = nullptr;
  DType dtype = DType::kBFloat16;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};
/// Log-sum-exp, natural log, float32; the default layout is [heads, rows].
template <typename Pointer>
struct BasicLse {
  Pointer data = nullptr;
  int64_t head_stride = 0;
  int64_t row_stride = 1;
};

using Rows = BasicRows<void*>;
using HeadRows = BasicHeadRows<void*>;
using Lse = BasicLse<float*>;
using ConstRows = BasicRows<const void*>;
using ConstHeadRows = BasicHeadRows<const void*>;
using ConstLse = BasicLse<const float*>;

inline ConstRows as_const(const Rows& v) { return {v.data, v.dtype, v.row_stride}; }
inline ConstHeadRows as_const(const HeadRows& v) {
  return {v.data, v.dtype, v.row_stride, v.head_stride};
}
inline ConstLse as_const(const Lse& v) { return {v.data, v.head_stride, v.row_stride}; }

/// A length that a launch is sized by. Where `actual` is given (backend memory), kernels read the
/// real length there, at most `capacity`; a captured launch so serves every plan of its class.
struct Count {
  int64_t capacity = 0;
  const int32_t* actual = nullptr;
};

}  // namespace mla

#endif  // KERNELS_TENSOR_H_
