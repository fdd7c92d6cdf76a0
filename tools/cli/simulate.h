// engine_cli plan --simulate: how long a step would take on other numbers of ranks, by the cost
// model. A model: no GPU is asked, and kernels are taken to run at the given rates.
#ifndef TOOLS_CLI_SIMULATE_H_
#define TOOLS_CLI_SIMULATE_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "metadata/batch.h"
#include "metadata/plan.h"
#include "tools/cli/options.h"

namespace mla::cli {

/// A step over all layers on `ranks` ranks. Exchanges are not overlapped with work by this engine:
/// all of their time is exposed.
struct SimulatedStep {
  int32_t ranks = 1;
  std::string strategy;
  double compute_seconds = 0.0;  // of the busiest rank
  double exchange_seconds = 0.0;
  double load = 1.0;  // work of the busiest rank over the mean
  double seconds() const { return compute_seconds + exchange_seconds; }
};

/// 1, 2, 4, ... and --cp ranks.
std::vector<SimulatedStep> simulate(const Options& options, const PlanConfig& config,
                                    const Batch& batch);

nlohmann::ordered_json simulation_json(const std::vector<SimulatedStep>& steps);
std::string simulation_text(const std::vector<SimulatedStep>& steps);

}  // namespace mla::cli

#endif  // TOOLS_CLI_SIMULATE_H_
