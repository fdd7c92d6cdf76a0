// The oracle against what can be known without it: exhaustive searches and closed forms.
#include "tests/oracle/oracle.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace mla::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<float> random_values(size_t count, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  std::vector<float> values(count);
  for (float& value : values) value = round_to_bf16(normal(random));
  return values;
}

std::mt19937_64 fresh_random() {
  const uint64_t seed = std::random_device{}();
  ::testing::Test::RecordProperty("seed", std::to_string(seed));
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return std::mt19937_64(seed);
}

/// The element of the ascending `values` nearest to x; between two equally near, the one whose
/// index (that is, whose bit pattern) is even.
double nearest(const std::vector<double>& values, double x) {
  size_t best = 0;
  for (size_t i = 1; i < values.size(); ++i) {
    const double step = std::fabs(values[i] - x) - std::fabs(values[best] - x);
    if (step < 0.0 || (step == 0.0 && i % 2 == 0)) best = i;
  }
  return values[best];
}

// OFP8 table 1: four exponent bits of bias 7, three mantissa bits; 0x7f is NaN.
std::vector<double> non_negative_e4m3() {
  std::vector<double> values;
  for (int code = 0; code < 0x7f; ++code) {
    const int exponent = code >> 3;
    const int mantissa = code & 7;
    values.push_back(exponent == 0 ? mantissa / 512.0
                                   : std::pow(2.0, exponent - 7) * (1.0 + mantissa / 8.0));
  }
  return values;
}

TEST(RoundToE4M3, IsTheNearestValue) {
  const std::vector<double> values = non_negative_e4m3();
  ASSERT_EQ(values.back(), 448.0);
  std::vector<double> inputs = values;
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    const double middle = 0.5 * (values[i] + values[i + 1]);
    inputs.insert(inputs.end(), {middle, std::nextafter(middle, 0.0), std::nextafter(middle, 1e9)});
  }
  std::mt19937_64 random = fresh_random();
  std::uniform_real_distribution<double> exponents(-13.0, 10.0);
  for (int i = 0; i < 20'000; ++i) inputs.push_back(std::exp2(exponents(random)));
  for (const double x : inputs) {
    EXPECT_EQ(round_to_e4m3(x), nearest(values, x)) << x;
    EXPECT_EQ(round_to_e4m3(-x), -nearest(values, x)) << x;
  }
  EXPECT_EQ(round_to_e4m3(kInfinity), 448.0f);
  EXPECT_EQ(round_to_e4m3(-1e300), -448.0f);
  EXPECT_TRUE(std::isnan(round_to_e4m3(std::nan(""))));
}

TEST(RoundToBf16, IsTheNearestValue) {
  std::mt19937_64 random = fresh_random();
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  // Every bf16 value from 0 to the largest, its successor, and points between the two. The value
  // after the largest would be 2^128, which is where rounding to infinity begins to be nearer.
  const auto value_of = [](uint32_t code) -> double {
    return code == 0x7f80 ? std::exp2(128.0) : std::bit_cast<float>(code << 16);
  };
  for (uint32_t code = 0; code < 0x7f80; ++code) {
    const double low = value_of(code);
    const double high = value_of(code + 1);
    const double middle = low + 0.5 * (high - low);
    const double rounded_high = code + 1 == 0x7f80 ? kInfinity : high;
    const double inside = low + unit(random) * (high - low);
    ASSERT_EQ(round_to_bf16(low), low) << code;
    ASSERT_EQ(round_to_bf16(middle), code % 2 == 0 ? low : rounded_high) << code;
    ASSERT_EQ(round_to_bf16(std::nextafter(middle, 0.0)), low) << code;
    ASSERT_EQ(round_to_bf16(std::nextafter(middle, kInfinity)), rounded_high) << code;
    if (inside != middle) {
      ASSERT_EQ(round_to_bf16(-inside), inside < middle ? -low : -rounded_high) << code;
    }
  }
  EXPECT_TRUE(std::isnan(round_to_bf16(std::nan(""))));
  EXPECT_TRUE(std::signbit(round_to_bf16(-0.0)));
}

TEST(ThroughFp8, KeepsWhatTheFormatHolds) {
  std::vector<float> row(576);
  for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<float>(i % 16) - 8.0f;
  // Tile 1 is empty; tile 2's largest magnitude is 448, so its scale is 1.
  std::fill(row.begin() + 128, row.begin() + 256, 0.0f);
  row[300] = -448.0f;
  row[301] = 17.0f;       // e4m3 has 16 and 18: the tie goes to the even 16
  row[575] = 1.0078125f;  // a bf16 that e4m3 can't hold, in the RoPE part
  const std::vector<float> mla = through_fp8_ds_mla(row);
  EXPECT_EQ(std::vector<float>(mla.begin() + 128, mla.begin() + 256), std::vector<float>(128));
  EXPECT_EQ(mla[300], -448.0f);
  EXPECT_EQ(mla[301], 16.0f);
  EXPECT_EQ(mla[575], 1.0078125f);

  const std::vector<float> plain = through_fp8_e4m3(row, 0.5f);
  EXPECT_EQ(plain[300], -224.0f);  // saturated
  EXPECT_EQ(plain[301], 16.0f);    // 34 lies between 32 and 36, the tie goes to 32
  EXPECT_EQ(plain[575], 1.0f);
  EXPECT_EQ(plain[7], -1.0f);
}

