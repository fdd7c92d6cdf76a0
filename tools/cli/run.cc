#include "tools/cli/run.h"

#include <fmt/format.h>

#include <chrono>
#include <exception>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>
#include <utility>

#include "metadata/error.h"
#include "parallel/in_process_communicator.h"
#include "tools/cli/session.h"
#include "tools/cli/table.h"
#include "tools/cli/workload.h"

namespace mla::cli {

using nlohmann::ordered_json;

namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// `fetch`: another rank verifies, and needs this one's outputs.
StepReport run_step(Session& session, const Step& step, int32_t num_layers, Verifier* verifier,
                    bool fetch, Trace* trace, const std::function<void(int32_t)>& on_layer) {
  StepReport report;
  const Clock::time_point start = Clock::now();
  session.begin_step(step);
  report.ms = ms_since(start);
  report.query_tokens = session.plan().num_query_tokens();
  for (const ScheduledRequest& request : step) report.context_tokens += request.context_len;
  report.chunks = static_cast<int64_t>(session.plan().chunks().size());
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    on_layer(layer);
    session.load_layer(layer);
    {
      const TraceSpan span(trace, fmt::format("layer {}", layer), "layer");
      const Clock::time_point layer_start = Clock::now();
      session.run_layer(layer);
      report.ms += ms_since(layer_start);
    }
    if (verifier != nullptr) {
      const TraceSpan span(trace, "verify", "verify");
      verifier->check_layer(session, layer);
    } else if (fetch) {
      session.fetch_layer();
    }
  }
  return report;
}

}  // namespace

double attention_flops(const ModelDims& dims, const Step& step) {
  double scores = 0.0;
  for (const ScheduledRequest& request : step) {
    const double q = request.query_len;
    scores += q * request.context_len + q * (q + 1) / 2;
  }
  return 2.0 * dims.num_heads * (dims.qk_head_dim() + dims.v_head_dim) * scores;
}

namespace {

/// Where a rank reports to; all empty for ranks other than the first.
struct Listeners {
  Trace* trace = nullptr;
  Progress* progress = nullptr;
  void show(const std::string& line) const {
    if (progress != nullptr) progress->show(line);
  }
};

RunReport run_rank(const Options& options, const Workload& workload, Device& device,
                   const GroupMember* member, const Listeners& listeners) {
  const bool first = member == nullptr || member->config.shard.rank == 0;
  listeners.show("making inputs and caches");
  std::optional<Session> made;
  {
    const TraceSpan span(listeners.trace, "fill caches", "setup");
    made.emplace(options, workload, *device.backend, *device.executor, /*poison=*/options.verify,
                 member);
  }
  Session& session = *made;
  std::optional<Verifier> verifier;
  if (options.verify && first) verifier.emplace(options.kv_cache_scale, *device.executor);

  RunReport report;
  report.backend = device.backend->name();
  report.device = device.backend->device_description();
  report.choice = device.choice;
  report.model = options.model;
  for (size_t s = 0; s < workload.steps.size(); ++s) {
    const Step& step = workload.steps[s];
    const TraceSpan span(listeners.trace, fmt::format("step {}", s), "step",
                         {{"requests", step.size()}});
    const StepReport step_report = run_step(
        session, step, options.num_layers, verifier ? &*verifier : nullptr, options.verify,
        listeners.trace, [&](int32_t layer) {
          listeners.show(fmt::format("step {}/{}, layer {}/{}", s + 1, workload.steps.size(),
                                     layer + 1, options.num_layers));
        });
    report.steps.push_back(step_report);
    report.query_tokens += step_report.query_tokens;
    report.context_tokens += step_report.context_tokens;
    report.seconds += step_report.ms / 1e3;
    report.flops += options.num_layers * attention_flops(options.config.dims, step);
  }
  if (verifier) report.verify = verifier->report();
  return report;
}

/// Of several ranks' errors, the one that the others' errors of communication come from.
void rethrow_cause(const std::vector<std::exception_ptr>& errors) {
  std::exception_ptr chosen;
  for (const std::exception_ptr& error : errors) {
    if (error == nullptr) continue;
    if (chosen == nullptr) chosen = error;
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kCommunication) throw;
    }
  }
  if (chosen != nullptr) std::rethrow_exception(chosen);
}

