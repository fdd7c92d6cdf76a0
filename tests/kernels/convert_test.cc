// Format conversions against the formats' definitions: every code, and every rounding boundary.
#include "kernels/convert.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace mla {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// The value of a non-negative code: `mantissa_bits` of mantissa below an exponent of bias `bias`.
double decoded(int code, int mantissa_bits, int bias) {
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int exponent = code >> mantissa_bits;
  const int significand = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits);
}

/// Between the values of neighbouring codes, the midpoint goes to the even code and its float32
/// neighbours go to the nearer one; with both signs.
template <typename Encode>
void check_boundary(double low_value, double high_value, uint32_t low_code, uint32_t sign_bit,
                    const Encode& encode) {
  const uint32_t high_code = low_code + 1;
  const uint32_t even_code = low_code % 2 == 0 ? low_code : high_code;
  const auto low = static_cast<float>(low_value);
  const auto middle = static_cast<float>((low_value + high_value) / 2);
  ASSERT_EQ(middle, (low_value + high_value) / 2);
  ASSERT_EQ(encode(low), low_code) << low;
  ASSERT_EQ(encode(-low), low_code | sign_bit) << low;
  ASSERT_EQ(encode(middle), even_code) << middle;
  ASSERT_EQ(encode(-middle), even_code | sign_bit) << middle;
  ASSERT_EQ(encode(std::nextafter(middle, 0.0f)), low_code) << middle;
  ASSERT_EQ(encode(std::nextafter(middle, kInfinity)), high_code) << middle;
}

TEST(Bf16, EveryCodeIsTheUpperHalfOfAFloat) {
  for (uint32_t code = 0; code <= 0xffff; ++code) {
    const float value = bf16_to_float(static_cast<uint16_t>(code));
    ASSERT_EQ(float_bits(value), code << 16);
    if (value == value) {
      ASSERT_EQ(float_to_bf16(value), code);
    }
  }
}

TEST(Bf16, RoundsToNearestEven) {
  for (uint32_t code = 0; code < 0x7f7f; ++code) {
    check_boundary(decoded(code, 7, 127), decoded(code + 1, 7, 127), code, 0x8000u, float_to_bf16);
    if (HasFatalFailure()) return;
  }
}

TEST(Bf16, OverflowsToInfinityAndKeepsNan) {
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(float_to_bf16(kInfinity), 0x7f80);
  EXPECT_EQ(float_to_bf16(-kInfinity), 0xff80);
  // A NaN whose payload lies in the dropped half alone would otherwise become infinity.
  for (const uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(float_from_bits(bits))))) << bits;
  }
}

TEST(Fp16, EveryCodeHasItsValue) {
  for (uint32_t code = 0; code < 0x7c00; ++code) {
    const double value = decoded(code, 10, 15);
    ASSERT_EQ(fp16_to_float(static_cast<uint16_t>(code)), value) << code;
    ASSERT_EQ(fp16_to_float(static_cast<uint16_t>(code | 0x8000u)), -value) << code;
  }
  EXPECT_EQ(float_bits(fp16_to_float(0x8000)), 0x80000000u);
  EXPECT_EQ(fp16_to_float(0x7c00), kInfinity);
  EXPECT_EQ(fp16_to_float(0xfc00), -kInfinity);
  for (uint32_t code = 0x7c01; code <= 0x7fff; ++code) {
    ASSERT_TRUE(std::isnan(fp16_to_float(static_cast<uint16_t>(code)))) << code;
  }
}

TEST(Fp16, RoundsToNearestEven) {
  for (uint32_t code = 0; code < 0x7bff; ++code) {
    check_boundary(decoded(code, 10, 15), decoded(code + 1, 10, 15), code, 0x8000u, float_to_fp16);
    if (HasFatalFailure()) return;
  }
}

TEST(Fp16, OverflowsToInfinityAndKeepsNan) {
  EXPECT_EQ(float_to_fp16(65504.0f), 0x7bff);
  EXPECT_EQ(float_to_fp16(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(float_to_fp16(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_fp16(-kInfinity), 0xfc00);
  EXPECT_TRUE(std::isnan(fp16_to_float(float_to_fp16(kNan))));
  EXPECT_TRUE(std::isnan(fp16_to_float(float_to_fp16(float_from_bits(0x7f800001u)))));
}

TEST(E4M3, EveryCodeHasItsValue) {
  for (uint32_t code = 0; code < 0x7f; ++code) {
    const double value = decoded(code, 3, 7);
    ASSERT_EQ(e4m3_to_float(static_cast<uint8_t>(code)), value) << code;
    ASSERT_EQ(e4m3_to_float(static_cast<uint8_t>(code | 0x80u)), -value) << code;
  }
  EXPECT_EQ(e4m3_to_float(0x7e), kE4M3Max);
  EXPECT_TRUE(std::isnan(e4m3_to_float(0x7f)));
  EXPECT_TRUE(std::isnan(e4m3_to_float(0xff)));
}

TEST(E4M3, RoundsToNearestEven) {
  for (uint32_t code = 0; code < 0x7e; ++code) {
    check_boundary(decoded(code, 3, 7), decoded(code + 1, 3, 7), code, 0x80u, float_to_e4m3);
    if (HasFatalFailure()) return;
  }
}

TEST(E4M3, SaturatesAndKeepsNan) {
  for (const float large : {449.0f, 464.0f, 480.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(float_to_e4m3(large), 0x7e) << large;
    EXPECT_EQ(float_to_e4m3(-large), 0xfe) << large;
  }
  EXPECT_TRUE(std::isnan(e4m3_to_float(float_to_e4m3(kNan))));
  EXPECT_TRUE(std::isnan(e4m3_to_float(float_to_e4m3(-kNan))));
}

}  // namespace
}  // namespace mla
