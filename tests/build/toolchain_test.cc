// The compiler speaks C++20 and every system library in tools/bazel/deps compiles and links.
#include <blis-serial/blis.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>
#include <spdlog/spdlog.h>

#include <nlohmann/json.hpp>
#include <span>
#include <thread>
#include <vector>

namespace mla::build_test {
namespace {

static_assert(__cplusplus >= 202002L);

TEST(Toolchain, TextLibraries) {
  EXPECT_EQ(fmt::format("{}-{}", 1, "a"), "1-a");
  EXPECT_EQ(nlohmann::json::parse("[1]").at(0), 1);
  EXPECT_TRUE(spdlog::default_logger() != nullptr);
  EXPECT_NE(hwy::SupportedTargets(), 0);
}

std::vector<float> multiply(std::span<const float> a, std::span<const float> b, int n) {
  std::vector<float> c(static_cast<size_t>(n) * n);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0f, a.data(), n, b.data(), n,
              0.0f, c.data(), n);
  return c;
}

// The executor runs one GEMM a thread, many at a time. That needs a BLAS which is safe to call so
// and starts no threads of its own.
TEST(Toolchain, BlasRunsConcurrently) {
  EXPECT_EQ(bli_info_get_enable_threading(), 0);

  constexpr int kSize = 96;
  constexpr int kThreads = 4;
  constexpr int kRounds = 20;
  std::vector<float> a(kSize * kSize), b(kSize * kSize);
  for (int i = 0; i < kSize * kSize; ++i) {
    // Small integers: every sum is exact, so any order of summation gives the same bits.
    a[i] = static_cast<float>(i % 7 - 3);
    b[i] = static_cast<float>(i % 5 - 2);
  }
  std::vector<float> expected(kSize * kSize);
  for (int i = 0; i < kSize; ++i) {
    for (int k = 0; k < kSize; ++k) {
      for (int j = 0; j < kSize; ++j) {
        expected[i * kSize + j] += a[i * kSize + k] * b[k * kSize + j];
      }
    }
  }

  std::vector<int> wrong(kThreads);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds; ++round) wrong[t] += multiply(a, b, kSize) != expected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(kThreads, 0));
}

}  // namespace
}  // namespace mla::build_test