/// Threads as ranks, which share the backend. The report is that of rank 0.
RunReport run_group(const Options& options, const Workload& workload, Device& device,
                    const Listeners& listeners) {
  if (device.backend->name() != "cpu") {
    throw_error(ErrorCode::kUnsupported,
                "--cp {} is available with --backend cpu alone in this build", options.cp.world);
  }
  // A rank that fails is noticed at once; until then, others wait while rank 0 verifies.
  constexpr std::chrono::hours kTimeLimit(24);
  InProcessGroup group(options.cp.world, kTimeLimit);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int32_t rank = 0; rank < options.cp.world; ++rank) communicators.push_back(group.join(rank));
  std::vector<std::exception_ptr> errors(communicators.size());
  RunReport report;
  const auto run = [&](int32_t rank) {
    try {
      const std::unique_ptr<Communicator> communicator = std::move(communicators[rank]);
      const GroupMember member{parallel_config(options, rank), *communicator};
      RunReport own =
          run_rank(options, workload, device, &member, rank == 0 ? listeners : Listeners());
      if (rank == 0) report = std::move(own);
    } catch (...) {
      errors[rank] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(communicators.size());
  try {
    for (int32_t rank = 1; rank < options.cp.world; ++rank) threads.emplace_back(run, rank);
  } catch (const std::system_error& error) {
    const size_t missing = threads.size() + 1;
    errors[missing] = std::make_exception_ptr(Error(
        ErrorCode::kDevice,
        fmt::format("can't start rank {} of {}: {}", missing, options.cp.world, error.what())));
    // Ranks that never start leave the group, so that nobody waits for them.
    for (size_t rank = missing; rank < communicators.size(); ++rank) communicators[rank].reset();
  }
  run(0);
  for (std::thread& thread : threads) thread.join();
  rethrow_cause(errors);
  return report;
}

}  // namespace

RunReport run_workload(const Options& options, Device& device, Trace* trace, Progress& progress) {
  const Workload workload = make_workload(options);
  const Listeners listeners{trace, &progress};
  RunReport report = options.cp.world == 1 ? run_rank(options, workload, device, nullptr, listeners)
                                           : run_group(options, workload, device, listeners);
  progress.clear();
  return report;
}

ordered_json run_json(const RunReport& report) {
  ordered_json json{{"status", report.ok() ? "ok" : "verify_failed"},
                    {"backend", report.backend},
                    {"device", report.device},
                    {"model", report.model},
                    {"steps", ordered_json::array()}};
  for (const StepReport& step : report.steps) {
    json["steps"].push_back({{"query_tokens", step.query_tokens},
                             {"context_tokens", step.context_tokens},
                             {"chunks", step.chunks},
                             {"ms", step.ms}});
  }
  const double seconds = report.seconds;
  json["totals"] = {
      {"query_tokens", report.query_tokens},
      {"context_tokens", report.context_tokens},
      {"seconds", seconds},
      {"tokens_per_second", seconds > 0 ? static_cast<double>(report.query_tokens) / seconds : 0.0},
      {"tflops", seconds > 0 ? report.flops / seconds / 1e12 : 0.0}};
  json["verify"] = nullptr;
  if (report.verify) {
    json["verify"] = {{"checked_rows", report.verify->checked_rows},
                      {"max_abs_err", report.verify->max_abs_err},
                      {"rel_err", report.verify->rel_err},
                      {"worst_request_rel_err", report.verify->worst_request_rel_err},
                      {"lse_max_abs_err", report.verify->lse_max_abs_err},
                      {"expand_rel_err", report.verify->expand_rel_err},
                      {"ok", report.verify->ok}};
  }
  return json;
}

ordered_json run_error_json(const std::string& message) {
  return {{"status", "error"},
          {"error", message},
          {"backend", nullptr},
          {"model", nullptr},
          {"steps", ordered_json::array()},
          {"totals", nullptr},
          {"verify", nullptr}};
}

std::string run_text(const RunReport& report) {
  std::string text = fmt::format("{} on {} ({}{}{})\n\n", report.model, report.backend,
                                 report.device, report.choice.empty() ? "" : "; ", report.choice);
  Table table({{"step"}, {"new tokens"}, {"context"}, {"chunks"}, {"ms"}});
  for (size_t s = 0; s < report.steps.size(); ++s) {
    const StepReport& step = report.steps[s];
    table.add_row({fmt::format("{}", s), with_commas(step.query_tokens),
                   with_commas(step.context_tokens), with_commas(step.chunks),
                   fmt::format("{:.2f}", step.ms)});
  }
  table.add_row({"total", with_commas(report.query_tokens), with_commas(report.context_tokens), "",
                 fmt::format("{:.2f}", report.seconds * 1e3)});
  text += table.to_string();
  if (report.seconds > 0) {
    text += fmt::format("\n{} tokens/s, {:.3f} TFLOP/s of attention\n",
                        with_commas(static_cast<int64_t>(static_cast<double>(report.query_tokens) /
                                                         report.seconds)),
                        report.flops / report.seconds / 1e12);
  }
  if (report.verify) {
    const VerifyReport& v = *report.verify;
    text += fmt::format(
        "verified {} rows against float64: {}\n"
        "  output     relative error {:.2e} (worst request {:.2e}), largest error {:.2e}\n"
        "  LSE        largest error {:.2e}\n"
        "  expansion  relative error {:.2e}\n",
        with_commas(v.checked_rows), v.ok ? "ok" : "FAILED", v.rel_err, v.worst_request_rel_err,
        v.max_abs_err, v.lse_max_abs_err, v.expand_rel_err);
  }
  return text;
}

}  // namespace mla::cli
