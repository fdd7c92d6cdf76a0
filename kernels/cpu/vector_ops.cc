#include "kernels/cpu/vector_ops.h"

#include <cmath>
#include <cstring>

#include "kernels/convert.h"

// Highway compiles the part between HWY_BEFORE_NAMESPACE and HWY_AFTER_NAMESPACE once for each
// instruction set, by including this file again; foreach_target.h comes first.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/vector_ops.cc"
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;
constexpr FloatTag kFloats;
constexpr hn::RebindToUnsigned<FloatTag> kWords;
constexpr hn::Rebind<uint16_t, FloatTag> kHalves;

const char* vector_target() { return hwy::TargetName(HWY_TARGET); }

FloatVec load_bf16(const uint16_t* src) {
  return hn::BitCast(kFloats, hn::ShiftLeft<16>(hn::PromoteTo(kWords, hn::LoadU(kHalves, src))));
}

/// As fp16_to_float does it.
FloatVec load_fp16(const uint16_t* src) {
  const auto word = hn::PromoteTo(kWords, hn::LoadU(kHalves, src));
  const auto sign = hn::ShiftLeft<16>(hn::And(word, hn::Set(kWords, 0x8000u)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(word, hn::Set(kWords, 0x7fffu)));
  const auto scaled = hn::BitCast(
      kWords,
      hn::Mul(hn::BitCast(kFloats, magnitude), hn::BitCast(kFloats, hn::Set(kWords, 0x77800000u))));
  const auto special = hn::Or(magnitude, hn::Set(kWords, 0x7f800000u));
  const auto is_special = hn::Gt(magnitude, hn::Set(kWords, (0x7c00u << 13) - 1));
  return hn::BitCast(kFloats, hn::Or(sign, hn::IfThenElse(is_special, special, scaled)));
}

void to_float(const void* src, DType dtype, int64_t n, float factor, float* dst) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(kFloats));
  const auto factors = hn::Set(kFloats, factor);
  int64_t i = 0;
  if (dtype == DType::kFloat32) {
    const auto* values = static_cast<const float*>(src);
    for (; i + lanes <= n; i += lanes) {
      hn::StoreU(hn::Mul(factors, hn::LoadU(kFloats, values + i)), kFloats, dst + i);
    }
    for (; i < n; ++i) dst[i] = factor * values[i];
    return;
  }
  const auto* halves = static_cast<const uint16_t*>(src);
  if (dtype == DType::kBFloat16) {
    for (; i + lanes <= n; i += lanes) {
      hn::StoreU(hn::Mul(factors, load_bf16(halves + i)), kFloats, dst + i);
    }
    for (; i < n; ++i) dst[i] = factor * bf16_to_float(halves[i]);
  } else {
    for (; i + lanes <= n; i += lanes) {
      hn::StoreU(hn::Mul(factors, load_fp16(halves + i)), kFloats, dst + i);
    }
    for (; i < n; ++i) dst[i] = factor * fp16_to_float(halves[i]);
  }
}

void from_float(const float* src, int64_t n, DType dtype, void* dst) {
  if (dtype == DType::kFloat32) {
    std::memcpy(dst, src, n * sizeof(float));
    return;
  }
  auto* halves = static_cast<uint16_t*>(dst);
  if (dtype == DType::kFloat16) {
    for (int64_t i = 0; i < n; ++i) halves[i] = float_to_fp16(src[i]);
    return;
  }
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(kFloats));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto value = hn::LoadU(kFloats, src + i);
    const auto bits = hn::BitCast(kWords, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(kWords, 1u));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(kWords, 0x7fffu)), odd);
    const auto quiet = hn::Or(bits, hn::Set(kWords, 0x400000u));
    const auto is_nan = hn::RebindMask(kWords, hn::IsNaN(value));
    const auto upper = hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded));
    hn::StoreU(hn::TruncateTo(kHalves, upper), kHalves, halves + i);
  }
  for (; i < n; ++i) halves[i] = float_to_bf16(src[i]);
}

