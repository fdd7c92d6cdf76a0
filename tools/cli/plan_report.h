// engine_cli plan: how the contexts of a step are cut into chunks.
#ifndef TOOLS_CLI_PLAN_REPORT_H_
#define TOOLS_CLI_PLAN_REPORT_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "metadata/plan.h"
#include "parallel/partition.h"
#include "tools/cli/options.h"
#include "tools/cli/simulate.h"

namespace mla::cli {

/// One chunk over all ranks. Lengths and starts are global.
struct PlannedChunk {
  Path path = Path::kExpand;
  int32_t request_begin = 0;
  int32_t request_end = 0;
  std::vector<int32_t> starts;    // [n]
  std::vector<int32_t> seq_lens;  // [n]
  bool has_empty_context = false;
  int32_t owner = -1;  // the one rank that attends it; -1: every rank has a part in it

  // By rank, with more than one.
  std::vector<std::vector<int32_t>> local_seq_lens;  // [N][n]
  std::vector<bool> local_has_empty_context;         // [N]

  int32_t seq_tot() const;
  int32_t max_seq_len() const;
};

struct PlanReport {
  Schedule schedule = Schedule::kPacked;
  int32_t workspace_tokens = 0;
  int32_t page_size = 0;
  std::vector<int32_t> query_lens;
  std::vector<int32_t> context_lens;
  std::vector<PlannedChunk> chunks;
  int32_t step = 0;
  int32_t num_steps = 1;

  std::string strategy = "none";     // with one rank
  std::vector<std::string> reasons;  // for the strategy
  double load = 1.0;                 // estimated context work: the busiest rank's over the mean
  std::vector<int64_t> rank_rows;    // context rows of each rank
  uint64_t hash = 0;
  std::vector<SimulatedStep> simulation;  // empty unless asked for
};

/// `backend` says which paths can be planned.
PlanReport make_plan_report(const Options& options, const Backend& backend);

nlohmann::ordered_json plan_json(const PlanReport& report);
std::string plan_text(const PlanReport& report);

}  // namespace mla::cli

#endif  // TOOLS_CLI_PLAN_REPORT_H_
