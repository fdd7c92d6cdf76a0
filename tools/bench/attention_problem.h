// One attention problem on the device: inputs as the engine lays them out, items, outputs, and
// the comparison with the float64 reference.
#ifndef TOOLS_BENCH_ATTENTION_PROBLEM_H_
#define TOOLS_BENCH_ATTENTION_PROBLEM_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/prefill_attention.h"
#include "metadata/model.h"
#include "tools/bench/reference_attention.h"

namespace mla::bench {

class DeviceArray {
 public:
  explicit DeviceArray(size_t bytes = 0);
  ~DeviceArray();
  DeviceArray(DeviceArray&& other) noexcept { swap(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    swap(other);
    return *this;
  }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }
  void fill(uint8_t value);
  void upload(const void* host, size_t bytes);
  void download(void* host, size_t bytes) const;

 private:
  void swap(DeviceArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
};

struct ProblemOptions {
  ModelDims dims;
  DType dtype = DType::kBFloat16;
  std::vector<AttentionItem> items;
  bool float32_out = false;
  bool prefix = false;        // merge into a running partial
  bool in_place = false;      // out and lse are the prefix; float32_out
  bool lse_by_row = false;    // [rows, heads] instead of [heads, rows]
  bool device_count = false;  // the number of items is read on the device; capacity is larger
  int32_t spare_rows = 0;     // rows of q and keys past the last item's, NaN
  uint64_t seed = 0;
};

/// Errors against the reference. NaN in any of them fails every comparison.
struct ProblemErrors {
  double relative = 0;     // Frobenius norm of the error / norm, over the compared rows
  double worst_lse = 0;    // |error| / max(1, |lse|)
  int64_t wrong_rows = 0;  // empty rows that are not exactly 0 / -inf or the prefix; other
                           // rows (no item's) that were written
};

/// q [q_rows, H, P + Rr]; k_nope and v views of an expansion [k_rows, H, P + V]; k_pe the tail
/// of latent rows [k_rows, L + Rr]. Rows of no item hold NaN.
class AttentionProblem {
 public:
  explicit AttentionProblem(const ProblemOptions& options);

  const PrefillAttentionParams& params() const { return params_; }
  std::span<std::byte> scratch() const { return {scratch_.as<std::byte>(), scratch_.bytes()}; }
  /// 2 H (P + Rr + V) times the scores that the items show.
  double flops() const;

  /// Fills outputs and scratch with NaN, and the prefix with its values.
  void reset();
  void run(int max_blocks, cudaStream_t stream) const;
  /// Compares all rows, or `max_rows` random ones.
  ProblemErrors compare(int max_rows) const;
  /// Bytes of out and lse.
  std::vector<uint8_t> output_bits() const;

 private:
  void make_prefix();

  ProblemOptions options_;
  int64_t q_rows_ = 0, k_rows_ = 0, out_rows_ = 0;
  DeviceArray q_, expanded_, latent_, items_, count_, out_, lse_, prefix_out_, prefix_lse_,
      scratch_;
  std::vector<float> host_prefix_out_, host_prefix_lse_;  // [rows, H, V], [rows, H]
  PrefillAttentionParams params_;
};

}  // namespace mla::bench

#endif  // TOOLS_BENCH_ATTENTION_PROBLEM_H_
