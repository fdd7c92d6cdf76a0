// Any number of ranks gives what the oracle says: every placement, strategy and schedule, over
// lengths that divide by nothing, shorter than the ranks are many, or not there at all.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tests/engine/scenario.h"
#include "tests/parallel/parallel_scenario.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

constexpr ModelDims kSmall{5, 24, 8, 40, 48};
constexpr ModelDims kWide{3, 24, 16, 40, 48};  // rows of 64 bytes as fp8_e4m3
constexpr ModelDims kDsMla{2, 16, 64, 24, 512};
constexpr CachePlacement kPlacements[] = {CachePlacement::kSharded, CachePlacement::kReplicated};
constexpr QueryPlacement kQueries[] = {QueryPlacement::kReplicated, QueryPlacement::kSplit};
constexpr StrategyPolicy kStrategies[] = {StrategyPolicy::kGatherKv,
                                          StrategyPolicy::kMergePartials};
constexpr Schedule kSchedules[] = {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed};

/// What one run gave, as what another is to give.
ScenarioExpectation expectation_of(const ScenarioResult& result, const ModelDims& dims) {
  std::vector<int32_t> heads(dims.num_heads);
  std::iota(heads.begin(), heads.end(), 0);
  ScenarioExpectation expected;
  for (const std::vector<LayerResult>& layers : result) {
    std::vector<Expected>& step = expected.emplace_back();
    for (const LayerResult& layer : layers) {
      step.push_back(
          {heads, {layer.out.begin(), layer.out.end()}, {layer.lse.begin(), layer.lse.end()}});
    }
  }
  return expected;
}

/// On the CPU: threads as ranks reach each other's memory.
class ParallelTest : public BackendTest {
 protected:
  void SetUp() override {
    BackendTest::SetUp();
    if (!IsSkipped() && !on_cpu()) GTEST_SKIP() << "threads as ranks run on the CPU";
  }

  template <typename T, size_t kCount>
  T one_of(const T (&values)[kCount]) {
    return values[random_int(0, kCount - 1)];
  }

