#include "tests/support/test_backend.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "metadata/error.h"
#include "tests/support/device_tensor.h"
#include "tests/support/mutant_backend.h"
#ifdef MLA_HAVE_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace mla::test {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Not a test failure: nothing that such a run says would mean anything.
[[noreturn]] void refuse_environment(const char* name, const std::string& value) {
  std::fprintf(stderr, "%s=%s is not known\n", name, value.c_str());
  std::_Exit(2);
}

BackendUnderTest make_backend() {
  const std::string wanted = environment("MLA_TEST_BACKEND");
  const std::string mutant = environment("MLA_TEST_MUTANT");
  if (wanted.empty() || wanted == "cpu") {
    // Three workers, whatever the machine has: races show, and no block size is a multiple of it.
    static std::unique_ptr<Executor> executor = make_thread_pool(3);
    static std::unique_ptr<Backend> backend = make_cpu_backend(*executor);
    if (!mutant.empty()) {
      backend = make_mutant_backend(std::move(backend), mutant);
      if (backend == nullptr) refuse_environment("MLA_TEST_MUTANT", mutant);
    }
    return {backend.get(), ""};
  }
  if (wanted != "cuda") refuse_environment("MLA_TEST_BACKEND", wanted);
  if (!mutant.empty()) refuse_environment("MLA_TEST_MUTANT with MLA_TEST_BACKEND", wanted);
#ifdef MLA_HAVE_CUDA
  try {
    static std::unique_ptr<Backend> backend = make_cuda_backend();
    return {backend.get(), ""};
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDevice) throw;
    return {nullptr, error.what()};
  }
#else
  return {nullptr, "this build has no CUDA"};
#endif
}

}  // namespace

const BackendUnderTest& backend_under_test() {
  static BackendUnderTest instance = make_backend();
  return instance;
}

void BackendTest::SetUp() {
  if (backend_under_test().backend == nullptr) GTEST_SKIP() << backend_under_test().why_missing;
  const std::string given = environment("MLA_TEST_SEED");
  seed_ = given.empty() ? std::random_device{}() : std::stoull(given);
  random_.seed(seed_);
  RecordProperty("seed", std::to_string(seed_));
}

void BackendTest::TearDown() {
  if (HasFailure()) {
    std::printf("repeat with MLA_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed_));
  }
}

int32_t BackendTest::random_int(int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(random_);
}

bool BackendTest::random_chance(double probability) {
  return std::bernoulli_distribution(probability)(random_);
}

std::vector<float> BackendTest::random_values(size_t count, DType dtype, double scale) {
  std::normal_distribution<float> normal(0.0f, static_cast<float>(scale));
  std::vector<float> values(count);
  for (float& value : values) value = round_to_dtype(normal(random_), dtype);
  return values;
}

OpContext BackendTest::op_context(const ScratchLimits& limits, uint8_t poison) {
  scratch_ = DeviceBuffer(backend(), backend().scratch_bytes(limits));
  if (scratch_.bytes() != 0) backend().fill_bytes(scratch_.data(), poison, scratch_.bytes(), {});
  return {Stream{}, scratch_.span()};
}

OpContext BackendTest::op_context() {
  return op_context({.dims = {.num_heads = 64,
                              .qk_nope_head_dim = 192,
                              .qk_rope_head_dim = 64,
                              .v_head_dim = 256,
                              .kv_lora_rank = 512},
                     .max_query_tokens = 512,
                     .max_rows = 4096,
                     .max_requests = 256});
}

void BackendTest::expect_refused(const std::function<void()>& call, const std::string& what) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_TRUE(error.code() == ErrorCode::kInvalidArgument ||
                error.code() == ErrorCode::kUnsupported)
        << what << ": " << error.what();
    EXPECT_FALSE(std::string_view(error.what()).empty()) << what;
    return;
  }
  ADD_FAILURE() << what << " was accepted";
}

}  // namespace mla::test
