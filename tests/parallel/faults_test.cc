// Ranks that are lost, late, of another opinion or refused; and the fault that this project was
// born from, replayed on the two topologies of its report.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels/forwarding_backend.h"
#include "tests/engine/scenario.h"
#include "tests/parallel/parallel_scenario.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr ModelDims kSmall{2, 16, 8, 24, 32};
constexpr CachePlacement kPlacements[] = {CachePlacement::kSharded, CachePlacement::kReplicated};
constexpr QueryPlacement kQueries[] = {QueryPlacement::kReplicated, QueryPlacement::kSplit};
constexpr StrategyPolicy kStrategies[] = {StrategyPolicy::kGatherKv,
                                          StrategyPolicy::kMergePartials};

class FaultsTest : public BackendTest {
 protected:
  void SetUp() override {
    BackendTest::SetUp();
    if (!IsSkipped() && !on_cpu()) GTEST_SKIP() << "threads as ranks run on the CPU";
  }

  Scenario two_steps() { return make_scenario(kSmall, {{100, 12}, {0, 5}, {33, 9}}, 14, random()); }

  /// Every placement, where a layer of the scenario exchanges something at all.
  template <typename Test>
  void for_every_exchange(const Test& test) {
    for (const CachePlacement placement : kPlacements) {
      for (const QueryPlacement queries : kQueries) {
        for (const StrategyPolicy strategy : kStrategies) {
          const bool exchanges = strategy == StrategyPolicy::kMergePartials ||
                                 placement == CachePlacement::kSharded ||
                                 queries == QueryPlacement::kSplit;
          if (!exchanges) continue;
          const ParallelConfig parallel{.shard = {4, 0, 16},
                                        .placement = placement,
                                        .queries = queries,
                                        .strategy = strategy,
                                        .small_exchange_bytes = 0};
          SCOPED_TRACE(describe(parallel));
          test(parallel);
        }
      }
    }
  }

  /// Every rank but `lost` got an error of communication.
  void expect_all_notice(const ParallelRun& run, int32_t lost, const std::string& message) {
    for (int32_t rank = 0; rank < static_cast<int32_t>(run.outcomes.size()); ++rank) {
      if (rank == lost) continue;
      const RankOutcome& outcome = run.outcomes[rank];
      EXPECT_TRUE(outcome.communication_error) << "rank " << rank << ": " << outcome.message;
      EXPECT_NE(outcome.message.find(message), std::string::npos) << outcome.message;
    }
  }
};

TEST_F(FaultsTest, ARankLostInTheMiddleIsAnErrorOnAllOthers) {
  const Scenario scenario = two_steps();
  for_every_exchange([&](const ParallelConfig& parallel) {
    // Long limit: it is noticed at once.
    const auto begin = steady_clock::now();
    const ParallelRun run = run_parallel(config_for(scenario, 64, 16), parallel, scenario,
                                         {.before_layer = [](int32_t rank, size_t step) {
                                           if (rank == 2 && step == 1)
                                             throw std::runtime_error("killed");
                                         }});
    expect_all_notice(run, 2, "rank 2 left");
    EXPECT_EQ(run.outcomes[2].message, "killed");
    EXPECT_LT(steady_clock::now() - begin, std::chrono::minutes(1));
  });
}

TEST_F(FaultsTest, ALateRankIsAnErrorWithinTheLimit) {
  const Scenario scenario = two_steps();
  for (const bool in_layer : {false, true}) {
    constexpr milliseconds kLimit(1000);
    const auto stall = [&](int32_t rank, size_t step) {
      if (rank == 1 && step == 1) std::this_thread::sleep_for(3 * kLimit);
    };
    ParallelOptions options;
    options.time_limit = kLimit;
    (in_layer ? options.before_layer : options.before_step) = stall;
    const ParallelConfig parallel{.shard = {4, 0, 16}, .strategy = StrategyPolicy::kMergePartials};
    const ParallelRun run = run_parallel(config_for(scenario, 64, 16), parallel, scenario, options);
    // The late one too: it finds the group aborted.
    expect_all_notice(run, -1, "for rank 1");
  }
}

