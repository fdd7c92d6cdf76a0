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

PlannedChunk planned_chunk(const StepPlan& plan, const Chunk& chunk) {
  const auto starts = plan.host(chunk.starts);
  const auto seq_lens = plan.host(chunk.seq_lens);
  PlannedChunk planned;
  planned.path = chunk.path;
  planned.request_begin = chunk.request_begin;
  planned.request_end = chunk.request_end;
  planned.starts.assign(starts.begin(), starts.end());
  planned.seq_lens.assign(seq_lens.begin(), seq_lens.end());
  return planned;
}

/// Rows that a rank has of each request of chunk `c`: of its shard, or of chunks that it owns.
std::vector<int32_t> local_seq_lens(const RankPlan& rank, size_t c) {
  const Chunk& chunk = rank.plan.chunks()[c];
  const auto seq_lens = rank.plan.host(chunk.seq_lens);
  std::vector<int32_t> lens(seq_lens.begin(), seq_lens.end());
  if (!rank.chunk_owners.empty() && rank.chunk_owners[c] != rank.config.shard.rank) {
    std::fill(lens.begin(), lens.end(), 0);
  }
  if (chunk.assembly.padded_rows > 0) {
    const auto stored = rank.plan.host(chunk.stored_cu_seq_lens);
    for (size_t i = 0; i < lens.size(); ++i) lens[i] = stored[i + 1] - stored[i];
  }
  return lens;
}

/// Where a shard is one of several parts of a chunk, the whole is the sum of its parts.
void add_rank(const RankPlan& rank, size_t c, PlannedChunk& planned) {
  const StepPlan& plan = rank.plan;
  const Chunk& chunk = plan.chunks()[c];
  const bool part = rank.config.placement == CachePlacement::kSharded &&
                    rank.strategy == Strategy::kMergePartials;
  if (planned.starts.empty()) {
    planned = planned_chunk(plan, chunk);
    if (!rank.chunk_owners.empty()) planned.owner = rank.chunk_owners[c];
  } else if (part) {
    for (size_t i = 0; i < planned.starts.size(); ++i) {
      planned.starts[i] += plan.host(chunk.starts)[i];
      planned.seq_lens[i] += plan.host(chunk.seq_lens)[i];
    }
  }
  planned.local_seq_lens.push_back(local_seq_lens(rank, c));
  const std::vector<int32_t>& lens = planned.local_seq_lens.back();
  planned.local_has_empty_context.push_back(std::find(lens.begin(), lens.end(), 0) != lens.end());
}

/// Plans every rank.
void plan_group(const Options& options, const PlanConfig& config, const Batch& batch,
                PlanReport& report) {
  constexpr int64_t kMaxListed = int64_t{1} << 24;  // a report of some gigabytes
  int64_t listed = 0;
  RankPlan plan;
  for (int32_t rank = 0; rank < options.cp.world; ++rank) {
    build_rank_plan(parallel_config(options, rank), config, options.config.kv_cache_format, batch,
                    nullptr, plan);
    report.chunks.resize(plan.plan.chunks().size());
    int64_t rows = 0;
    for (size_t c = 0; c < report.chunks.size(); ++c) {
      add_rank(plan, c, report.chunks[c]);
      const std::vector<int32_t>& lens = report.chunks[c].local_seq_lens.back();
      rows += std::accumulate(lens.begin(), lens.end(), int64_t{0});
      listed += static_cast<int64_t>(lens.size()) + 1;
    }
    if (listed > kMaxListed) {
      throw_error(ErrorCode::kInvalidArgument,
                  "--cp {}: the lists of {} chunks on {} ranks pass the limit of {} entries: use a "
                  "larger --workspace-tokens or fewer ranks",
                  options.cp.world, report.chunks.size(), rank + 1, kMaxListed);
    }
    report.rank_rows.push_back(rows);
  }
  report.strategy = strategy_name(plan.strategy);
  report.reasons = plan.reasons;
  report.load = plan.load();
  report.hash = plan.hash;
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
  const PlanConfig planned = plan_config(config, backend);
  if (options.cp.world > 1) {
    plan_group(options, planned, batch.batch(), report);
  } else {
    StepPlan plan;
    build_plan(planned, batch.batch(), nullptr, plan);
    for (const Chunk& chunk : plan.chunks()) report.chunks.push_back(planned_chunk(plan, chunk));
    report.rank_rows = {plan.num_context_tokens()};
    report.reasons = {"one rank"};
    report.hash = plan.hash();
  }
  if (options.cp.simulate) report.simulation = simulate(options, planned, batch.batch());
  for (PlannedChunk& chunk : report.chunks) {
    chunk.has_empty_context =
        std::find(chunk.seq_lens.begin(), chunk.seq_lens.end(), 0) != chunk.seq_lens.end();
  }
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
                       {"owner", nullptr}};  // every rank has a part in it
    if (chunk.owner >= 0) entry["owner"] = chunk.owner;
    if (!chunk.local_seq_lens.empty()) {
      entry["local_seq_lens"] = chunk.local_seq_lens;
      entry["local_has_empty_context"] = chunk.local_has_empty_context;
    }
    json["chunks"].push_back(std::move(entry));
  }
  json["cp"] = {{"strategy", report.strategy},
                {"reasons", report.reasons},
                {"load", report.load},
                {"rank_rows", report.rank_rows},
                {"hash", fmt::format("{:016x}", report.hash)}};
  if (!report.simulation.empty()) json["simulation"] = simulation_json(report.simulation);
  return json;
}

namespace {

constexpr size_t kMaxSpanColumns = 6;   // beyond, a chunk is one character wide
constexpr size_t kMaxMapColumns = 80;   // beyond, the map ends with a note
constexpr size_t kMaxRequestRows = 40;  // beyond, the middle is left out
constexpr size_t kMaxChunkRows = 1000;  // as with requests; --json lists all

std::string chunk_table(const PlanReport& report) {
  std::vector<Table::Column> columns{{"chunk"},
                                     {"path", Table::Align::kLeft},
                                     {"requests"},
                                     {"rows"},
                                     {"of W"},
                                     {"longest"},
                                     {"requests without keys", Table::Align::kLeft}};
  const bool sharded = report.rank_rows.size() > 1;
  if (sharded) columns.push_back({"rows by rank", Table::Align::kLeft});
  Table table(std::move(columns));
  const size_t num_chunks = report.chunks.size();
  for (size_t c = 0; c < num_chunks; ++c) {
    if (num_chunks > kMaxChunkRows && c == kMaxChunkRows / 2) {
      std::vector<std::string> gap(sharded ? 8 : 7);
      gap[0] = fmt::format("({} more)", num_chunks - kMaxChunkRows);
      table.add_row(std::move(gap));
      c = num_chunks - kMaxChunkRows / 2;
    }
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
  if (report.rank_rows.size() > 1) {
    text += fmt::format(
        "\n{} ranks, {}:\n  {}\nload: the busiest rank has {:.3f} times the mean\n"
        "context rows by rank: {}\n",
        report.rank_rows.size(), report.strategy, fmt::join(report.reasons, "\n  "), report.load,
        fmt::join(report.rank_rows, ", "));
  }
  if (!report.simulation.empty()) text += '\n' + simulation_text(report.simulation);
  return text + fmt::format("\nplan hash {:016x}\n", report.hash);
}

}  // namespace mla::cli
