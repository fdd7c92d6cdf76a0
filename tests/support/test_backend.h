// The backend that the op suites run against, and the fixture they share.
//
// The environment decides, so that one binary serves every device:
//   MLA_TEST_BACKEND=cpu | cuda   cpu where it isn't set; tests are skipped, never passed, where
//                                 the build or the machine has no such backend
//   MLA_TEST_SEED=N               repeats a run; otherwise every test draws a fresh seed
//   MLA_TEST_MUTANT=NAME          breaks the CPU backend on purpose, see mutant_backend.h
#ifndef TESTS_SUPPORT_TEST_BACKEND_H_
#define TESTS_SUPPORT_TEST_BACKEND_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace mla::test {

/// 0xff everywhere is NaN in float32, fp16, bf16 and e4m3, and -1 in integers.
inline constexpr uint8_t kPoison = 0xff;

struct BackendUnderTest {
  Backend* backend = nullptr;
  std::string why_missing;  // where there is none
};
const BackendUnderTest& backend_under_test();

class BackendTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  Backend& backend() const { return *backend_under_test().backend; }
  bool on_cpu() const { return backend().name() == "cpu"; }

  std::mt19937_64& random() { return random_; }
  /// Uniform in [low, high].
  int32_t random_int(int32_t low, int32_t high);
  bool random_chance(double probability);
  /// Normal values that `dtype` holds exactly.
  std::vector<float> random_values(size_t count, DType dtype, double scale = 1.0);

  /// A context whose scratch, sized for the limits, holds `poison` in every byte.
  OpContext op_context(const ScratchLimits& limits, uint8_t poison = kPoison);
  /// For up to 512 query tokens, 64 heads and 4,096 rows.
  OpContext op_context();

  /// Expects a refusal (kInvalidArgument or kUnsupported) with a message. A test of bad params also
  /// checks that its outputs are as they were.
  void expect_refused(const std::function<void()>& call, const std::string& what);

 private:
  uint64_t seed_ = 0;
  std::mt19937_64 random_;
  DeviceBuffer scratch_;
};

}  // namespace mla::test

#endif  // TESTS_SUPPORT_TEST_BACKEND_H_
