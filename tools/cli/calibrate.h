// engine_cli calibrate: the rates that a cost model needs.
#ifndef TOOLS_CLI_CALIBRATE_H_
#define TOOLS_CLI_CALIBRATE_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tools/cli/device.h"
#include "tools/cli/options.h"
#include "tools/cli/report.h"

namespace mla::cli {

struct CalibrateReport {
  std::string backend;
  std::string device;
  std::string model;
  double expand_flops = 0.0;            // a second, of the product with kv_b_proj
  double attention_flops = 0.0;         // a second, over expanded keys
  double absorb_attention_flops = 0.0;  // a second, over latent rows; 0: not served
  double gather_bytes = 0.0;            // a second, read and written, from pages to rows
  double merge_bytes = 0.0;             // a second, read and written, of merging partials
};

CalibrateReport run_calibration(const Options& options, Device& device, Progress& progress);
nlohmann::ordered_json calibrate_json(const CalibrateReport& report);
std::string calibrate_text(const CalibrateReport& report);

}  // namespace mla::cli

#endif  // TOOLS_CLI_CALIBRATE_H_
