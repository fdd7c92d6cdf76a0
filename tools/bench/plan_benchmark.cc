// How long a step's plan takes to build, page-id checks apart. Targets: 64 requests with 1M context
// tokens in total in 20 us, 1,024 requests in 150 us.
//
//   bazel run //tools/bench:plan_benchmark
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "metadata/batch.h"
#include "metadata/model.h"
#include "metadata/plan.h"

namespace mla {
namespace {

constexpr int64_t kContextTokens = 1 << 20;
constexpr int32_t kQueryTokens = 32768;

/// `num_requests` contexts of uneven length, kContextTokens in total.
std::vector<int32_t> uneven_lengths(int32_t num_requests) {
  std::mt19937 random(7);
  const auto mean = static_cast<int32_t>(kContextTokens / num_requests);
  std::vector<int32_t> lengths;
  int64_t rest = kContextTokens;
  for (int32_t r = 0; r < num_requests - 1; ++r) {
    lengths.push_back(mean / 2 + static_cast<int32_t>(random() % static_cast<uint32_t>(mean)));
    rest -= lengths.back();
  }
  lengths.push_back(static_cast<int32_t>(std::max<int64_t>(rest, 0)));
  return lengths;
}

void benchmark_plan(benchmark::State& state, Schedule schedule, ContextShard shard) {
  const auto num_requests = static_cast<int32_t>(state.range(0));
  const std::vector<int32_t> context_lens = uneven_lengths(num_requests);
  std::vector<int32_t> query_start_loc(context_lens.size() + 1);
  for (int32_t r = 0; r <= num_requests; ++r) {
    query_start_loc[r] = kQueryTokens / num_requests * r;
  }

  PlanConfig config;
  config.dims = find_preset("deepseek-v3");
  config.workspace_tokens = 65536;
  config.page_size = 64;
  config.schedule = schedule;
  config.shard = shard;

  StepPlan plan;
  for (auto _ : state) {
    build_plan(config, {query_start_loc, context_lens}, /*table=*/nullptr, plan);
    benchmark::DoNotOptimize(plan.block().data());
    benchmark::ClobberMemory();
  }
  state.counters["chunks"] = static_cast<double>(plan.chunks().size());
  state.counters["block_bytes"] = static_cast<double>(plan.block().size());
}

void register_benchmarks() {
  for (Schedule schedule : {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed}) {
    for (ContextShard shard : {ContextShard{}, ContextShard{8, 3, 64}}) {
      const std::string name = "build_plan/" + std::string(schedule_name(schedule)) + "/cp" +
                               std::to_string(shard.world) + "/requests";
      benchmark::RegisterBenchmark(name.c_str(), benchmark_plan, schedule, shard)
          ->Arg(64)
          ->Arg(1024)
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

}  // namespace
}  // namespace mla

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  mla::register_benchmarks();
  benchmark::RunSpecifiedBenchmarks();
}