void scale_row(float* x, int64_t n, float factor) { to_float(x, DType::kFloat32, n, factor, x); }

bool all_finite(const float* x, int64_t n) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(kFloats));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    if (!hn::AllTrue(kFloats, hn::IsFinite(hn::LoadU(kFloats, x + i)))) return false;
  }
  for (; i < n; ++i) {
    if (!std::isfinite(x[i])) return false;
  }
  return true;
}

/// scores[i..] with -inf in place of what lies at `visible` and beyond.
FloatVec load_visible(const float* scores, int64_t i, int64_t visible) {
  const auto mask = hn::FirstN(kFloats, static_cast<size_t>(visible - i));
  return hn::IfThenElse(mask, hn::LoadU(kFloats, scores + i), hn::Set(kFloats, -INFINITY));
}

/// Highway's Exp gives 0 for NaN; a NaN score must reach the sum.
FloatVec exp_keeping_nan(FloatVec x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(kFloats, x));
}

SoftmaxRow softmax_row(float* scores, int64_t visible, int64_t n, float previous_max) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(kFloats));
  const int64_t whole = visible / lanes * lanes;
  auto maxima = hn::Set(kFloats, previous_max);
  for (int64_t i = 0; i < whole; i += lanes) {
    maxima = hn::Max(maxima, hn::LoadU(kFloats, scores + i));
  }
  if (whole < visible) maxima = hn::Max(maxima, load_visible(scores, whole, visible));
  const float max = hn::GetLane(hn::MaxOfLanes(kFloats, maxima));

  // With nothing but -inf so far, exp(-inf - 0) is the 0 that -inf - (-inf) would not give.
  const auto shift = hn::Set(kFloats, max == -INFINITY ? 0.0f : max);
  auto sums = hn::Zero(kFloats);
  for (int64_t i = 0; i < whole; i += lanes) {
    const auto weight = exp_keeping_nan(hn::Sub(hn::LoadU(kFloats, scores + i), shift));
    sums = hn::Add(sums, weight);
    hn::StoreU(weight, kFloats, scores + i);
  }
  int64_t end = whole;
  if (whole < visible) {
    const auto weight = exp_keeping_nan(hn::Sub(load_visible(scores, whole, visible), shift));
    sums = hn::Add(sums, weight);
    hn::StoreU(weight, kFloats, scores + whole);
    end += lanes;
  }
  for (int64_t i = end; i < n; i += lanes) hn::StoreU(hn::Zero(kFloats), kFloats, scores + i);
  return {max, hn::GetLane(hn::SumOfLanes(kFloats, sums))};
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mla::cpu {

HWY_EXPORT(vector_target);
HWY_EXPORT(to_float);
HWY_EXPORT(from_float);
HWY_EXPORT(scale_row);
HWY_EXPORT(all_finite);
HWY_EXPORT(softmax_row);

const char* vector_target() { return HWY_DYNAMIC_DISPATCH(vector_target)(); }

void to_float(const void* src, DType dtype, int64_t n, float factor, float* dst) {
  HWY_DYNAMIC_DISPATCH(to_float)(src, dtype, n, factor, dst);
}

void from_float(const float* src, int64_t n, DType dtype, void* dst) {
  HWY_DYNAMIC_DISPATCH(from_float)(src, n, dtype, dst);
}

void scale_row(float* x, int64_t n, float factor) { HWY_DYNAMIC_DISPATCH(scale_row)(x, n, factor); }

bool all_finite(const float* x, int64_t n) { return HWY_DYNAMIC_DISPATCH(all_finite)(x, n); }

SoftmaxRow softmax_row(float* scores, int64_t visible, int64_t n, float previous_max) {
  return HWY_DYNAMIC_DISPATCH(softmax_row)(scores, visible, n, previous_max);
}

}  // namespace mla::cpu
#endif  // HWY_ONCE
