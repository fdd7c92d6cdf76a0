// Tensors and arrays in backend memory, as tests make them.
#ifndef TESTS_SUPPORT_DEVICE_TENSOR_H_
#define TESTS_SUPPORT_DEVICE_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/tensor.h"

namespace mla::test {

/// The nearest value of the type, ties to even.
float round_to_dtype(double x, DType dtype);

/// [rows, heads, dim] with any strides, in elements. All of its memory is poison (NaN) until
/// values are uploaded, and stays poison between the values and in a zone around them, which shows
/// reads and writes that stray.
class DeviceTensor {
 public:
  struct Shape {
    int64_t rows = 0;
    int64_t heads = 1;
    int64_t dim = 1;
    int64_t row_stride = 0;   // 0: contiguous
    int64_t head_stride = 0;  // 0: contiguous
  };

  DeviceTensor(Backend& backend, DType dtype, const Shape& shape);
  DeviceTensor(Backend& backend, DType dtype, const Shape& shape, std::span<const float> values)
      : DeviceTensor(backend, dtype, shape) {
    upload(values);
  }
  /// An LSE of [heads, rows] in memory, the default layout, or [rows, heads].
  static DeviceTensor lse(Backend& backend, int64_t rows, int64_t heads, bool rows_first = false);

  /// `values` in the order [rows][heads][dim]; each must be a value of the dtype.
  void upload(std::span<const float> values);
  std::vector<float> download() const;
  /// The whole memory, zones included, for comparing bit by bit.
  std::vector<std::byte> image() const;
  void restore(std::span<const std::byte> image);
  /// Whether all memory but the values still is poison.
  bool padding_is_poison() const;

  const Shape& shape() const { return shape_; }
  HeadRows heads(int64_t first_column = 0) const;
  ConstHeadRows const_heads(int64_t first_column = 0) const {
    return as_const(heads(first_column));
  }
  Rows rows(int64_t first_column = 0) const;  // as [rows, *]
  ConstRows const_rows(int64_t first_column = 0) const { return as_const(rows(first_column)); }
  Lse lse() const;
  ConstLse const_lse() const { return as_const(lse()); }

 private:
  size_t value_offset(int64_t row, int64_t head) const;  // in bytes, in the image
  std::byte* data(int64_t first_column) const;

  Backend* backend_;
  DType dtype_;
  Shape shape_;
  DeviceBuffer memory_;
};

/// A copy of host values in backend memory.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(Backend& backend, std::span<const T> values)
      : memory_(backend, values.size() * sizeof(T)) {
    if (values.empty()) return;
    backend.copy_to_device(memory_.data(), values.data(), memory_.bytes(), {});
    backend.synchronize({});
  }
  DeviceArray(Backend& backend, const std::vector<T>& values)
      : DeviceArray(backend, std::span<const T>(values)) {}
  T* data() const { return static_cast<T*>(memory_.data()); }

 private:
  DeviceBuffer memory_;
};

}  // namespace mla::test

#endif  // TESTS_SUPPORT_DEVICE_TENSOR_H_
