// Cases from public fault reports about engines of this kind, each with its right value.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tests/engine/scenario.h"
#include "tests/oracle/oracle.h"
#include "tests/support/compare.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

constexpr Schedule kSchedules[] = {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed};
constexpr MergeMode kMerges[] = {MergeMode::kFused, MergeMode::kDiscrete};
constexpr ModelDims kDeepSeek16{16, 128, 64, 128, 512};
constexpr ModelDims kSmall{5, 24, 8, 40, 48};
// The cases' own dims, for which a backend may have kernels of their own, and small odd ones.
constexpr ModelDims kBothDims[] = {{5, 128, 64, 128, 512}, kSmall};

class CasesTest : public BackendTest {
 protected:
  /// Calls `test` with every schedule, merge mode and path.
  template <typename Test>
  void for_every_mode(EngineConfig config, const Test& test) {
    for (const Schedule schedule : kSchedules) {
      for (const MergeMode merge : kMerges) {
        for (const PathPolicy path : path_policies(backend(), config.dims)) {
          config.schedule = schedule;
          config.merge = merge;
          config.path = path;
          SCOPED_TRACE(describe(config));
          test(config);
        }
      }
    }
  }
};

/// Rows [begin, end) of a result.
LayerResult rows_of(const LayerResult& result, const ModelDims& dims, int64_t begin, int64_t end) {
  const int64_t heads = dims.num_heads, row = heads * dims.v_head_dim;
  return {{result.out.begin() + begin * row, result.out.begin() + end * row},
          {result.lse.begin() + begin * heads, result.lse.begin() + end * heads}};
}

TEST_F(CasesTest, UnevenContexts) {
  const Scenario scenario =
      make_scenario(kDeepSeek16, {{10240, 64}, {0, 17}, {512, 1}}, 4096, random());
  const Scenario alone = select_requests(scenario, {1});
  // The unchunked call is judged by the same heads.
  const ScenarioExpectation expected =
      expect_scenario(scenario, KvCacheFormat::kBf16, 1.0f, {0, 15});
  const double unchunked =
      unchunked_error(backend(), scenario, KvCacheFormat::kBf16, 1.0f, expected);
  for (const Schedule schedule : kSchedules) {
    EngineConfig config = config_for(scenario, 4096, 64);
    config.schedule = schedule;
    config.merge = schedule == Schedule::kUniform ? MergeMode::kDiscrete : MergeMode::kFused;
    config.path = PathPolicy::kExpand;
    SCOPED_TRACE(describe(config));
    const ScenarioResult result = run_scenario(backend(), config, scenario);
    EXPECT_TRUE(agrees(result, expected, scenario.dims, tolerance_of(unchunked)));
    EXPECT_TRUE(same_bits(result, run_scenario(backend(), config, scenario, {.fill = 0})));

    const ScenarioResult without_others = run_scenario(backend(), config, alone);
    EXPECT_TRUE(same_bits({{rows_of(result[0][0], scenario.dims, 64, 81)}}, without_others));
  }
}

TEST_F(CasesTest, BaseOfTheLse) {
  constexpr int32_t kContext = 3072, kNew = 64;
  for (const ModelDims& dims : kBothDims) {
    Scenario scenario = make_scenario(dims, {{kContext, kNew}}, kNew, random());
    const int64_t latent = dims.latent_dim();
    std::ranges::fill(scenario.requests[0].q[0], 0.0f);
    // Column 0 of a latent row is what every value is, 1 for the context and 0 for new tokens.
    for (int64_t row = 0; row < kContext + kNew; ++row) {
      scenario.requests[0].rows[0][row * latent] = row < kContext ? 1.0f : 0.0f;
    }
    std::vector<float>& weight = scenario.kv_b_proj[0];
    for (int64_t row = 0; row < dims.num_heads * dims.kv_head_dim(); ++row) {
      if (row % dims.kv_head_dim() < dims.qk_nope_head_dim) continue;
      std::fill_n(weight.begin() + row * dims.kv_lora_rank, dims.kv_lora_rank, 0.0f);
      weight[row * dims.kv_lora_rank] = 1.0f;
    }
    for_every_mode(config_for(scenario, 1024, 16), [&](const EngineConfig& config) {
      const LayerResult result =
          run_scenario(backend(), config, scenario, {.out_dtype = DType::kFloat32})[0][0];
      for (int64_t i = 0; i < kNew; ++i) {
        for (int64_t h = 0; h < dims.num_heads; ++h) {
          // Float32 sums of up to 3,136 equal terms.
          ASSERT_NEAR(result.lse[i * dims.num_heads + h], std::log(kContext + 1.0 + i), 1e-5);
          for (int64_t d = 0; d < dims.v_head_dim; ++d) {
            ASSERT_NEAR(result.out[(i * dims.num_heads + h) * dims.v_head_dim + d],
                        kContext / (kContext + 1.0 + i), 1e-5);
          }
        }
      }
      EXPECT_NEAR(result.lse.back(), 8.05070, 1e-5);
    });
  }
}

