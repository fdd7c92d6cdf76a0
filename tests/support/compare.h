// How results are judged. NaN and infinity never pass for something finite.
#ifndef TESTS_SUPPORT_COMPARE_H_
#define TESTS_SUPPORT_COMPARE_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <span>

namespace mla::test {

/// Frobenius norm of the difference over that of `expected`; infinity where anything isn't finite.
double relative_error(std::span<const float> found, std::span<const double> expected);

/// Largest |found - expected| / max(1, |expected|). An expected -inf must be found exactly, and
/// -inf, +inf or NaN in place of a finite value count as an infinite error.
double lse_error(std::span<const float> found, std::span<const double> expected);

/// Same bits; names the first place where they differ.
::testing::AssertionResult same_bits(std::span<const float> a, std::span<const float> b);
::testing::AssertionResult same_bits(std::span<const std::byte> a, std::span<const std::byte> b);

}  // namespace mla::test

#endif  // TESTS_SUPPORT_COMPARE_H_
