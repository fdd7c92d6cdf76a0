// engine_cli run: prefills a workload step by step.
#ifndef TOOLS_CLI_RUN_H_
#define TOOLS_CLI_RUN_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/cli/device.h"
#include "tools/cli/options.h"
#include "tools/cli/report.h"
#include "tools/cli/trace.h"
#include "tools/cli/verify.h"

namespace mla::cli {

struct StepReport {
  int64_t query_tokens = 0;
  int64_t context_tokens = 0;
  int64_t chunks = 0;
  double ms = 0.0;  // plan and layers
};

struct RunReport {
  std::string backend;
  std::string device;
  std::string choice;  // see Device
  std::string model;
  std::vector<StepReport> steps;
  int64_t query_tokens = 0;
  int64_t context_tokens = 0;
  double seconds = 0.0;
  double flops = 0.0;
  std::optional<VerifyReport> verify;

  bool ok() const { return !verify || verify->ok; }
};

/// FLOPs of one layer by the definition of attention, whichever path runs:
/// 2 H (P + Rr + V) (sum q context + sum q (q + 1) / 2).
double attention_flops(const ModelDims& dims, const Step& step);

/// `trace`: null, or what the device's backend traces to.
RunReport run_workload(const Options& options, Device& device, Trace* trace, Progress& progress);

nlohmann::ordered_json run_json(const RunReport& report);
/// What is written instead where a run ends in an error.
nlohmann::ordered_json run_error_json(const std::string& message);
std::string run_text(const RunReport& report);

}  // namespace mla::cli

#endif  // TOOLS_CLI_RUN_H_