TEST_F(FaultsTest, ARankThatNeverComesIsAnErrorWithinTheLimit) {
  const Scenario scenario = two_steps();
  ParallelOptions options;
  options.time_limit = milliseconds(1000);
  options.before_step = [&](int32_t rank, size_t) {
    if (rank == 3) std::this_thread::sleep_for(std::chrono::seconds(3));
  };
  const ParallelRun run =
      run_parallel(config_for(scenario, 64, 16), {.shard = {4, 0, 16}}, scenario, options);
  expect_all_notice(run, -1, "for rank 3 in exchange_host");
  for (const std::vector<CollectiveCall>& calls : run.calls) EXPECT_TRUE(calls.empty());
}

TEST_F(FaultsTest, ARankWithAnotherBatchIsAnErrorBeforeAnyStreamWork) {
  const Scenario scenario = two_steps();
  for_every_exchange([&](const ParallelConfig& parallel) {
    const ParallelRun run =
        run_parallel(config_for(scenario, 64, 16), parallel, scenario,
                     {.change_batch = [](int32_t rank, std::vector<int32_t>& context_lens) {
                       if (rank == 1) --context_lens[0];
                     }});
    expect_all_notice(run, -1, "rank 1 has plan");
    for (const std::vector<CollectiveCall>& calls : run.calls) EXPECT_TRUE(calls.empty());
  });
}

TEST_F(FaultsTest, ARankThatRefusesTheStepTellsTheOthers) {
  const Scenario scenario = two_steps();
  const ParallelRun run =
      run_parallel(config_for(scenario, 64, 16), {.shard = {4, 0, 16}}, scenario,
                   {.change_batch = [](int32_t rank, std::vector<int32_t>& context_lens) {
                     if (rank == 1) context_lens[0] = -5;
                   }});
  expect_all_notice(run, 1, "rank 1 has plan 0000000000000000");
  EXPECT_FALSE(run.outcomes[1].communication_error);
  EXPECT_NE(run.outcomes[1].message.find("-5"), std::string::npos) << run.outcomes[1].message;
}

/// Fails one op call, as a device may.
class FailingBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  void expand(const ExpandParams& p, const OpContext& c) override {
    if (++calls_ == 2) throw_error(ErrorCode::kDevice, "lost the device");
    backend_.expand(p, c);
  }

 private:
  int calls_ = 0;
};

TEST_F(FaultsTest, ADeviceErrorOnOneRankEndsAll) {
  const Scenario scenario = two_steps();
  int32_t made = 0;
  std::mutex mutex;
  const ParallelRun run =
      run_parallel(config_for(scenario, 32, 16),
                   {.shard = {3, 0, 16}, .strategy = StrategyPolicy::kMergePartials}, scenario,
                   {.wrap_backend = [&](Backend& backend) -> std::unique_ptr<Backend> {
                     const std::lock_guard lock(mutex);
                     if (made++ == 0) return std::make_unique<FailingBackend>(backend);
                     return nullptr;
                   }});
  int32_t communication = 0, device = 0;
  for (const RankOutcome& outcome : run.outcomes) {
    communication += outcome.communication_error;
    device += outcome.message == "lost the device";
    EXPECT_NE(outcome.message.find("lost the device"), std::string::npos) << outcome.message;
  }
  EXPECT_EQ(communication, 2);
  EXPECT_EQ(device, 1);
}

// --- The fault of the report --------------------------------------------------------------------

/// Leaves rows of requests without keys undefined, and reports a finite LSE for them.
class CarelessBackend final : public ForwardingBackend {
 public:
  CarelessBackend(Backend& backend, bool mask) : ForwardingBackend(backend), mask_(mask) {}

  void prefill_attention(const PrefillAttentionParams& p, const OpContext& c) override {
    if (p.prefix_out.data == nullptr && p.out.dtype == DType::kFloat32) {
      // Large and finite, as what an earlier chunk left there would be.
      backend_.fill_bytes(p.out.data, 0x41, p.q_rows * p.out.row_stride * sizeof(float), c.stream);
      backend_.fill_bytes(p.lse.data, 0x3f, p.num_heads * p.lse.head_stride * sizeof(float),
                          c.stream);
    }
    backend_.prefill_attention(p, c);
  }
  void mask_empty_context(const MaskEmptyContextParams& p, const OpContext& c) override {
    if (mask_) backend_.mask_empty_context(p, c);
  }

