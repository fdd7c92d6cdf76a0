#include "tools/cli/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "tools/cli/info.h"
#include "tools/cli/measure.h"
#include "tools/cli/op_bench.h"
#include "tools/cli/run.h"
#include "tools/cli/session.h"
#include "tools/cli/table.h"
#include "tools/cli/verify.h"
#include "tools/cli/workload.h"

namespace mla::cli {

using nlohmann::ordered_json;

namespace {

struct LayerCase {
  std::string shape;
  std::vector<int32_t> query_lens;
  std::vector<int32_t> context_lens;
};

std::vector<LayerCase> layer_cases(const Options& options, bool cuda) {
  if (options.single_step) {
    return {{fmt::format("q {} c {}", fmt::join(options.query_lens, ","),
                         fmt::join(options.context_lens, ",")),
             options.query_lens, options.context_lens}};
  }
  if (!cuda) {
    return {{"q512 c0", {512}, {0}},
            {"q512 c8192", {512}, {8192}},
            {"q16 c8192", {16}, {8192}},
            {"q 64,17,1 c 10240,0,512", {64, 17, 1}, {10240, 0, 512}}};
  }
  std::vector<int32_t> one_long_context(32, 16);
  one_long_context[0] = 60000;
  return {
      {"q4096 c65536", {4096}, {65536}},
      {"q4096 c262144", {4096}, {262144}},
      {"q8192 c0", {8192}, {0}},
      {"q512 c65536", {512}, {65536}},
      {"q128 c65536", {128}, {65536}},
      {"8 x q512 c8192", std::vector<int32_t>(8, 512), std::vector<int32_t>(8, 8192)},
      {"32 x q513 c60000 + 31 x c16", std::vector<int32_t>(32, 513), one_long_context},
      {"4 x q2048 c0,131072,4096,32768", std::vector<int32_t>(4, 2048), {0, 131072, 4096, 32768}}};
}

/// Buffers that calls take in turn, so that one call does not find the last one's in a cache.
constexpr int kBufferSets = 3;

BenchResult bench_layer(const Options& options, const LayerCase& layer_case, Device& device,
                        bool& ok) {
  Options case_options = options;
  case_options.single_step = true;
  case_options.query_lens = layer_case.query_lens;
  case_options.context_lens = layer_case.context_lens;
  case_options.num_layers = 1;
  const Workload workload = make_workload(case_options);
  const Step& step = workload.steps[0];

  std::vector<std::unique_ptr<Session>> sessions;
  for (int i = 0; i < kBufferSets; ++i) {
    sessions.push_back(std::make_unique<Session>(case_options, workload, *device.backend,
                                                 *device.executor, /*poison=*/true));
    sessions.back()->begin_step(step);
    sessions.back()->load_layer(0);
  }
  constexpr VerifySample kSample{.max_scores = 0, .random_rows = 8, .max_heads = 2};
  Verifier verifier(options.kv_cache_scale, *device.executor, kSample);
  sessions[0]->run_layer(0);
  verifier.check_layer(*sessions[0], 0);
  ok = ok && verifier.report().ok;

  BenchResult result;
  result.name = "layer";
  result.shape = fmt::format("H{} {}", options.config.dims.num_heads, layer_case.shape);
  result.ms = measure_ms(*device.backend, {}, options.bench_seconds,
                         [&](int64_t i) { sessions[i % kBufferSets]->enqueue_layer(0); });
  const LayerCost cost = layer_cost(options.config, step);
  set_rates(cost, *device.backend, result);
  return result;
}

}  // namespace

BenchReport run_bench(const Options& options, Device& device, Progress& progress) {
  BenchReport report;
  report.device = device.backend->device_description();
  const bool cuda = device.backend->name() == "cuda";
  if (cuda) report.driver = driver_version();
  report.commit = find_commit(options);
  run_op_bench(options, device, progress, report);
  for (const LayerCase& layer_case : layer_cases(options, cuda)) {
    progress.show(fmt::format("layer {}", layer_case.shape));
    report.results.push_back(bench_layer(options, layer_case, device, report.ok));
  }
  return report;
}

ordered_json bench_json(const BenchReport& report) {
  ordered_json json{{"device", report.device},
                    {"driver", nullptr},
                    {"commit", report.commit},
                    {"verified", report.ok},
                    {"results", ordered_json::array()}};
  if (!report.driver.empty()) json["driver"] = report.driver;
  for (const BenchResult& result : report.results) {
    ordered_json entry{{"name", result.name}, {"shape", result.shape}, {"ms", result.ms}};
    entry["tflops"] = result.tflops;
    entry["gbps"] = result.gbps;
    entry["floor_fraction"] = nullptr;
    if (result.floor_fraction) entry["floor_fraction"] = *result.floor_fraction;
    entry["peer_ratio"] = nullptr;  // needs the peer in the same run: tools/bench compares
    json["results"].push_back(std::move(entry));
  }
  return json;
}

std::string bench_text(const BenchReport& report) {
  std::string text = fmt::format("{}{}{}, commit {}; results checked before timing: {}\n\n",
                                 report.device, report.driver.empty() ? "" : ", driver ",
                                 report.driver, report.commit, report.ok ? "ok" : "WRONG");
  Table table({{"name", Table::Align::kLeft},
               {"shape", Table::Align::kLeft},
               {"ms"},
               {"TFLOP/s"},
               {"GB/s"},
               {"of floor"}});
  for (const BenchResult& result : report.results) {
    table.add_row(
        {result.name, result.shape, fmt::format("{:.4g}", result.ms),
         result.tflops == 0.0 ? "" : fmt::format("{:.4g}", result.tflops),
         fmt::format("{:.4g}", result.gbps),
         result.floor_fraction ? fmt::format("{:.0f}%", 100 * *result.floor_fraction) : ""});
  }
  return text + table.to_string();
}

}  // namespace mla::cli