TEST(ExpandHead, ProductsOfSmallIntegersAreExact) {
  constexpr int64_t kRows = 5, kP = 70, kV = 9, kL = 37;  // no multiple of any block
  std::mt19937_64 random = fresh_random();
  std::uniform_int_distribution<int> digits(-4, 4);
  std::vector<float> latent(kRows * kL), weight((kP + kV) * kL);
  for (float& x : latent) x = static_cast<float>(digits(random));
  for (float& x : weight) x = static_cast<float>(digits(random));
  const HeadKeys exact = expand_head(latent, weight, kP, kV, kL, false);
  const HeadKeys rounded = expand_head(latent, weight, kP, kV, kL);
  ASSERT_EQ(exact.k_nope.size(), static_cast<size_t>(kRows * kP));
  ASSERT_EQ(exact.v.size(), static_cast<size_t>(kRows * kV));
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kP + kV; ++c) {
      int sum = 0;
      for (int64_t l = 0; l < kL; ++l) {
        sum += static_cast<int>(latent[r * kL + l]) * static_cast<int>(weight[c * kL + l]);
      }
      const float found = c < kP ? exact.k_nope[r * kP + c] : exact.v[r * kV + c - kP];
      const float as_bf16 = c < kP ? rounded.k_nope[r * kP + c] : rounded.v[r * kV + c - kP];
      EXPECT_EQ(found, static_cast<float>(sum));
      EXPECT_EQ(as_bf16, round_to_bf16(sum));
    }
  }
}

// q = 0 weighs all visible keys alike, so both results are known; the rows see any number of keys,
// and values that a row doesn't see are NaN.
TEST(AttendHead, ZeroQueriesAverageTheVisibleValues) {
  constexpr int64_t kKeys = 203, kP = 16, kRr = 8, kV = 12;
  std::mt19937_64 random = fresh_random();
  HeadKeys keys{random_values(kKeys * kP, random), random_values(kKeys * kV, random)};
  const std::vector<float> k_pe = random_values(kKeys * kRr, random);
  std::fill(keys.v.end() - kV, keys.v.end(), std::nanf(""));
  keys.k_nope.back() = std::nanf("");
  std::vector<int64_t> visible;
  for (int64_t i = 0; i < kKeys; ++i) visible.push_back((i * 89) % kKeys);  // 0 to 202, shuffled
  const std::vector<float> q(kKeys * (kP + kRr), 0.0f);

  const HeadResult result = attend_head(q, keys, k_pe, visible, kP, kRr, kV, 0.2);
  for (int64_t i = 0; i < kKeys; ++i) {
    if (visible[i] == 0) {
      EXPECT_EQ(result.lse[i], -kInfinity);
    } else {
      EXPECT_NEAR(result.lse[i], std::log(static_cast<double>(visible[i])), 1e-12);
    }
    for (int64_t c = 0; c < kV; ++c) {
      double mean = 0.0;
      for (int64_t k = 0; k < visible[i]; ++k) mean += keys.v[k * kV + c];
      if (visible[i] > 0) mean /= static_cast<double>(visible[i]);
      EXPECT_NEAR(result.out[i * kV + c], mean, visible[i] == 0 ? 0.0 : 1e-12);
    }
  }
}

TEST(AttendHead, TwoKeysAreALogisticFunction) {
  std::mt19937_64 random = fresh_random();
  constexpr int64_t kP = 3, kRr = 2, kV = 1;
  const std::vector<float> q = random_values(kP + kRr, random);
  const std::vector<float> k_pe = random_values(2 * kRr, random);
  const HeadKeys keys{random_values(2 * kP, random), {0.0f, 1.0f}};
  const double scale = 30.0;
  double score[2] = {};
  for (int k = 0; k < 2; ++k) {
    for (int d = 0; d < kP; ++d) score[k] += double{q[d]} * keys.k_nope[k * kP + d];
    for (int d = 0; d < kRr; ++d) score[k] += double{q[kP + d]} * k_pe[k * kRr + d];
    score[k] *= scale;
  }
  const HeadResult result = attend_head(q, keys, k_pe, std::vector<int64_t>{2}, kP, kRr, kV, scale);
  EXPECT_NEAR(result.out[0], 1.0 / (1.0 + std::exp(score[0] - score[1])), 1e-12);
  EXPECT_NEAR(result.lse[0], score[0] + std::log1p(std::exp(score[1] - score[0])), 1e-10);
}

}  // namespace
}  // namespace mla::oracle