TEST_F(CasesTest, StridedTensorsChangeNoBit) {
  const Scenario scenario = make_scenario(kSmall, {{70, 9}, {0, 30}, {33, 1}}, 25, random());
  for_every_mode(config_for(scenario, 32, 16), [&](const EngineConfig& config) {
    const ScenarioResult plain = run_scenario(backend(), config, scenario);
    EXPECT_TRUE(same_bits(plain, run_scenario(backend(), config, scenario,
                                              {.strided = true, .lse_rows_first = true})));
  });
}

TEST_F(CasesTest, FixedScheduleIsIndependentOfTheBatch) {
  std::vector<Prompt> prompts;
  for (int i = 0; i < 32; ++i) {
    prompts.push_back({random_int(0, 150), random_int(0, 3) == 0 ? 1 : random_int(2, 60)});
  }
  prompts[0] = {random_int(100, 150), random_int(50, 60)};
  prompts[1] = {0, random_int(65, 80)};  // two pieces of new tokens
  prompts[2] = {300, 600};               // absorbed in three passes
  std::vector<int32_t> order(32);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random());
  for (const ModelDims& dims : kBothDims) {
    const Scenario all = make_scenario(dims, prompts, 100000, random());
    const Scenario shuffled = select_requests(all, order);
    for (const MergeMode merge : kMerges) {
      for (const PathPolicy path : path_policies(backend(), dims)) {
        for (const int32_t w : {48, 100, 2048}) {
          EngineConfig config = config_for(all, w, 16);
          config.schedule = Schedule::kFixed;
          config.split_tokens = 48;
          config.merge = merge;
          config.path = path;
          SCOPED_TRACE(describe(config));
          const LayerResult together = run_scenario(backend(), config, shuffled)[0][0];
          for (const int32_t request : {0, 1, 2, 7}) {
            const ScenarioResult alone =
                run_scenario(backend(), config, select_requests(all, {request}));
            int64_t begin = 0;
            for (const int32_t r : order) {
              if (r == request) break;
              begin += prompts[r].prompt_len;
            }
            const LayerResult rows =
                rows_of(together, all.dims, begin, begin + prompts[request].prompt_len);
            EXPECT_TRUE(same_bits({{rows}}, alone)) << "request " << request;
          }
          // Beside requests without new tokens, with and without context.
          Scenario padded = select_requests(all, {5, 0, 9});
          for (const int r : {0, 2}) {
            padded.steps[0][r].query_len = 0;
            padded.requests[r].prompt_len = 0;
          }
          EXPECT_TRUE(same_bits(run_scenario(backend(), config, padded),
                                run_scenario(backend(), config, select_requests(all, {0}))));
        }
      }
    }
  }
}

TEST_F(CasesTest, ZeroLengthQueriesInTheMiddle) {
  for (ModelDims dims : kBothDims) {
    dims.num_heads = 9;
    const Scenario scenario = make_scenario(dims, {{0, 0}, {3, 1}, {0, 0}, {5, 1}}, 8, random());
    ASSERT_EQ(scenario.steps.size(), 1u);
    const ScenarioExpectation expected = expect_scenario(scenario, KvCacheFormat::kBf16, 1.0f);
    const double unchunked =
        unchunked_error(backend(), scenario, KvCacheFormat::kBf16, 1.0f, expected);
    for_every_mode(config_for(scenario, 2, 2), [&](const EngineConfig& config) {
      const ScenarioResult result = run_scenario(backend(), config, scenario);
      EXPECT_EQ(result[0][0].out.size(), 2u * 9 * dims.v_head_dim);
      const Tolerance tolerance =
          config.path == PathPolicy::kExpand ? tolerance_of(unchunked) : kAbsorbTolerance;
      EXPECT_TRUE(agrees(result, expected, dims, tolerance));
    });
  }
}

TEST_F(CasesTest, QuantisedCacheEqualsDequantiseThenCompute) {
  constexpr float kScale = 0.037f;
  const ModelDims dims{3, 128, 64, 128, 512};
  for (const KvCacheFormat format : {KvCacheFormat::kFp8E4M3, KvCacheFormat::kFp8DsMla}) {
    // One step, so that the cache is all prefix.
    Scenario quantised = make_scenario(dims, {{150, 7}, {64, 20}, {33, 1}}, 64, random());
    Scenario dequantised = quantised;
    for (Scenario::Request& request : dequantised.requests) {
      const int64_t latent = dims.latent_dim();
      for (int64_t row = 0; row < request.prefix_len; ++row) {
        const auto values = std::span(request.rows[0]).subspan(row * latent, latent);
        const std::vector<float> read = format == KvCacheFormat::kFp8E4M3
                                            ? oracle::through_fp8_e4m3(values, kScale)
                                            : oracle::through_fp8_ds_mla(values);
        std::ranges::copy(read, values.begin());
      }
    }
    // W is no multiple of the page, and the contexts end inside pages.
    for_every_mode(config_for(quantised, 60, 24), [&](EngineConfig config) {
      const ScenarioResult expected = run_scenario(backend(), config, dequantised);
      config.kv_cache_format = format;
      EXPECT_TRUE(
          same_bits(run_scenario(backend(), config, quantised, {.cache_scale = kScale}), expected));
    });
  }
}

}  // namespace
}  // namespace mla::test
