// What may not matter to a result: how it was scheduled, what the workspace held, who merged it.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/forwarding_backend.h"
#include "tests/engine/scenario.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

constexpr ModelDims kSmall{5, 24, 8, 40, 48};

class AgreementTest : public BackendTest {};

TEST_F(AgreementTest, AnyWorkspaceServesAnyStepAlike) {
  const Scenario scenario = make_scenario(
      kSmall, {{random_int(100, 300), 37}, {0, 80}, {random_int(1, 40), 1}, {65, 300}}, 350,
      random());
  const ScenarioExpectation expected = expect_scenario(scenario, KvCacheFormat::kBf16, 1.0f);
  const double unchunked =
      unchunked_error(backend(), scenario, KvCacheFormat::kBf16, 1.0f, expected);
  for (const Schedule schedule : {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed}) {
    for (const MergeMode merge : {MergeMode::kFused, MergeMode::kDiscrete}) {
      for (const PathPolicy path : path_policies(backend(), kSmall)) {
        for (const int32_t w : {8, 17, 64, 1000}) {
          EngineConfig config = config_for(scenario, w, 8);
          config.schedule = schedule;
          config.merge = merge;
          config.path = path;
          SCOPED_TRACE(describe(config));
          const ScenarioResult result = run_scenario(backend(), config, scenario);
          const Tolerance tolerance =
              path == PathPolicy::kExpand ? tolerance_of(unchunked) : kAbsorbTolerance;
          ASSERT_TRUE(agrees(result, expected, kSmall, tolerance));
          ASSERT_TRUE(same_bits(result, run_scenario(backend(), config, scenario, {.fill = 0x41})));
        }
      }
    }
  }
}

TEST_F(AgreementTest, OnePlanServesLayersWithWeightsAndCachesOfTheirOwn) {
  const Scenario scenario =
      make_scenario(kSmall, {{90, 20}, {0, 33}, {17, 5}}, 40, random(), /*num_layers=*/3);
  const ScenarioExpectation expected = expect_scenario(scenario, KvCacheFormat::kBf16, 1.0f);
  const double unchunked =
      unchunked_error(backend(), scenario, KvCacheFormat::kBf16, 1.0f, expected);
  for (const MergeMode merge : {MergeMode::kFused, MergeMode::kDiscrete}) {
    EngineConfig config = config_for(scenario, 32, 16);
    config.path = PathPolicy::kExpand;
    config.merge = merge;
    EXPECT_TRUE(agrees(run_scenario(backend(), config, scenario), expected, kSmall,
                       tolerance_of(unchunked)));
  }
}

// Below the default, so that absorbed scores err less than the tolerance is for, not more.
TEST_F(AgreementTest, TheSoftmaxScaleIsTheCallers) {
  Scenario scenario = make_scenario(kSmall, {{90, 20}, {0, 33}, {17, 5}}, 40, random());
  scenario.softmax_scale = 0.4f * default_softmax_scale(kSmall);
  const ScenarioExpectation expected = expect_scenario(scenario, KvCacheFormat::kBf16, 1.0f);
  const double unchunked =
      unchunked_error(backend(), scenario, KvCacheFormat::kBf16, 1.0f, expected);
  for (const MergeMode merge : {MergeMode::kFused, MergeMode::kDiscrete}) {
    for (const PathPolicy path : path_policies(backend(), kSmall)) {
      EngineConfig config = config_for(scenario, 32, 16);
      config.merge = merge;
      config.path = path;
      EXPECT_TRUE(agrees(run_scenario(backend(), config, scenario), expected, kSmall,
                         path == PathPolicy::kExpand ? tolerance_of(unchunked) : kAbsorbTolerance))
          << describe(config);
    }
  }
}

TEST_F(AgreementTest, TheLseIsOptional) {
  const Scenario scenario = make_scenario(kSmall, {{90, 20}, {0, 33}}, 40, random());
  for (const MergeMode merge : {MergeMode::kFused, MergeMode::kDiscrete}) {
    EngineConfig config = config_for(scenario, 32, 16);
    config.merge = merge;
    ScenarioResult with = run_scenario(backend(), config, scenario);
    ScenarioResult without = run_scenario(backend(), config, scenario, {.without_lse = true});
    for (ScenarioResult* result : {&with, &without}) {
      for (std::vector<LayerResult>& step : *result) step[0].lse.clear();
    }
    EXPECT_TRUE(same_bits(with, without));
  }
}

/// Counts calls that a layer may not make.
class WatchedBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  void* allocate(size_t bytes) override { return ++calls_, backend_.allocate(bytes); }
  void copy_to_device(void* device, const void* host, size_t bytes, Stream stream) override {
    ++calls_;
    backend_.copy_to_device(device, host, bytes, stream);
  }
  void copy_to_host(void* host, const void* device, size_t bytes, Stream stream) override {
    ++calls_;
    backend_.copy_to_host(host, device, bytes, stream);
  }
  void synchronize(Stream stream) override {
    ++calls_;
    backend_.synchronize(stream);
  }
  int take_calls() { return std::exchange(calls_, 0); }

 private:
  int calls_ = 0;
};

TEST_F(AgreementTest, ALayerNeitherAllocatesNorCopiesNorWaits) {
  const Scenario scenario = make_scenario(kSmall, {{90, 20}, {0, 33}, {40, 1}}, 64, random());
  WatchedBackend watched(backend());
  for (const MergeMode merge : {MergeMode::kFused, MergeMode::kDiscrete}) {
    for (const PathPolicy path : path_policies(backend(), kSmall)) {
      EngineConfig config = config_for(scenario, 32, 16);
      config.merge = merge;
      config.path = path;
      RunOptions options;
      int calls = -1;
      options.around_layer = [&](const std::function<void()>& run) {
        watched.take_calls();
        run();
        calls = watched.take_calls();
      };
      run_scenario(watched, config, scenario, options);
      EXPECT_EQ(calls, 0) << describe(config);
    }
  }
}

}  // namespace
}  // namespace mla::test
