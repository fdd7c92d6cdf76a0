// The algebra of partial states, against its definition in float64.
#include "kernels/lse.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <string>

namespace mla {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct State {
  float value = 0.0f;
  float lse = 0.0f;
};

State merge(const State& prefix, const State& suffix) {
  const MergeWeights weights = merge_weights(prefix.lse, suffix.lse);
  return {merge_values(weights, prefix.value, suffix.value), weights.lse};
}

TEST(Lse, TwoEmptySidesAreEmpty) {
  for (const float prefix_lse : {-kInfinity, kInfinity}) {
    for (const float suffix_lse : {-kInfinity, kInfinity}) {
      const State merged = merge({kNan, prefix_lse}, {kNan, suffix_lse});
      EXPECT_EQ(merged.value, 0.0f);
      EXPECT_EQ(merged.lse, -kInfinity);
    }
  }
}

TEST(Lse, AnEmptySideLeavesTheOtherBitForBit) {
  const float value = 0.1f;  // not representable in few bits: any arithmetic on it would show
  for (const float empty : {-kInfinity, kInfinity}) {
    for (const float lse : {1.0f, -50.3f, 1e30f, 0.0f}) {
      for (const State& merged :
           {merge({value, lse}, {kNan, empty}), merge({kNan, empty}, {value, lse})}) {
        EXPECT_EQ(merged.value, value);
        EXPECT_EQ(merged.lse, lse);
      }
    }
  }
}

TEST(Lse, LargeLsesDoNotOverflow) {
  const State merged = merge({0.0f, 1000.0f}, {1.0f, 999.0f});
  EXPECT_NEAR(merged.value, 0.268941f, 1e-6f);
  EXPECT_NEAR(merged.lse, 1000.313262f, 1e-4f);  // float32 steps by 6e-5 here
}

TEST(Lse, AWeightThatUnderflowsSelectsItsSideAway) {
  const State merged = merge({kNan, -200.0f}, {3.0f, 5.0f});
  EXPECT_EQ(merged.value, 3.0f);
  EXPECT_EQ(merged.lse, 5.0f);
}

TEST(Lse, NanIsNoEmptySide) {
  for (const float other : {-kInfinity, kInfinity, 0.0f, 7.0f}) {
    for (const State& merged :
         {merge({1.0f, kNan}, {2.0f, other}), merge({2.0f, other}, {1.0f, kNan})}) {
      EXPECT_TRUE(std::isnan(merged.value)) << other;
      EXPECT_TRUE(std::isnan(merged.lse)) << other;
    }
  }
}

TEST(Lse, ANanValueOfASideWithKeysPropagates) {
  EXPECT_TRUE(std::isnan(merge({kNan, 1.0f}, {2.0f, 1.0f}).value));
  EXPECT_TRUE(std::isnan(merge({2.0f, 1.0f}, {kNan, 1.0f}).value));
}

TEST(Lse, AgreesWithTheDefinition) {
  const uint64_t seed = std::random_device{}();
  ::testing::Test::RecordProperty("seed", std::to_string(seed));
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> lses(-30.0f, 30.0f);
  std::normal_distribution<float> values;
  for (int i = 0; i < 100'000; ++i) {
    const State prefix{values(random), lses(random)};
    const State suffix{values(random), lses(random)};
    const State merged = merge(prefix, suffix);
    const double p = std::exp(double{prefix.lse});
    const double s = std::exp(double{suffix.lse});
    // A difference of lses of up to 60 is rounded to 4e-6, which a weight takes over.
    const double scale = std::fabs(prefix.value) + std::fabs(suffix.value);
    ASSERT_NEAR(merged.value, (p * prefix.value + s * suffix.value) / (p + s), 3e-6 * scale);
    ASSERT_NEAR(merged.lse, std::log(p + s), 5e-6);
  }
}

}  // namespace
}  // namespace mla