  /// Calls `test` with every placement of caches and queries, strategy and way of exchanging.
  template <typename Test>
  void for_every_way(const ContextShard& shard, const Test& test) {
    for (const CachePlacement placement : kPlacements) {
      for (const QueryPlacement queries : kQueries) {
        for (const StrategyPolicy strategy : kStrategies) {
          for (const int64_t small : {int64_t{0}, int64_t{1} << 20}) {
            const bool decides = queries == QueryPlacement::kReplicated &&
                                 strategy == StrategyPolicy::kMergePartials;
            if (small > 0 && !decides) continue;
            const ParallelConfig parallel{.shard = shard,
                                          .placement = placement,
                                          .queries = queries,
                                          .strategy = strategy,
                                          .small_exchange_bytes = small};
            SCOPED_TRACE(describe(parallel));
            test(parallel);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }

  /// Runs it against the oracle, by the field's rule (an LSE of one key is one score, in which a
  /// flip of K's rounding to bf16 shows: at these dims up to some 5e-3), closely against the engine
  /// of one rank, which rounds alike, and again from other scratch for the same bits.
  void expect_agreement(const Scenario& scenario, const EngineConfig& config,
                        const ParallelConfig& parallel, const ScenarioExpectation& expected,
                        double unchunked, ParallelOptions options = {}) {
    SCOPED_TRACE(describe(config));
    const ParallelRun run = run_parallel(config, parallel, scenario, options);
    for (const RankOutcome& outcome : run.outcomes) ASSERT_EQ(outcome.message, "");
    ASSERT_TRUE(agrees(run.result, expected, scenario.dims, {2 * unchunked + 1e-3, /*lse=*/5e-3}));
    EngineConfig expanding = config;
    expanding.path = PathPolicy::kExpand;  // what auto is here
    const ScenarioResult alone =
        run_scenario(backend(), expanding, scenario,
                     {.cache_scale = options.cache_scale, .out_dtype = options.out_dtype});
    const bool rounded = options.out_dtype == DType::kBFloat16;
    ASSERT_TRUE(agrees(run.result, expectation_of(alone, scenario.dims), scenario.dims,
                       {rounded ? 2e-3 : 1e-5, /*lse=*/1e-5}));
    options.fill = 0x41;
    ASSERT_TRUE(same_bits(run.result, run_parallel(config, parallel, scenario, options).result));
  }
};

class RanksTest : public ParallelTest, public ::testing::WithParamInterface<int32_t> {};

TEST_P(RanksTest, EveryWayAgreesWithTheOracle) {
  const int32_t world = GetParam();
  const int32_t interleaves[] = {1, 16, 64};
  const int32_t pages[] = {1, 16, 64};
  const int32_t contexts[] = {0, 1, world - 1, world, 67, 150, 301};
  const int32_t queries[] = {0, 1, 2, 3, 17};
  for (const Schedule schedule : kSchedules) {
    for_every_way({world, 0, 1}, [&](ParallelConfig parallel) {
      parallel.shard.interleave = one_of(interleaves);
      std::vector<Prompt> prompts;
      for (int32_t n = random_int(1, 5); n > 0; --n) {
        prompts.push_back({one_of(contexts), one_of(queries)});
      }
      const Scenario scenario =
          make_scenario(kSmall, prompts, random_chance(0.5) ? 1000 : 11, random());
      const int32_t page = one_of(pages);
      EngineConfig config = config_for(scenario, page + random_int(0, 100), page);
      config.schedule = schedule;
      config.merge = random_chance(0.5) ? MergeMode::kFused : MergeMode::kDiscrete;
      const ParallelOptions options{
          .out_dtype = random_chance(0.5) ? DType::kBFloat16 : DType::kFloat32,
          .strided = random_chance(0.5),
          .lse_rows_first = random_chance(0.5)};
      const ScenarioExpectation expected = expect_scenario(scenario, KvCacheFormat::kBf16, 1.0f);
      const double unchunked =
          unchunked_error(backend(), scenario, KvCacheFormat::kBf16, 1.0f, expected);
      expect_agreement(scenario, config, parallel, expected, unchunked, options);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, RanksTest, ::testing::Values(1, 2, 3, 4, 5, 7, 8));

class ParallelCasesTest : public ParallelTest {
 protected:
  void expect_every_way(const Scenario& scenario, EngineConfig config, const ContextShard& shard,
                        ParallelOptions options = {}) {
    const KvCacheFormat format = config.kv_cache_format;
    const ScenarioExpectation expected = expect_scenario(scenario, format, options.cache_scale);
    const double unchunked =
        unchunked_error(backend(), scenario, format, options.cache_scale, expected);
    for (const MergeMode merge : {MergeMode::kFused, MergeMode::kDiscrete}) {
      config.merge = merge;
      for_every_way(shard, [&](const ParallelConfig& parallel) {
        expect_agreement(scenario, config, parallel, expected, unchunked, options);
      });
      if (HasFatalFailure()) return;
    }
  }
};

TEST_F(ParallelCasesTest, SevenLongContextsOverEightRanks) {
  const Scenario scenario =
      make_scenario({1, 24, 8, 40, 48}, std::vector<Prompt>(7, {12345, 33}), 1000, random());
  const ScenarioExpectation expected = expect_scenario(scenario, KvCacheFormat::kBf16, 1.0f);
  const double unchunked =
      unchunked_error(backend(), scenario, KvCacheFormat::kBf16, 1.0f, expected);
  const EngineConfig config = config_for(scenario, 65536, 64);
  for (const StrategyPolicy strategy : kStrategies) {
    const ParallelConfig parallel{
        .shard = {8, 0, 1}, .queries = one_of(kQueries), .strategy = strategy};
    SCOPED_TRACE(describe(parallel));
    const ParallelRun run = run_parallel(config, parallel, scenario);
    ASSERT_TRUE(run.ok());
    EXPECT_TRUE(agrees(run.result, expected, scenario.dims, {2 * unchunked + 1e-3, /*lse=*/5e-3}));
  }
}

TEST_F(ParallelCasesTest, RanksWithoutKeysInAChunkThatIsNotEmpty) {
  const Scenario scenario = make_scenario(kSmall, {{1000, 9}, {50, 5}}, 100, random());
  expect_every_way(scenario, config_for(scenario, 65536, 64), {4, 0, 64});
  EngineConfig uniform = config_for(scenario, 128, 64);
  uniform.schedule = Schedule::kUniform;
  expect_every_way(scenario, uniform, {4, 0, 64});
}

TEST_F(ParallelCasesTest, SpansThatMissRanksAltogether) {
  ASSERT_EQ(local_span_length(16, 48, {4, 0, 16}), 0);
  ASSERT_EQ(local_span_length(16, 48, {4, 1, 16}), 16);
  ASSERT_EQ(local_span_length(16, 48, {4, 2, 16}), 16);
  ASSERT_EQ(local_span_length(16, 48, {4, 3, 16}), 0);
  const Scenario scenario = make_scenario(kSmall, {{48, 3}, {90, 4}}, 100, random());
  EngineConfig config = config_for(scenario, 40, 16);
  config.schedule = Schedule::kFixed;
  config.split_tokens = 16;
  expect_every_way(scenario, config, {4, 0, 16});
}

TEST_F(ParallelCasesTest, FewerTokensThanRanks) {
  struct {
    int32_t world;
    std::vector<Prompt> prompts;
  } const cases[] = {
      {2, {{0, 2}}}, {4, {{4097, 1}}}, {4, {{30, 5}, {7, 4}}}, {8, {{3, 1}, {0, 1}}}};
  for (const auto& [world, prompts] : cases) {
    const Scenario scenario = make_scenario(kSmall, prompts, 100, random());
    expect_every_way(scenario, config_for(scenario, 1024, 16), {world, 0, 16});
  }
}

TEST_F(ParallelCasesTest, NoNewTokensAtAll) {
  const Scenario scenario = make_scenario(kSmall, {{30, 0}, {0, 0}}, 100, random());
  for_every_way({3, 0, 1}, [&](const ParallelConfig& parallel) {
    const ParallelRun run = run_parallel(config_for(scenario, 64, 16), parallel, scenario);
    ASSERT_TRUE(run.ok());
    EXPECT_TRUE(run.calls[0].empty());
  });
}

TEST_F(ParallelCasesTest, Fp8CachesTravelAsTheyAreStored) {
  const Scenario wide = make_scenario(kWide, {{77, 9}, {0, 3}, {130, 2}}, 6, random());
  EngineConfig config = config_for(wide, 48, 16);
  config.kv_cache_format = KvCacheFormat::kFp8E4M3;
  ParallelOptions options;
  options.cache_scale = 0.037f;
  expect_every_way(wide, config, {2, 0, 16}, options);

  // Starts that are no multiple of the page, on either rank.
  const Scenario ds_mla = make_scenario(kDsMla, {{101, 7}, {45, 2}}, 100, random());
  config = config_for(ds_mla, 48, 16);
  config.kv_cache_format = KvCacheFormat::kFp8DsMla;
  expect_every_way(ds_mla, config, {2, 0, 3});
}

TEST_F(ParallelCasesTest, SeveralLayersAndNoLse) {
  const Scenario scenario =
      make_scenario(kSmall, {{70, 9}, {0, 30}, {33, 1}}, 25, random(), /*num_layers=*/2);
  expect_every_way(scenario, config_for(scenario, 32, 16), {3, 0, 16});
  const EngineConfig config = config_for(scenario, 32, 16);
  for_every_way({3, 0, 16}, [&](const ParallelConfig& parallel) {
    ParallelRun with = run_parallel(config, parallel, scenario);
    ParallelRun without = run_parallel(config, parallel, scenario, {.without_lse = true});
    ASSERT_TRUE(with.ok() && without.ok());
    EXPECT_EQ(with.calls, without.calls);
    for (ParallelRun* run : {&with, &without}) {
      for (std::vector<LayerResult>& step : run->result) {
        for (LayerResult& layer : step) layer.lse.clear();
      }
    }
    EXPECT_TRUE(same_bits(with.result, without.result));
  });
}

TEST_F(ParallelCasesTest, FixedScheduleIsIndependentOfTheBatch) {
  const Scenario all =
      make_scenario(kSmall, {{200, 17}, {90, 40}, {0, 70}, {33, 2}, {131, 5}}, 1000, random());
  const Scenario alone = select_requests(all, {1});
  const int64_t row = int64_t{kSmall.num_heads} * kSmall.v_head_dim;
  EngineConfig config = config_for(all, 100, 16);
  config.schedule = Schedule::kFixed;
  config.split_tokens = 48;
  for_every_way({4, 0, 16}, [&](const ParallelConfig& parallel) {
    if (parallel.queries == QueryPlacement::kSplit) return;  // cut where the batch says
    const ParallelRun together = run_parallel(config, parallel, all);
    const ParallelRun single = run_parallel(config, parallel, alone);
    ASSERT_TRUE(together.ok() && single.ok());
    const LayerResult& from = together.result[0][0];
    const LayerResult rows{
        {from.out.begin() + 17 * row, from.out.begin() + 57 * row},
        {from.lse.begin() + 17 * kSmall.num_heads, from.lse.begin() + 57 * kSmall.num_heads}};
    EXPECT_TRUE(same_bits({{rows}}, single.result));
  });
}

TEST_F(ParallelCasesTest, AutoRunsWhatItChose) {
  const Scenario scenario = make_scenario(kSmall, {{300, 60}, {40, 3}}, 100, random());
  const ScenarioExpectation expected = expect_scenario(scenario, KvCacheFormat::kBf16, 1.0f);
  const double unchunked =
      unchunked_error(backend(), scenario, KvCacheFormat::kBf16, 1.0f, expected);
  const EngineConfig config = config_for(scenario, 64, 16);
  ParallelConfig parallel{.shard = {4, 0, 16}, .queries = QueryPlacement::kSplit};
  parallel.rates.collective_seconds = 1e-15;
  for (const auto& [link, strategy] :
       {std::pair{1e6, Strategy::kGatherKv}, {1e18, Strategy::kMergePartials}}) {
    parallel.rates.link_bytes_per_second = link;
    expect_agreement(scenario, config, parallel, expected, unchunked);
    EXPECT_EQ(run_parallel(config, parallel, scenario).strategy, strategy);
  }
}

}  // namespace
}  // namespace mla::test
