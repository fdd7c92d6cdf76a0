// engine_cli info: dimensions, memory, device and kernels of a configuration.
#ifndef TOOLS_CLI_INFO_H_
#define TOOLS_CLI_INFO_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "engine/config.h"
#include "tools/cli/device.h"
#include "tools/cli/options.h"

namespace mla::cli {

struct InfoReport {
  std::string model;
  EngineConfig config;
  int32_t cache_row_bytes = 0;
  WorkspaceLayout workspace;
  std::string backend;
  std::string device;
  std::string choice;  // see Device
  std::string expand_kernel;
  std::string absorb_kernel;  // empty: the backend has none
  std::string commit;
};

InfoReport make_info_report(const Options& options, const Device& device);
nlohmann::ordered_json info_json(const InfoReport& report);
std::string info_text(const InfoReport& report);

/// --commit, else $MLA_COMMIT, else what git says of the working folder, else "unknown".
std::string find_commit(const Options& options);

}  // namespace mla::cli

#endif  // TOOLS_CLI_INFO_H_
