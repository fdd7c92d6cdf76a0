#include "tools/cli/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "metadata/error.h"
#include "tools/cli/session.h"
#include "tools/cli/table.h"
#include "tools/cli/workload.h"

namespace mla::cli {

using nlohmann::ordered_json;

namespace {

/// Adds one rank's view of chunk `c`: the first makes it, all are summed up.
void add_rank(const StepPlan& plan, size_t c, PlannedChunk& planned) {
  const Chunk& chunk = plan.chunks()[c];
  const auto starts = plan.host(chunk.starts);
  const auto seq_lens = plan.host(chunk.seq_lens);
  if (planned.starts.empty()) {
    planned.path = chunk.path;
    planned.request_begin = chunk.request_begin;
    planned.request_end = chunk.request_end;
    planned.starts.assign(starts.size(), 0);
    planned.seq_lens.assign(seq_lens.size(), 0);
  }
  for (size_t i = 0; i < starts.size(); ++i) {
    planned.starts[i] += starts[i];
    planned.seq_lens[i] += seq_lens[i];
  }
  if (plan.config().shard.world > 1) {
    planned.local_seq_lens.emplace_back(seq_lens.begin(), seq_lens.end());
    planned.local_has_empty_context.push_back(chunk.has_empty_context);
  }
}

void set_strategy(const ContextParallelOptions& cp, PlanReport& report) {
  if (cp.world == 1) {
    report.strategy = "none";
    report.reasons = {"one rank"};
    return;
  }
  report.strategy = "merge_partials";
  report.reasons = {
      cp.strategy == "auto"
          ? "the one strategy that this build plans, for a sharded cache and replicated queries"
          : "asked for by --cp-strategy"};
}

}  // namespace

int32_t PlannedChunk::seq_tot() const {
  return std::accumulate(seq_lens.begin(), seq_lens.end(), 0);
}

int32_t PlannedChunk::max_seq_len() const {
  return seq_lens.empty() ? 0 : *std::max_element(seq_lens.begin(), seq_lens.end());
}

PlanReport make_plan_report(const Options& options, const Backend& backend) {
  const Workload workload = make_workload(options);
  const auto num_steps = static_cast<int32_t>(workload.steps.size());
  if (num_steps > 0 && options.plan_step >= num_steps) {
    throw_error(ErrorCode::kInvalidArgument, "--step is {}, the batch has {} steps",
                options.plan_step, num_steps);
  }
  const Step step = num_steps == 0 ? Step() : workload.steps[options.plan_step];
  const StepBatch batch(step);

  EngineConfig config = engine_config(options, workload);
  PlanReport report;
  report.schedule = config.schedule;
  report.workspace_tokens = config.workspace_tokens;
  report.page_size = config.page_size;
  report.context_lens = batch.context_lens;
  for (const ScheduledRequest& request : step) report.query_lens.push_back(request.query_len);
  report.step = options.plan_step;
  report.num_steps = num_steps;
  set_strategy(options.cp, report);

  StepPlan plan;
  for (int32_t rank = 0; rank < options.cp.world; ++rank) {
    config.shard = {.world = options.cp.world, .rank = rank, .interleave = options.cp.interleave};
    build_plan(plan_config(config, backend), batch.batch(), nullptr, plan);
    report.chunks.resize(plan.chunks().size());
    for (size_t c = 0; c < plan.chunks().size(); ++c) add_rank(plan, c, report.chunks[c]);
    report.load.push_back(plan.num_context_tokens());
  }
  for (PlannedChunk& chunk : report.chunks) {
    chunk.has_empty_context =
        std::find(chunk.seq_lens.begin(), chunk.seq_lens.end(), 0) != chunk.seq_lens.end();
  }
  report.hash = plan.hash();
  return report;
}

ordered_json plan_json(const PlanReport& report) {
  ordered_json json{{"schedule", schedule_name(report.schedule)},
                    {"num_chunks", report.chunks.size()},
                    {"workspace_tokens", report.workspace_tokens},
                    {"step", report.step},
                    {"num_steps", report.num_steps},
                    {"chunks", ordered_json::array()}};
  for (const PlannedChunk& chunk : report.chunks) {
    std::vector<int32_t> cu_seq_lens{0};
    for (const int32_t length : chunk.seq_lens) {
      cu_seq_lens.push_back(cu_seq_lens.back() + length);
    }
    ordered_json entry{{"request_begin", chunk.request_begin},
                       {"request_end", chunk.request_end},
                       {"starts", chunk.starts},
                       {"seq_lens", chunk.seq_lens},
                       {"cu_seq_lens", cu_seq_lens},
                       {"seq_tot", chunk.seq_tot()},
                       {"max_seq_len", chunk.max_seq_len()},
                       {"has_empty_context", chunk.has_empty_context},
                       {"path", path_name(chunk.path)},
                       {"owner", nullptr}};  // every rank has a part of a sharded cache
    if (!chunk.local_seq_lens.empty()) {
      entry["local_seq_lens"] = chunk.local_seq_lens;
      entry["local_has_empty_context"] = chunk.local_has_empty_context;
    }
    json["chunks"].push_back(std::move(entry));
  }
  json["cp"] = {{"strategy", report.strategy},
                {"reasons", report.reasons},
                {"load", report.load},
                {"hash", fmt::format("{:016x}", report.hash)}};
  return json;
}

namespace {

constexpr size_t kMaxSpanColumns = 6;   // beyond, a chunk is one character wide
constexpr size_t kMaxMapColumns = 80;   // beyond, the map ends with a note
constexpr size_t kMaxRequestRows = 40;  // beyond, the middle is left out

std::string chunk_table(const PlanReport& report) {
  std::vector<Table::Column> columns{{"chunk"},
                                     {"path", Table::Align::kLeft},
                                     {"requests"},
                                     {"rows"},
                                     {"of W"},
                                     {"longest"},
                                     {"requests without keys", Table::Align::kLeft}};
  const bool sharded = report.load.size() > 1;
  if (sharded) columns.push_back({"rows by rank", Table::Align::kLeft});
  Table table(std::move(columns));
  for (size_t c = 0; c < report.chunks.size(); ++c) {
    const PlannedChunk& chunk = report.chunks[c];
    int32_t largest = chunk.seq_tot();
    std::string by_rank;
    if (sharded) {
      largest = 0;
      for (size_t rank = 0; rank < chunk.local_seq_lens.size(); ++rank) {
        const std::vector<int32_t>& lens = chunk.local_seq_lens[rank];
        const int32_t rows = std::accumulate(lens.begin(), lens.end(), 0);
        largest = std::max(largest, rows);
        by_rank += fmt::format("{}{}{}", rank == 0 ? "" : " ", rows,
                               chunk.local_has_empty_context[rank] ? "*" : "");
      }
    }
    std::vector<std::string> cells{
        fmt::format("{}", c),
        std::string(path_name(chunk.path)),
        fmt::format("{}-{}", chunk.request_begin, chunk.request_end - 1),
        with_commas(chunk.seq_tot()),
        fmt::format("{:.0f}%", 100.0 * largest / report.workspace_tokens),
        with_commas(chunk.max_seq_len()),
        chunk.has_empty_context ? "yes, masked" : "none"};
    if (sharded) cells.push_back(by_rank);
    table.add_row(std::move(cells));
  }
  std::string text = table.to_string();
  if (sharded) text += "* a request has no keys on this rank\n";
  return text;
}

/// The span of a request in a chunk, [begin, end); empty where it has none.
std::pair<int32_t, int32_t> span_of(const PlannedChunk& chunk, int32_t request) {
  if (request < chunk.request_begin || request >= chunk.request_end) return {0, 0};
  const int32_t i = request - chunk.request_begin;
  return {chunk.starts[i], chunk.starts[i] + chunk.seq_lens[i]};
}

/// Requests down, chunks across: positions where chunks are few, '#' (all of a request), '+' (a
/// part) or '.' (nothing) where they are many.
std::string request_map(const PlanReport& report) {
  const bool spans = report.chunks.size() <= kMaxSpanColumns;
  const size_t shown =
      spans ? report.chunks.size() : std::min(report.chunks.size(), kMaxMapColumns);
  std::vector<Table::Column> columns{{"request"}, {"new"}, {"context"}};
  if (spans) {
    for (size_t c = 0; c < shown; ++c) columns.push_back({fmt::format("chunk {}", c)});
  } else {
    columns.push_back(
        {shown < report.chunks.size() ? fmt::format("chunks 0 to {}", shown - 1) : "chunks",
         Table::Align::kLeft});
  }
  Table table(std::move(columns));
  const auto num_requests = static_cast<int32_t>(report.context_lens.size());
  const auto most = static_cast<int32_t>(kMaxRequestRows);
  for (int32_t r = 0; r < num_requests; ++r) {
    if (num_requests > most && r == most / 2) {
      std::vector<std::string> gap(spans ? 3 + shown : 4);
      gap[0] = fmt::format("({} more)", num_requests - most);
      table.add_row(std::move(gap));
      r = num_requests - most / 2;
    }
    std::vector<std::string> cells{fmt::format("{}", r), with_commas(report.query_lens[r]),
                                   with_commas(report.context_lens[r])};
    std::string map;
    for (size_t c = 0; c < shown; ++c) {
      const auto [begin, end] = span_of(report.chunks[c], r);
      const bool whole = end - begin == report.context_lens[r];
      if (spans) {
        cells.push_back(begin == end ? "." : fmt::format("{}..{}", begin, end - 1));
      } else {
        map += begin == end ? '.' : whole ? '#' : '+';
      }
    }
    if (!spans) cells.push_back(map);
    table.add_row(std::move(cells));
  }
  std::string text = table.to_string();
  if (!spans) text += "# all of the request's context, + a part of it, . none\n";
  return text;
}

}  // namespace

std::string plan_text(const PlanReport& report) {
  const int64_t context =
      std::accumulate(report.context_lens.begin(), report.context_lens.end(), int64_t{0});
  const int64_t tokens =
      std::accumulate(report.query_lens.begin(), report.query_lens.end(), int64_t{0});
  std::string text;
  if (report.num_steps > 1) {
    text += fmt::format("Step {} of {} (--step)\n", report.step, report.num_steps);
  }
  text += fmt::format(
      "{} request{}, {} new tokens, {} context tokens: {} chunk{} ({} schedule, W {}, page {})\n",
      report.context_lens.size(), report.context_lens.size() == 1 ? "" : "s", with_commas(tokens),
      with_commas(context), report.chunks.size(), report.chunks.size() == 1 ? "" : "s",
      schedule_name(report.schedule), with_commas(report.workspace_tokens), report.page_size);
  if (!report.chunks.empty()) text += fmt::format("\n{}", chunk_table(report));
  if (!report.context_lens.empty()) text += fmt::format("\n{}", request_map(report));
  if (report.load.size() > 1) {
    text +=
        fmt::format("\n{} ranks, {}: {}\ncontext rows by rank: {}\n", report.load.size(),
                    report.strategy, fmt::join(report.reasons, "; "), fmt::join(report.load, ", "));
  }
  return text + fmt::format("\nplan hash {:016x}\n", report.hash);
}

}  // namespace mla::cli
