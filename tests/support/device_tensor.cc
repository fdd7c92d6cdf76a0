#include "tests/support/device_tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "kernels/convert.h"
#include "tests/oracle/oracle.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

// On each side; a multiple of the alignment of allocations.
constexpr size_t kZoneBytes = 256;

// convert.h here only stores values that the type holds; its rounding has a test of its own.
void store(std::byte* address, float value, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      memcpy(address, &value, sizeof(value));
      return;
    case DType::kFloat16:
    case DType::kBFloat16: {
      const uint16_t bits = dtype == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
      memcpy(address, &bits, sizeof(bits));
      return;
    }
    case DType::kFloat8E4M3:
      *address = std::byte{float_to_e4m3(value)};
  }
}

float load(const std::byte* address, DType dtype) {
  if (dtype == DType::kFloat32) {
    float value;
    memcpy(&value, address, sizeof(value));
    return value;
  }
  if (dtype == DType::kFloat8E4M3) return e4m3_to_float(std::to_integer<uint8_t>(*address));
  uint16_t bits;
  memcpy(&bits, address, sizeof(bits));
  return dtype == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

}  // namespace

float round_to_dtype(double x, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<float>(x);
    case DType::kFloat16: {
      if (x == 0.0 || !std::isfinite(x)) return static_cast<float>(x);
      const int exponent = std::max(std::ilogb(x), -14) - 10;
      const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
      return std::fabs(rounded) < 65520.0 ? static_cast<float>(rounded)
                                          : std::copysign(HUGE_VALF, static_cast<float>(x));
    }
    case DType::kBFloat16:
      return oracle::round_to_bf16(x);
    case DType::kFloat8E4M3:
      return oracle::round_to_e4m3(x);
  }
  return NAN;
}

DeviceTensor::DeviceTensor(Backend& backend, DType dtype, const Shape& shape)
    : backend_(&backend), dtype_(dtype), shape_(shape) {
  if (shape_.head_stride == 0) shape_.head_stride = shape_.dim;
  if (shape_.row_stride == 0) shape_.row_stride = shape_.heads * shape_.head_stride;
  int64_t elements = 0;
  if (shape_.rows > 0) {
    elements = (shape_.rows - 1) * shape_.row_stride + (shape_.heads - 1) * shape_.head_stride +
               shape_.dim;
  }
  memory_ = DeviceBuffer(backend, 2 * kZoneBytes + elements * dtype_bytes(dtype));
  backend.fill_bytes(memory_.data(), kPoison, memory_.bytes(), {});
  backend.synchronize({});
}

DeviceTensor DeviceTensor::lse(Backend& backend, int64_t rows, int64_t heads, bool rows_first) {
  return DeviceTensor(backend, DType::kFloat32,
                      {.rows = rows,
                       .heads = heads,
                       .dim = 1,
                       .row_stride = rows_first ? heads : 1,
                       .head_stride = rows_first ? 1 : rows});
}

size_t DeviceTensor::value_offset(int64_t row, int64_t head) const {
  return kZoneBytes + (row * shape_.row_stride + head * shape_.head_stride) * dtype_bytes(dtype_);
}

void DeviceTensor::upload(std::span<const float> values) {
  if (values.size() != static_cast<size_t>(shape_.rows * shape_.heads * shape_.dim)) {
    throw std::invalid_argument("DeviceTensor: wrong number of values");
  }
  std::vector<std::byte> bytes = image();
  const float* value = values.data();
  for (int64_t r = 0; r < shape_.rows; ++r) {
    for (int64_t h = 0; h < shape_.heads; ++h) {
      std::byte* address = bytes.data() + value_offset(r, h);
      for (int64_t d = 0; d < shape_.dim; ++d, ++value, address += dtype_bytes(dtype_)) {
        store(address, *value, dtype_);
      }
    }
  }
  restore(bytes);
}

std::vector<float> DeviceTensor::download() const {
  const std::vector<std::byte> bytes = image();
  std::vector<float> values;
  values.reserve(shape_.rows * shape_.heads * shape_.dim);
  for (int64_t r = 0; r < shape_.rows; ++r) {
    for (int64_t h = 0; h < shape_.heads; ++h) {
      const std::byte* address = bytes.data() + value_offset(r, h);
      for (int64_t d = 0; d < shape_.dim; ++d, address += dtype_bytes(dtype_)) {
        values.push_back(load(address, dtype_));
      }
    }
  }
  return values;
}

std::vector<std::byte> DeviceTensor::image() const {
  std::vector<std::byte> bytes(memory_.bytes());
  backend_->copy_to_host(bytes.data(), memory_.data(), bytes.size(), {});
  backend_->synchronize({});
  return bytes;
}

void DeviceTensor::restore(std::span<const std::byte> image) {
  backend_->copy_to_device(memory_.data(), image.data(), image.size(), {});
  backend_->synchronize({});
}

bool DeviceTensor::padding_is_poison() const {
  std::vector<std::byte> bytes = image();
  for (int64_t r = 0; r < shape_.rows; ++r) {
    for (int64_t h = 0; h < shape_.heads; ++h) {
      std::fill_n(bytes.begin() + value_offset(r, h), shape_.dim * dtype_bytes(dtype_),
                  std::byte{kPoison});
    }
  }
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte b) { return b == std::byte{kPoison}; });
}

std::byte* DeviceTensor::data(int64_t first_column) const {
  return static_cast<std::byte*>(memory_.data()) + kZoneBytes + first_column * dtype_bytes(dtype_);
}

HeadRows DeviceTensor::heads(int64_t first_column) const {
  return {data(first_column), dtype_, shape_.row_stride, shape_.head_stride};
}

Rows DeviceTensor::rows(int64_t first_column) const {
  return {data(first_column), dtype_, shape_.row_stride};
}

Lse DeviceTensor::lse() const {
  return {reinterpret_cast<float*>(data(0)), shape_.head_stride, shape_.row_stride};
}

}  // namespace mla::test
