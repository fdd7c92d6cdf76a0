// Runs merge_attn_states on tensors of any layout and judges it by its definition in float64.
#ifndef TESTS_KERNELS_MERGE_HARNESS_H_
#define TESTS_KERNELS_MERGE_HARNESS_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/backend.h"
#include "tests/support/device_tensor.h"

namespace mla::test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct MergeLayout {
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;   // 0: contiguous
  int64_t head_stride = 0;  // 0: contiguous
  bool lse_rows_first = false;
};

struct MergeCase {
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  MergeLayout prefix = {};
  MergeLayout suffix = {};
  MergeLayout output = {};
  int64_t prefix_tokens = -1;
  float output_scale = 0.0f;   // e4m3 only
  int32_t actual_tokens = -1;  // negative: not given

  // [tokens][heads][dim] and [tokens][heads].
  std::vector<float> prefix_out = {};
  std::vector<float> prefix_lse = {};
  std::vector<float> suffix_out = {};
  std::vector<float> suffix_lse = {};
};

struct Merged {
  std::vector<float> out;
  std::vector<float> lse;
};

/// Which input the output shares its memory with; their layouts must agree.
enum class InPlace { kNo, kPrefix, kSuffix };

/// Outputs hold poison (NaN) where nothing was written; it also checks their padding.
Merged run_merge(Backend& backend, const OpContext& context, const MergeCase& merge,
                 InPlace in_place = InPlace::kNo);

/// Compares every value with the definition: within the output dtype's half unit in the last place,
/// and 4e-6 of the two terms, for the float32 exponentials. NaN must be found exactly where it is
/// expected, exact zeros too. Rows from `actual_tokens` on must be poison.
void expect_merged(const Merged& found, const MergeCase& merge);

}  // namespace mla::test

#endif  // TESTS_KERNELS_MERGE_HARNESS_H_
