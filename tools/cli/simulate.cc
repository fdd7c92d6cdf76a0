#include "tools/cli/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "parallel/partition.h"
#include "tools/cli/session.h"
#include "tools/cli/table.h"

namespace mla::cli {

using nlohmann::ordered_json;

namespace {

/// Query-key pairs of an item.
double scores_of(const AttentionItem& item) {
  if (item.causal_offset == kUnmasked) return double(item.q_len) * item.k_len;
  // Query i sees min(k_len, i + offset + 1) keys; the last one, by the plan, all.
  const double first = std::min<double>(item.causal_offset + 1.0, item.k_len);
  return (first + item.k_len) / 2 * item.q_len;
}

/// What one rank computes in a layer.
Cost work_of(const StepPlan& plan) {
  const ModelDims& dims = plan.config().dims;
  Cost cost;
  const auto add = [&](BlockArray<AttentionItem> items) {
    for (const AttentionItem& item : plan.host(items)) {
      cost.attention_flops += attention_flops(dims, scores_of(item));
    }
  };
  for (const Chunk& chunk : plan.chunks()) {
    if (chunk.items.size == 0) continue;
    cost.expansion_flops += expansion_flops(dims, chunk.seq_tot);
    add(chunk.items);
  }
  for (const NewTokenPiece& piece : plan.new_token_pieces()) {
    if (piece.carried_items.size + piece.final_items.size == 0) continue;
    cost.expansion_flops += expansion_flops(dims, piece.row_end - piece.row_begin);
    add(piece.carried_items);
    add(piece.final_items);
  }
  return cost;
}

/// A rank receives a block from every other: from those of its node over the link, from others over
/// its NIC, at the same time.
double exchange_seconds(const ContextParallelOptions& cp, const RankPlan& plan, int32_t ranks) {
  const int32_t near = std::min(ranks, cp.ranks_per_node) - 1;
  const int32_t far = ranks - 1 - near;
  double seconds = 0.0;
  if (ranks == 1) return seconds;
  for (const CollectiveCall& call : plan.collectives(DType::kBFloat16)) {
    const auto bytes = static_cast<double>(call.bytes);
    seconds += cp.rates.collective_seconds + std::max(near * bytes / cp.rates.link_bytes_per_second,
                                                      far * bytes / cp.nic_bytes_per_second);
  }
  return seconds;
}

SimulatedStep simulate_ranks(const Options& options, const PlanConfig& config, const Batch& batch,
                             int32_t ranks) {
  ParallelConfig parallel = parallel_config(options, 0);
  parallel.shard.world = ranks;
  if (ranks > options.cp.ranks_per_node) {
    parallel.rates.link_bytes_per_second = options.cp.nic_bytes_per_second;
  }
  SimulatedStep step{.ranks = ranks, .strategy = "none"};
  RankPlan plan;
  double sum = 0.0;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    parallel.shard.rank = rank;
    build_rank_plan(parallel, config, options.config.kv_cache_format, batch, nullptr, plan);
    const double seconds =
        options.num_layers * work_of(plan.plan).compute_seconds(options.cp.rates);
    step.compute_seconds = std::max(step.compute_seconds, seconds);
    sum += seconds;
  }
  if (sum > 0.0) step.load = step.compute_seconds * ranks / sum;
  step.exchange_seconds = options.num_layers * exchange_seconds(options.cp, plan, ranks);
  if (ranks > 1) step.strategy = strategy_name(plan.strategy);
  return step;
}

}  // namespace

std::vector<SimulatedStep> simulate(const Options& options, const PlanConfig& config,
                                    const Batch& batch) {
  std::vector<SimulatedStep> steps;
  for (int32_t ranks = 1; ranks < options.cp.world; ranks *= 2) {
    steps.push_back(simulate_ranks(options, config, batch, ranks));
  }
  steps.push_back(simulate_ranks(options, config, batch, options.cp.world));
  return steps;
}

ordered_json simulation_json(const std::vector<SimulatedStep>& steps) {
  ordered_json json = ordered_json::array();
  for (const SimulatedStep& step : steps) {
    json.push_back({{"ranks", step.ranks},
                    {"strategy", step.strategy},
                    {"compute_ms", step.compute_seconds * 1e3},
                    {"exchange_ms", step.exchange_seconds * 1e3},
                    {"exposed_ms", step.exchange_seconds * 1e3},
                    {"step_ms", step.seconds() * 1e3},
                    {"load", step.load},
                    {"speedup", steps.front().seconds() / std::max(step.seconds(), 1e-30)}});
  }
  return json;
}

std::string simulation_text(const std::vector<SimulatedStep>& steps) {
  Table table({{"ranks"},
               {"strategy", Table::Align::kLeft},
               {"compute ms"},
               {"exchange ms"},
               {"step ms"},
               {"load"},
               {"speedup"}});
  for (const SimulatedStep& step : steps) {
    table.add_row(
        {fmt::format("{}", step.ranks), step.strategy,
         fmt::format("{:.2f}", step.compute_seconds * 1e3),
         fmt::format("{:.2f}", step.exchange_seconds * 1e3),
         fmt::format("{:.2f}", step.seconds() * 1e3), fmt::format("{:.3f}", step.load),
         fmt::format("{:.2f}", steps.front().seconds() / std::max(step.seconds(), 1e-30))});
  }
  return "A model, from the rates of --cp-...; exchanges are not overlapped:\n" + table.to_string();
}

}  // namespace mla::cli
