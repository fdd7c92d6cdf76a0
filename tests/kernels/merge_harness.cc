#include "tests/kernels/merge_harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace mla::test {
namespace {

DeviceTensor make_tensor(Backend& backend, const MergeCase& m, const MergeLayout& layout) {
  return DeviceTensor(backend, layout.dtype,
                      {.rows = m.tokens,
                       .heads = m.heads,
                       .dim = m.dim,
                       .row_stride = layout.row_stride,
                       .head_stride = layout.head_stride});
}

/// Largest error of one rounding: relative, and absolute among the subnormals.
struct Rounding {
  double relative;
  double absolute;
};
Rounding rounding_of(const MergeCase& m) {
  switch (m.output.dtype) {
    case DType::kFloat32:
      return {std::exp2(-24), std::exp2(-150)};
    case DType::kFloat16:
      return {std::exp2(-11), std::exp2(-25)};
    case DType::kBFloat16:
      return {std::exp2(-8), std::exp2(-134)};
    case DType::kFloat8E4M3:
      return {std::exp2(-4), std::exp2(-10) * m.output_scale};
  }
  return {};
}

double normalized(float lse) { return lse == kInf ? -double{kInf} : double{lse}; }

}  // namespace

Merged run_merge(Backend& backend, const OpContext& context, const MergeCase& m, InPlace in_place) {
  DeviceTensor prefix = make_tensor(backend, m, m.prefix);
  DeviceTensor suffix = make_tensor(backend, m, m.suffix);
  DeviceTensor output = make_tensor(backend, m, m.output);
  DeviceTensor prefix_lse = DeviceTensor::lse(backend, m.tokens, m.heads, m.prefix.lse_rows_first);
  DeviceTensor suffix_lse = DeviceTensor::lse(backend, m.tokens, m.heads, m.suffix.lse_rows_first);
  DeviceTensor output_lse = DeviceTensor::lse(backend, m.tokens, m.heads, m.output.lse_rows_first);
  prefix.upload(m.prefix_out);
  suffix.upload(m.suffix_out);
  prefix_lse.upload(m.prefix_lse);
  suffix_lse.upload(m.suffix_lse);
  const DeviceArray<float> scale(backend, std::vector<float>{m.output_scale});
  const DeviceArray<int32_t> actual(backend, std::vector<int32_t>{m.actual_tokens});

  DeviceTensor& result = in_place == InPlace::kPrefix   ? prefix
                         : in_place == InPlace::kSuffix ? suffix
                                                        : output;
  DeviceTensor& result_lse = in_place == InPlace::kPrefix   ? prefix_lse
                             : in_place == InPlace::kSuffix ? suffix_lse
                                                            : output_lse;
  backend.merge_attn_states(
      {.num_heads = static_cast<int32_t>(m.heads),
       .head_dim = static_cast<int32_t>(m.dim),
       .num_tokens = {m.tokens, m.actual_tokens < 0 ? nullptr : actual.data()},
       .prefix_tokens = m.prefix_tokens,
       .prefix_out = prefix.const_heads(),
       .prefix_lse = prefix_lse.const_lse(),
       .suffix_out = suffix.const_heads(),
       .suffix_lse = suffix_lse.const_lse(),
       .output = result.heads(),
       .output_lse = result_lse.lse(),
       .output_scale = m.output.dtype == DType::kFloat8E4M3 ? scale.data() : nullptr},
      context);
  backend.synchronize({});
  EXPECT_TRUE(result.padding_is_poison());
  EXPECT_TRUE(result_lse.padding_is_poison());
  return {result.download(), result_lse.download()};
}

void expect_merged(const Merged& found, const MergeCase& m) {
  const Rounding rounding = rounding_of(m);
  const int64_t tokens = m.actual_tokens < 0 ? m.tokens : m.actual_tokens;
  const double scale = m.output.dtype == DType::kFloat8E4M3 ? m.output_scale : 1.0;
  const double largest = m.output.dtype == DType::kFloat8E4M3 ? 448.0 * scale : HUGE_VAL;
  int64_t wrong = 0;
  for (int64_t t = 0; t < m.tokens && wrong < 4; ++t) {
    for (int64_t h = 0; h < m.heads && wrong < 4; ++h) {
      const int64_t row = t * m.heads + h;
      const bool has_prefix = m.prefix_tokens < 0 || t < m.prefix_tokens;
      const double p = has_prefix ? normalized(m.prefix_lse[row]) : -HUGE_VAL;
      const double s = normalized(m.suffix_lse[row]);
      double lse = -HUGE_VAL;
      double prefix_weight = 0.0;
      double suffix_weight = 0.0;
      if (std::isnan(p) || std::isnan(s) || t >= tokens) {
        lse = prefix_weight = suffix_weight = NAN;
      } else if (std::max(p, s) > -HUGE_VAL) {
        const double high = std::max(p, s);
        lse = high + std::log1p(std::exp(std::min(p, s) - high));
        prefix_weight = std::exp(p - lse);
        suffix_weight = std::exp(s - lse);
      }
      const double found_lse = found.lse[row];
      // One unit in the last place of the sum, and the rounding of the logarithm's argument.
      const bool lse_right = std::isnan(lse)    ? std::isnan(found_lse)
                             : lse == -HUGE_VAL ? found_lse == lse
                                                : std::fabs(found_lse - lse) <=
                                                      2.5e-7 + std::exp2(-23) * std::fabs(lse);
      if (!lse_right) {
        ++wrong;
        ADD_FAILURE() << "lse of token " << t << ", head " << h << " is " << found_lse
                      << ", expected " << lse << " from " << p << " and " << s;
      }
      for (int64_t d = 0; d < m.dim; ++d) {
        const float value = found.out[row * m.dim + d] * static_cast<float>(scale);
        // exp(-104) and less is 0 in float32, and a side of weight 0 isn't read.
        const double from_prefix =
            prefix_weight < 1e-45 ? 0.0 : prefix_weight * m.prefix_out[row * m.dim + d];
        const double from_suffix =
            suffix_weight < 1e-45 ? 0.0 : suffix_weight * m.suffix_out[row * m.dim + d];
        const double expected = std::clamp(from_prefix + from_suffix, -largest, largest);
        const double tolerance = expected == 0.0 && prefix_weight + suffix_weight == 0.0
                                     ? 0.0
                                     : rounding.absolute + rounding.relative * std::fabs(expected) +
                                           4e-6 * (std::fabs(from_prefix) + std::fabs(from_suffix));
        const bool right = std::isnan(prefix_weight) ? std::isnan(value)
                                                     : std::fabs(value - expected) <= tolerance;
        if (right) continue;
        ++wrong;
        ADD_FAILURE() << "token " << t << ", head " << h << ", column " << d << " is " << value
                      << ", expected " << expected << " +- " << tolerance << " from lse " << p
                      << " and " << s;
        break;
      }
    }
  }
}

}  // namespace mla::test