 private:
  bool mask_;
};

/// glm-5's dims but for the heads; one long prompt beside several that end chunks before it does.
class ReplayTest : public FaultsTest {
 protected:
  Scenario scenario_of(int32_t heads) {
    return make_scenario({heads, 192, 64, 256, 512},
                         {{400, 24}, {60, 9}, {0, 14}, {130, 11}, {90, 6}}, 32, random());
  }

  static EngineConfig config_of(const Scenario& scenario) {
    EngineConfig config = config_for(scenario, 128, 16);
    config.schedule = Schedule::kUniform;
    config.merge = MergeMode::kDiscrete;
    return config;
  }

  static ParallelRun run(const Scenario& scenario, const ParallelConfig& parallel, bool mask) {
    return run_parallel(config_of(scenario), parallel, scenario,
                        {.wrap_backend = [mask](Backend& backend) {
                          return std::make_unique<CarelessBackend>(backend, mask);
                        }});
  }

  void expect_right_with_mask_alone(const Scenario& scenario, const ParallelConfig& parallel) {
    SCOPED_TRACE(describe(parallel));
    const ScenarioExpectation expected = expect_scenario(scenario, KvCacheFormat::kBf16, 1.0f);
    const double unchunked =
        unchunked_error(backend(), scenario, KvCacheFormat::kBf16, 1.0f, expected);
    ASSERT_GT(scenario.steps.size(), 1u);
    const Tolerance tolerance{2 * unchunked + 1e-3, /*lse=*/5e-3};
    const ParallelRun masked = run(scenario, parallel, /*mask=*/true);
    ASSERT_TRUE(masked.ok()) << masked.outcomes[0].message;
    EXPECT_TRUE(agrees(masked.result, expected, scenario.dims, tolerance));
    const ParallelRun unmasked = run(scenario, parallel, /*mask=*/false);
    ASSERT_TRUE(unmasked.ok());
    EXPECT_FALSE(agrees(unmasked.result, expected, scenario.dims, {0.5, 0.5}));
  }
};

TEST_F(ReplayTest, FourRanks) {
  const Scenario scenario = scenario_of(/*heads=*/2);
  for (const QueryPlacement queries : kQueries) {
    for (const StrategyPolicy strategy : kStrategies) {
      expect_right_with_mask_alone(scenario,
                                   {.shard = {4, 0, 16}, .queries = queries, .strategy = strategy});
    }
  }
}

/// Each group has half of the heads; their groups know nothing of each other.
TEST_F(ReplayTest, TwoGroupsOfTwoInAWorldOfFour) {
  const Scenario halves[] = {scenario_of(/*heads=*/1), scenario_of(/*heads=*/1)};
  const ParallelConfig parallel{
      .shard = {2, 0, 16}, .strategy = StrategyPolicy::kMergePartials, .small_exchange_bytes = 0};
  for (const bool mask : {true, false}) {
    std::vector<ParallelRun> runs(2);
    run_ranks(2, [&](int32_t group) { runs[group] = run(halves[group], parallel, mask); });
    for (int group = 0; group < 2; ++group) {
      ASSERT_TRUE(runs[group].ok());
      const ScenarioExpectation expected =
          expect_scenario(halves[group], KvCacheFormat::kBf16, 1.0f);
      const double unchunked =
          unchunked_error(backend(), halves[group], KvCacheFormat::kBf16, 1.0f, expected);
      const ::testing::AssertionResult right =
          agrees(runs[group].result, expected, halves[group].dims,
                 mask ? Tolerance{2 * unchunked + 1e-3, 5e-3} : Tolerance{0.5, 0.5});
      EXPECT_EQ(static_cast<bool>(right), mask) << right.message();
    }
  }
}

}  // namespace
}  // namespace mla::test
