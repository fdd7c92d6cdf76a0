#include "tests/support/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace mla::test {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double relative_error(std::span<const float> found, std::span<const double> expected) {
  if (found.size() != expected.size()) return kInfinity;
  double difference = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < found.size(); ++i) {
    difference += (found[i] - expected[i]) * (found[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  if (!std::isfinite(difference) || !std::isfinite(norm)) return kInfinity;
  if (norm == 0.0) return difference == 0.0 ? 0.0 : kInfinity;
  return std::sqrt(difference / norm);
}

double lse_error(std::span<const float> found, std::span<const double> expected) {
  if (found.size() != expected.size()) return kInfinity;
  double worst = 0.0;
  for (size_t i = 0; i < found.size(); ++i) {
    if (static_cast<double>(found[i]) == expected[i]) continue;  // -inf among them
    const double error = std::fabs(found[i] - expected[i]) / std::max(1.0, std::fabs(expected[i]));
    if (!std::isfinite(error)) return kInfinity;
    worst = std::max(worst, error);
  }
  return worst;
}

::testing::AssertionResult same_bits(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure() << a.size() << " and " << b.size() << " bytes";
  }
  const auto [left, right] = std::mismatch(a.begin(), a.end(), b.begin());
  if (left == a.end()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "byte " << left - a.begin() << " is " << static_cast<int>(*left) << " and "
         << static_cast<int>(*right);
}

::testing::AssertionResult same_bits(std::span<const float> a, std::span<const float> b) {
  const ::testing::AssertionResult same = same_bits(std::as_bytes(a), std::as_bytes(b));
  if (same || a.size() != b.size()) return same;
  size_t i = 0;
  while (same_bits(std::as_bytes(a.subspan(i, 1)), std::as_bytes(b.subspan(i, 1)))) ++i;
  return ::testing::AssertionFailure() << "value " << i << " is " << a[i] << " and " << b[i];
}

}  // namespace mla::test
