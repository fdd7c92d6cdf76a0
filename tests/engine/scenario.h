// Prompts that are prefilled over several steps, known in full on the host; what an engine makes of
// them, and what the oracle says they come to.
#ifndef TESTS_ENGINE_SCENARIO_H_
#define TESTS_ENGINE_SCENARIO_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "engine/config.h"
#include "engine/engine.h"
#include "engine/step_scheduler.h"
#include "kernels/backend.h"
#include "tests/support/test_backend.h"

namespace mla::test {

/// Values are bf16, in float32. Rows are [L + Rr]: latent, then RoPE key.
struct Scenario {
  struct Request {
    int32_t prefix_len = 0;
    int32_t prompt_len = 0;
    std::vector<std::vector<float>> rows;  // per layer [prefix_len + prompt_len, L + Rr]
    std::vector<std::vector<float>> q;     // per layer [prompt_len, H, P + Rr]
  };

  ModelDims dims;
  float softmax_scale = 0.0f;  // 0: the default
  int32_t num_layers = 1;
  std::vector<std::vector<float>> kv_b_proj;  // per layer [H * (P + V), L]
  std::vector<Request> requests;
  std::vector<std::vector<ScheduledRequest>> steps;  // id: index of the request

  int64_t num_tokens(size_t step) const;
};

struct Prompt {
  int32_t prefix_len = 0;
  int32_t prompt_len = 0;
};

/// Random weights and prompts, such that scores have a standard deviation of about 1. Prompts run
/// in steps of at most `max_num_batched_tokens` new tokens.
Scenario make_scenario(const ModelDims& dims, const std::vector<Prompt>& prompts,
                       int32_t max_num_batched_tokens, std::mt19937_64& random,
                       int32_t num_layers = 1);

/// The same weights and requests, those of `indices` alone, in that order, in one step.
Scenario select_requests(const Scenario& scenario, const std::vector<int32_t>& indices);

struct RunOptions {
  float cache_scale = 1.0f;
  uint8_t fill = kPoison;  // every byte of the workspace before the first step
  DType out_dtype = DType::kBFloat16;
  bool strided = false;  // kv_c and k_pe: columns of one tensor; gaps between rows and heads
  bool lse_rows_first = false;
  bool without_lse = false;
  bool table_on_device = false;
  /// Where given, called instead of each layer call, which it has to make.
  std::function<void(const std::function<void()>& run_layer)> around_layer = nullptr;
};

/// Of one layer in one step.
struct LayerResult {
  std::vector<float> out;  // [rows, H, V]
  std::vector<float> lse;  // [rows, H]
};
using ScenarioResult = std::vector<std::vector<LayerResult>>;  // [step][layer]

/// Runs all steps, every layer with a cache of its own. Outputs, the cache and, but for what steps
/// hand on, the workspace are poison before; fails the test where anything beside the results is
/// written. Outputs have max_query_tokens rows in a shape class, else T.
ScenarioResult run_scenario(Backend& backend, EngineConfig config, const Scenario& scenario,
                            const RunOptions& options = {});

/// The policies that the backend serves: all, or those that don't ask for absorbed attention.
std::vector<PathPolicy> path_policies(const Backend& backend, const ModelDims& dims);

/// The bytes that all of the scenario's tokens take, in pages.
int32_t pages_needed(const Scenario& scenario, int32_t page_size);

/// Of one step and layer.
struct Expected {
  std::vector<int32_t> heads;  // the heads that were computed
  std::vector<double> out;     // [T, heads, V]
  std::vector<double> lse;     // [T, heads]
};
using ScenarioExpectation = std::vector<std::vector<Expected>>;

/// By the oracle: a step's own tokens are attended as given, earlier ones as the cache gives them
/// back. `heads`: empty for all.
ScenarioExpectation expect_scenario(const Scenario& scenario, KvCacheFormat format, float scale,
                                    std::vector<int32_t> heads = {});

struct Tolerance {
  double relative = 0.0;
  double lse = 0.0;  // times max(1, |LSE|)
};
/// The field's rule for chunked attention against one unchunked call of the same kernel; the LSE is
/// far within its 1e-3, since float32 sums and single flips of a bf16 rounding are all it has.
inline Tolerance tolerance_of(double unchunked) { return {2 * unchunked + 1e-3, 2e-4}; }
/// Absorbed keys are never rounded to bf16, the oracle's are: every score is off by up to 2^-9 of
/// its terms, with random signs, and an LSE of few keys by as much as one score.
inline constexpr Tolerance kAbsorbTolerance{5e-3, 4e-3};

/// Compares the heads that are expected; every value of all heads must be finite. The output is
/// judged as a whole and row by row, since a row over many keys is small beside one over few.
::testing::AssertionResult agrees(const ScenarioResult& found, const ScenarioExpectation& expected,
                                  const ModelDims& dims, const Tolerance& tolerance);

/// Largest relative error over steps and layers of one attention call a step, over all keys at
/// once.
double unchunked_error(Backend& backend, const Scenario& scenario, KvCacheFormat format,
                       float scale, const ScenarioExpectation& expected);

::testing::AssertionResult same_bits(const ScenarioResult& a, const ScenarioResult& b);

/// A config for the scenario with room for all of its steps.
EngineConfig config_for(const Scenario& scenario, int32_t workspace_tokens, int32_t page_size);

/// For messages: schedule, merge, path and sizes.
std::string describe(const EngineConfig& config);

}  // namespace mla::test

#endif  // TESTS_ENGINE_SCENARIO_H_
