#include "tools/cli/calibrate.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "metadata/error.h"
#include "tools/cli/measure.h"
#include "tools/cli/op_bench.h"
#include "tools/cli/table.h"

namespace mla::cli {

using nlohmann::ordered_json;

CalibrateReport run_calibration(const Options& options, Device& device, Progress& progress) {
  Backend& backend = *device.backend;
  CalibrateReport report;
  report.backend = backend.name();
  report.device = backend.device_description();
  report.model = options.model;

  /// Work a second, of `work` in one call.
  const auto rate = [&](const OpCase& op, double work) {
    progress.show(fmt::format("{} {}", op.name, op.shape));
    op.enqueue(0);
    if (!op.check()) {
      throw_error(ErrorCode::kDevice, "{} {} gives wrong results", op.name, op.shape);
    }
    return work / (measure_ms(backend, {}, options.bench_seconds, op.enqueue) / 1e3);
  };
  const bool cuda = report.backend == "cuda";
  OpBench bench(options, device, cuda ? 2048 : 256, cuda ? 32768 : 4096);
  const OpCase expand = bench.expand();
  report.expand_flops = rate(expand, expand.cost.flops);
  const OpCase attention = bench.attention();
  report.attention_flops = rate(attention, attention.cost.flops);
  const OpCase gather = bench.gather();
  report.gather_bytes = rate(gather, gather.cost.bytes);
  const OpCase merge = bench.merge();
  report.merge_bytes = rate(merge, merge.cost.bytes);
  if (backend.supports_path(options.config.dims, Path::kAbsorb)) {
    OpBench few(options, device, cuda ? 128 : 16, cuda ? 32768 : 4096);
    const OpCase absorb = few.absorbed_attention();
    report.absorb_attention_flops = rate(absorb, absorb.cost.flops);
  }
  return report;
}

ordered_json calibrate_json(const CalibrateReport& report) {
  ordered_json json{{"backend", report.backend},
                    {"device", report.device},
                    {"model", report.model},
                    {"expand_flops_per_second", report.expand_flops},
                    {"attention_flops_per_second", report.attention_flops},
                    {"absorb_attention_flops_per_second", nullptr},
                    {"gather_bytes_per_second", report.gather_bytes},
                    {"merge_bytes_per_second", report.merge_bytes}};
  if (report.absorb_attention_flops > 0) {
    json["absorb_attention_flops_per_second"] = report.absorb_attention_flops;
  }
  return json;
}

std::string calibrate_text(const CalibrateReport& report) {
  Table table({{"rate", Table::Align::kLeft}, {"value"}, {"", Table::Align::kLeft}});
  const auto add = [&](const char* name, double rate, double unit, const char* unit_name) {
    table.add_row({name, fmt::format("{:.4g}", rate / unit), unit_name});
  };
  add("expansion", report.expand_flops, 1e12, "TFLOP/s");
  add("attention, expanded keys", report.attention_flops, 1e12, "TFLOP/s");
  if (report.absorb_attention_flops > 0) {
    add("attention, latent rows", report.absorb_attention_flops, 1e12, "TFLOP/s");
  }
  add("gather", report.gather_bytes, 1e9, "GB/s");
  add("merge", report.merge_bytes, 1e9, "GB/s");
  return fmt::format("{} on {} ({})\n\n{}", report.model, report.backend, report.device,
                     table.to_string());
}

}  // namespace mla::cli
