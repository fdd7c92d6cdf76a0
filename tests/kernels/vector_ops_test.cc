// The CPU backend's vector loops, under every instruction set that the machine has.
#include "kernels/cpu/vector_ops.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/convert.h"

namespace mla::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<int64_t> targets() {
  std::vector<int64_t> result;
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1) {
    result.push_back(left & -left);
  }
  return result;
}

class VectorOpsTest : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    ASSERT_STREQ(vector_target(), hwy::TargetName(GetParam()));
    const uint64_t seed = std::random_device{}();
    RecordProperty("seed", std::to_string(seed));
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    random_.seed(seed);
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }

  std::vector<float> random_scores(int64_t n, float spread) {
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> scores(n);
    for (float& score : scores) score = normal(random_);
    return scores;
  }

  std::mt19937_64 random_;
};
INSTANTIATE_TEST_SUITE_P(Targets, VectorOpsTest, ::testing::ValuesIn(targets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

/// Equal, or both NaN.
::testing::AssertionResult same(float a, float b) {
  if (float_bits(a) == float_bits(b) || (a != a && b != b)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << a << " and " << b;
}

TEST_P(VectorOpsTest, ToFloatHasTheBitsOfConvert) {
  std::vector<uint16_t> codes(0x10000);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
  // Lengths that are no multiple of a vector, and unaligned starts, take the scalar tail.
  for (const int64_t skipped : {0, 3}) {
    const auto n = static_cast<int64_t>(codes.size()) - skipped;
    std::vector<float> values(n, kNan);
    to_float(codes.data() + skipped, DType::kBFloat16, n, 1.0f, values.data());
    for (int64_t i = 0; i < n; ++i) ASSERT_TRUE(same(values[i], bf16_to_float(codes[i + skipped])));
    to_float(codes.data() + skipped, DType::kFloat16, n, 1.0f, values.data());
    for (int64_t i = 0; i < n; ++i) ASSERT_TRUE(same(values[i], fp16_to_float(codes[i + skipped])));
  }
}

TEST_P(VectorOpsTest, FromFloatHasTheBitsOfConvert) {
  std::vector<float> values = {0.0f,     -0.0f,    kInfinity, -kInfinity,
                               65504.0f, 65520.0f, 1e-40f,    std::numeric_limits<float>::max()};
  while (values.size() < 100'003) values.push_back(float_from_bits(uint32_t(random_())));
  const auto n = static_cast<int64_t>(values.size());
  std::vector<uint16_t> stored(n);
  from_float(values.data(), n, DType::kBFloat16, stored.data());
  for (int64_t i = 0; i < n; ++i) ASSERT_EQ(stored[i], float_to_bf16(values[i])) << values[i];
  from_float(values.data(), n, DType::kFloat16, stored.data());
  for (int64_t i = 0; i < n; ++i) ASSERT_EQ(stored[i], float_to_fp16(values[i])) << values[i];
}

TEST_P(VectorOpsTest, ScalesByAFactor) {
  std::vector<float> row = random_scores(77, 1.0f);
  const std::vector<float> before = row;
  scale_row(row.data(), 75, 0.37f);
  for (int i = 0; i < 77; ++i) EXPECT_EQ(row[i], i < 75 ? before[i] * 0.37f : before[i]);
}

TEST_P(VectorOpsTest, FindsWhatIsNotFinite) {
  std::vector<float> row = random_scores(75, 1.0f);
  EXPECT_TRUE(all_finite(row.data(), 75));
  for (const float odd : {kNan, kInfinity, -kInfinity}) {
    for (int i = 0; i < 75; ++i) {
      const float kept = std::exchange(row[i], odd);
      EXPECT_FALSE(all_finite(row.data(), 75)) << i;
      row[i] = kept;
    }
  }
}

TEST_P(VectorOpsTest, SoftmaxRowIsExpOfTheDifference) {
  for (const int64_t n : {64, 128, 256}) {
    for (const int64_t visible : {int64_t{1}, n / 2 - 1, n / 2, n / 2 + 3, n - 1, n}) {
      const std::vector<float> scores = random_scores(n, 10.0f);
      std::vector<float> weights = scores;
      for (int64_t j = visible; j < n; ++j) weights[j] = kNan;  // hidden, so never looked at
      const SoftmaxRow row = softmax_row(weights.data(), visible, n, -5.0f);
      float max = -5.0f;
      for (int64_t j = 0; j < visible; ++j) max = std::max(max, scores[j]);
      ASSERT_EQ(row.max, max);
      double sum = 0.0;
      for (int64_t j = 0; j < n; ++j) {
        const double expected = j < visible ? std::exp(double{scores[j] - max}) : 0.0;
        ASSERT_NEAR(weights[j], expected, 3e-7 * expected + 1e-38) << j;
        sum += expected;
      }
      ASSERT_NEAR(row.sum, sum, 1e-6 * sum);
    }
  }
}

TEST_P(VectorOpsTest, SoftmaxRowNeverFormsInfinityMinusInfinity) {
  std::vector<float> scores(64, -kInfinity);
  SoftmaxRow row = softmax_row(scores.data(), 50, 64, -kInfinity);
  EXPECT_EQ(row.max, -kInfinity);
  EXPECT_EQ(row.sum, 0.0f);
  for (const float weight : scores) EXPECT_EQ(weight, 0.0f);

  scores.assign(64, -kInfinity);
  scores[3] = 2.0f;
  row = softmax_row(scores.data(), 50, 64, -kInfinity);
  EXPECT_EQ(row.max, 2.0f);
  EXPECT_EQ(row.sum, 1.0f);
}

TEST_P(VectorOpsTest, SoftmaxRowKeepsNan) {
  for (const float odd : {kNan, kInfinity}) {
    for (const int at : {0, 17, 48}) {
      std::vector<float> scores = random_scores(64, 1.0f);
      scores[at] = odd;
      EXPECT_TRUE(std::isnan(softmax_row(scores.data(), 49, 64, -kInfinity).sum)) << at;
    }
  }
}

}  // namespace
}  // namespace mla::cpu
