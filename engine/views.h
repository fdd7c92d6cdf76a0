// Parts of tensor views.
#ifndef ENGINE_VIEWS_H_
#define ENGINE_VIEWS_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/tensor.h"

namespace mla {

template <typename Pointer>
Pointer offset_bytes(Pointer data, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte,
                                  std::byte>;
  return static_cast<Byte*>(data) + bytes;
}

/// The views from `row` on.
template <typename Pointer>
BasicRows<Pointer> from_row(BasicRows<Pointer> view, int64_t row) {
  view.data = offset_bytes(view.data, row * view.row_stride * dtype_bytes(view.dtype));
  return view;
}
template <typename Pointer>
BasicHeadRows<Pointer> from_row(BasicHeadRows<Pointer> view, int64_t row) {
  view.data = offset_bytes(view.data, row * view.row_stride * dtype_bytes(view.dtype));
  return view;
}
inline Lse from_row(Lse view, int64_t row) {
  if (view.data != nullptr) view.data += row * view.row_stride;
  return view;
}

/// Columns from `column` on, the same for every head.
inline ConstRows from_column(ConstRows view, int64_t column) {
  view.data = offset_bytes(view.data, column * dtype_bytes(view.dtype));
  return view;
}

/// One row shared by all heads.
inline ConstHeadRows shared_by_heads(const ConstRows& view) {
  return {view.data, view.dtype, view.row_stride, 0};
}

}  // namespace mla

#endif  // ENGINE_VIEWS_H_
