#include "tests/kernels/cache_harness.h"

#include <cmath>
#include <cstring>

#include "tests/oracle/oracle.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

// Of fp8_ds_mla.
constexpr int64_t kTile = 128;
constexpr int64_t kScalesAt = 512;
constexpr int64_t kRopeAt = 528;
constexpr int64_t kDsMlaRowBytes = 656;

float read_float(const std::byte* data) {
  float value;
  memcpy(&value, data, sizeof(value));
  return value;
}

float read_bf16(const std::byte* data) {
  uint16_t upper;
  memcpy(&upper, data, sizeof(upper));
  const uint32_t bits = uint32_t{upper} << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

float read_e4m3(std::byte data) {
  const int code = std::to_integer<int>(data);
  const int exponent = (code >> 3) & 0xf;
  const int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(8.0f + static_cast<float>(mantissa), exponent - 10);
  return code >= 0x80 ? -magnitude : magnitude;
}

}  // namespace

int64_t CacheShape::row_bytes() const {
  switch (format) {
    case KvCacheFormat::kBf16:
      return 2 * row_values();
    case KvCacheFormat::kFp8E4M3:
      return row_values();
    case KvCacheFormat::kFp8DsMla:
      return kDsMlaRowBytes;
  }
  return 0;
}

int64_t CacheShape::page_stride() const {
  return (page_size * row_bytes() + page_gap + 15) / 16 * 16;
}

HostCache::HostCache(const CacheShape& shape)
    : shape_(shape), bytes_(shape.bytes(), std::byte{kPoison}) {}

std::span<std::byte> HostCache::row(int64_t slot) {
  const int64_t page = slot / shape_.page_size;
  const int64_t offset = slot % shape_.page_size;
  return std::span(bytes_).subspan(page * shape_.page_stride() + offset * shape_.row_bytes(),
                                   shape_.row_bytes());
}

void HostCache::randomize_row(int64_t slot, std::mt19937_64& random) {
  const std::span<std::byte> bytes = row(slot);
  const auto write_bf16 = [&](int64_t from, int64_t count) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) {
      const float value = oracle::round_to_bf16(normal(random));
      memcpy(&bytes[from + 2 * i], reinterpret_cast<const std::byte*>(&value) + 2, 2);
    }
  };
  const auto write_e4m3 = [&](int64_t count) {
    std::uniform_int_distribution<int> codes(0, 0x7e);
    for (int64_t i = 0; i < count; ++i) {
      bytes[i] = static_cast<std::byte>(codes(random) | (random() % 2 == 0 ? 0x80 : 0));
    }
  };
  switch (shape_.format) {
    case KvCacheFormat::kBf16:
      write_bf16(0, shape_.row_values());
      return;
    case KvCacheFormat::kFp8E4M3:
      write_e4m3(shape_.row_values());
      return;
    case KvCacheFormat::kFp8DsMla: {
      write_e4m3(kScalesAt);
      std::uniform_real_distribution<float> exponent(-12.0f, 3.0f);
      for (int64_t tile = 0; tile < 4; ++tile) {
        const float scale = std::exp2(exponent(random));
        memcpy(&bytes[kScalesAt + 4 * tile], &scale, sizeof(scale));
      }
      write_bf16(kRopeAt, shape_.rope);
    }
  }
}

std::vector<float> HostCache::read_row(int64_t slot) {
  const std::span<const std::byte> bytes = row(slot);
  std::vector<float> values(shape_.row_values());
  for (int64_t i = 0; i < shape_.row_values(); ++i) {
    switch (shape_.format) {
      case KvCacheFormat::kBf16:
        values[i] = read_bf16(&bytes[2 * i]);
        break;
      case KvCacheFormat::kFp8E4M3:
        values[i] = oracle::round_to_bf16(read_e4m3(bytes[i]) * shape_.scale);
        break;
      case KvCacheFormat::kFp8DsMla:
        values[i] = i < shape_.lora
                        ? oracle::round_to_bf16(read_e4m3(bytes[i]) *
                                                read_float(&bytes[kScalesAt + 4 * (i / kTile)]))
                        : read_bf16(&bytes[kRopeAt + 2 * (i - shape_.lora)]);
    }
  }
  return values;
}

std::vector<float> through_cache(const CacheShape& shape, std::span<const float> row) {
  switch (shape.format) {
    case KvCacheFormat::kBf16:
      break;
    case KvCacheFormat::kFp8E4M3:
      return oracle::through_fp8_e4m3(row, shape.scale);
    case KvCacheFormat::kFp8DsMla:
      return oracle::through_fp8_ds_mla(row);
  }
  return {row.begin(), row.end()};
}

DeviceCache::DeviceCache(Backend& backend, HostCache& host)
    : backend_(&backend), shape_(host.shape()), memory_(backend, host.bytes().size()) {
  backend.copy_to_device(memory_.data(), host.bytes().data(), memory_.bytes(), {});
  backend.synchronize({});
}

LatentCache DeviceCache::view() const {
  return {memory_.data(),   shape_.format,    shape_.scale,
          shape_.num_pages, shape_.page_size, shape_.page_stride()};
}

void DeviceCache::download_to(HostCache& host) const {
  backend_->copy_to_host(host.bytes().data(), memory_.data(), memory_.bytes(), {});
  backend_->synchronize({});
}

}  // namespace mla::test
