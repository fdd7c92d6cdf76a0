// engine_cli bench: times single ops and whole layers, after checking their results.
#ifndef TOOLS_CLI_BENCH_H_
#define TOOLS_CLI_BENCH_H_

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/cli/device.h"
#include "tools/cli/options.h"
#include "tools/cli/report.h"

namespace mla::cli {

struct BenchResult {
  std::string name;
  std::string shape;
  double ms = 0.0;                       // median
  double tflops = 0.0;                   // 0: an op that only moves data
  double gbps = 0.0;                     // bytes that must be read and written
  std::optional<double> floor_fraction;  // of the least time the device allows; known for an H200
};

struct BenchReport {
  std::string device;
  std::string driver;
  std::string commit;
  std::vector<BenchResult> results;
  bool ok = true;  // every case gave right results before it was timed
};

BenchReport run_bench(const Options& options, Device& device, Progress& progress);
nlohmann::ordered_json bench_json(const BenchReport& report);
std::string bench_text(const BenchReport& report);

}  // namespace mla::cli

#endif  // TOOLS_CLI_BENCH_H_
