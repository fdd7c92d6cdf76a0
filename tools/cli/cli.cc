#include "tools/cli/cli.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "metadata/error.h"
#include "tools/cli/bench.h"
#include "tools/cli/calibrate.h"
#include "tools/cli/info.h"
#include "tools/cli/options.h"
#include "tools/cli/plan_report.h"
#include "tools/cli/report.h"
#include "tools/cli/run.h"
#include "tools/cli/trace.h"

namespace mla::cli {
namespace {

void show(const Environment& environment, const std::string& text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), environment.out) == text.size();
  if (std::fflush(environment.out) != 0 || !written) {
    throw_error(ErrorCode::kInvalidArgument, "can't write the results to stdout");
  }
}

/// One command with its outputs, which are known to be writable before work begins.
class Invocation {
 public:
  Invocation(const Options& options, const Environment& environment)
      : options_(options),
        environment_(environment),
        json_file_(options.json_on_stdout() ? "" : options.json_path),
        trace_file_(options.trace_path) {}

  int execute() {
    if (trace_file_.wanted()) {
      if (options_.command != Command::kRun) {
        throw_error(ErrorCode::kUnsupported, "--trace is for run");
      }
      trace_.emplace();
    }
    Progress progress(environment_.err);
    Device device = make_device(options_);
    if (environment_.decorate_backend) {
      device.backend = environment_.decorate_backend(std::move(device.backend));
    }
    switch (options_.command) {
      case Command::kRun:
        return run(device, progress);
      case Command::kPlan: {
        const PlanReport report = make_plan_report(options_, *device.backend);
        write(plan_json(report), plan_text(report));
        return kRight;
      }
      case Command::kInfo: {
        const InfoReport report = make_info_report(options_, device);
        write(info_json(report), info_text(report));
        return kRight;
      }
      case Command::kBench: {
        const BenchReport report = run_bench(options_, device, progress);
        progress.clear();
        write(bench_json(report), bench_text(report));
        return report.ok ? kRight : kVerificationFailed;
      }
      case Command::kCalibrate: {
        const CalibrateReport report = run_calibration(options_, device, progress);
        progress.clear();
        write(calibrate_json(report), calibrate_text(report));
        return kRight;
      }
    }
    return kBadInput;
  }

  /// Where a run's results would have gone, they say what went wrong.
  void report_failure(const std::string& message) {
    if (options_.command != Command::kRun) return;
    if (options_.json_on_stdout() || json_file_.wanted()) write(run_error_json(message), "");
  }

 private:
  int run(Device& device, Progress& progress) {
    if (trace_) device.backend = make_tracing_backend(std::move(device.backend), *trace_);
    const RunReport report = run_workload(options_, device, trace_ ? &*trace_ : nullptr, progress);
    if (trace_) trace_file_.write(trace_->to_json().dump() + '\n');
    write(run_json(report), run_text(report));
    return report.ok() ? kRight : kVerificationFailed;
  }

  void write(const nlohmann::ordered_json& json, const std::string& text) {
    if (json_file_.wanted()) json_file_.write(json_text(json));
    show(environment_, options_.json_on_stdout() ? json_text(json) : text);
  }

  const Options& options_;
  const Environment& environment_;
  OutputFile json_file_;
  OutputFile trace_file_;
  std::optional<Trace> trace_;
};

int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kUnsupported:
      return kBadInput;
    case ErrorCode::kDevice:
    case ErrorCode::kCommunication:
      return kDeviceFailure;
  }
  return kBadInput;
}

struct Failure {
  std::string message;
  int exit_code = kRight;
};

/// Calls `work`, which returns an exit code, and turns what it throws into a failure.
template <typename Work>
int attempt(Failure& failure, Work work) {
  try {
    return work();
  } catch (const Error& error) {
    failure = {error.what(), exit_code_of(error.code())};
  } catch (const std::bad_alloc&) {
    failure = {"out of memory: use a smaller batch, --workspace-tokens or --layers", kBadInput};
  } catch (const std::exception& error) {
    failure = {error.what(), kDeviceFailure};
  }
  std::replace(failure.message.begin(), failure.message.end(), '\n', ' ');
  return failure.exit_code;
}

}  // namespace

int run_cli(int argc, const char* const* argv, const Environment& environment) {
  Failure failure;
  const int exit_code = attempt(failure, [&] {
    const ParsedCommandLine parsed = parse_command_line(argc, argv);
    if (!parsed.help.empty()) {
      show(environment, parsed.help);
      return +kRight;
    }
    Invocation invocation(parsed.options, environment);
    const int code = attempt(failure, [&] {
      if (parsed.error) throw *parsed.error;
      return invocation.execute();
    });
    if (!failure.message.empty()) invocation.report_failure(failure.message);
    return code;
  });
  // The exit code stands, whether or not the message finds a reader.
  if (!failure.message.empty()) {
    std::fputs(fmt::format("engine_cli: {}\n", failure.message).c_str(), environment.err);
  }
  return exit_code;
}

}  // namespace mla::cli
