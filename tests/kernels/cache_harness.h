// A paged latent cache in host bytes, decoded by the format's description alone.
#ifndef TESTS_KERNELS_CACHE_HARNESS_H_
#define TESTS_KERNELS_CACHE_HARNESS_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kernels/backend.h"

namespace mla::test {

struct CacheShape {
  KvCacheFormat format = KvCacheFormat::kBf16;
  int32_t lora = 512;
  int32_t rope = 64;
  int32_t num_pages = 0;
  int32_t page_size = 0;
  int64_t page_gap = 0;  // bytes between pages, before page_stride is rounded up to 16
  float scale = 1.0f;    // kFp8E4M3

  int64_t row_bytes() const;
  int64_t page_stride() const;
  int64_t bytes() const { return num_pages * page_stride(); }
  int32_t row_values() const { return lora + rope; }
};

class HostCache {
 public:
  /// Every byte is poison: NaN in each of the formats.
  explicit HostCache(const CacheShape& shape);

  std::span<std::byte> row(int64_t slot);
  /// Finite values of all sizes that the format has.
  void randomize_row(int64_t slot, std::mt19937_64& random);
  /// What the row reads as: value in float32, rounded once to bf16.
  std::vector<float> read_row(int64_t slot);

  const CacheShape& shape() const { return shape_; }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  CacheShape shape_;
  std::vector<std::byte> bytes_;
};

/// The row as a cache of that shape gives it back, by the oracle.
std::vector<float> through_cache(const CacheShape& shape, std::span<const float> row);

/// The same cache in backend memory.
class DeviceCache {
 public:
  DeviceCache(Backend& backend, HostCache& host);
  LatentCache view() const;
  void download_to(HostCache& host) const;

 private:
  Backend* backend_;
  CacheShape shape_;
  DeviceBuffer memory_;
};

}  // namespace mla::test

#endif  // TESTS_KERNELS_CACHE_HARNESS_H_
