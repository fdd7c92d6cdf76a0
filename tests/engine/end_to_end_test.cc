// Prompts prefilled over several steps, in random shapes, against the oracle: every schedule, merge
// mode and path on one scenario, so that one expectation judges them all.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "tests/engine/scenario.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

constexpr Schedule kSchedules[] = {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed};
constexpr MergeMode kMerges[] = {MergeMode::kFused, MergeMode::kDiscrete};

struct DimsCase {
  std::string name;
  ModelDims dims;  // heads: as the test draws them
};
const DimsCase kDims[] = {
    {"deepseek", {1, 128, 64, 128, 512}},
    {"glm5", {1, 192, 64, 256, 512}},
    {"small", {1, 24, 8, 40, 48}},
};

using Parameters = std::tuple<int, KvCacheFormat, int32_t>;  // index of kDims, format, page size

class EndToEndTest : public BackendTest, public ::testing::WithParamInterface<Parameters> {
 protected:
  const DimsCase& dims_case() const { return kDims[std::get<0>(GetParam())]; }
  KvCacheFormat format() const { return std::get<1>(GetParam()); }
  int32_t page_size() const { return std::get<2>(GetParam()); }

  /// Unequal lengths, some without prefix, some without new tokens.
  std::vector<Prompt> random_prompts() {
    std::vector<Prompt> prompts;
    for (int32_t n = random_int(3, 5); n > 0; --n) {
      prompts.push_back({random_chance(0.3) ? 0 : random_int(1, 150),
                         random_chance(0.2) ? random_int(0, 1) : random_int(2, 60)});
    }
    prompts.push_back({random_int(100, 200), random_int(20, 40)});
    std::shuffle(prompts.begin(), prompts.end(), random());
    return prompts;
  }

  RunOptions random_options(float scale) {
    return {.cache_scale = scale,
            .fill = random_chance(0.5) ? kPoison : uint8_t{0},
            .out_dtype = random_chance(0.5) ? DType::kBFloat16 : DType::kFloat32,
            .strided = random_chance(0.5),
            .lse_rows_first = random_chance(0.5),
            .without_lse = false,
            .table_on_device = random_chance(0.3)};
  }
};

TEST_P(EndToEndTest, EverySchedulePathAndMergeAgreesWithTheOracle) {
  ModelDims dims = dims_case().dims;
  const bool small = dims.kv_lora_rank < 512;
  const int32_t heads_cases[] = {1, 5, 12, 16};
  dims.num_heads = heads_cases[small || random_chance(0.25) ? random_int(0, 3) : random_int(0, 1)];
  const Scenario scenario = make_scenario(dims, random_prompts(), random_int(30, 90), random());
  const float scale = 0.037f;
  const std::vector<int32_t> heads = {0, dims.num_heads - 1};
  const ScenarioExpectation expected = expect_scenario(
      scenario, format(), scale, small || dims.num_heads == 1 ? std::vector<int32_t>{} : heads);
  const double unchunked = unchunked_error(backend(), scenario, format(), scale, expected);

  for (const Schedule schedule : kSchedules) {
    for (const MergeMode merge : kMerges) {
      for (const PathPolicy path : path_policies(backend(), dims)) {
        EngineConfig config = config_for(scenario, random_int(page_size(), 160), page_size());
        config.kv_cache_format = format();
        config.schedule = schedule;
        config.merge = merge;
        config.path = path;
        SCOPED_TRACE(describe(config));
        const ScenarioResult result =
            run_scenario(backend(), config, scenario, random_options(scale));
        const Tolerance tolerance =
            path == PathPolicy::kExpand ? tolerance_of(unchunked) : kAbsorbTolerance;
        ASSERT_TRUE(agrees(result, expected, dims, tolerance));
      }
    }
  }
}

std::string parameters_name(const ::testing::TestParamInfo<Parameters>& info) {
  return kDims[std::get<0>(info.param)].name + "_" +
         std::string(kv_cache_format_name(std::get<1>(info.param))) + "_page" +
         std::to_string(std::get<2>(info.param));
}

INSTANTIATE_TEST_SUITE_P(LargeRank, EndToEndTest,
                         ::testing::Combine(::testing::Values(0, 1),
                                            ::testing::Values(KvCacheFormat::kBf16,
                                                              KvCacheFormat::kFp8E4M3,
                                                              KvCacheFormat::kFp8DsMla),
                                            ::testing::Values(1, 16, 64)),
                         parameters_name);
INSTANTIATE_TEST_SUITE_P(SmallRank, EndToEndTest,
                         ::testing::Combine(::testing::Values(2),
                                            ::testing::Values(KvCacheFormat::kBf16,
                                                              KvCacheFormat::kFp8E4M3),
                                            ::testing::Values(1, 16, 64)),
                         parameters_name);

}  // namespace
}  // namespace mla::test
