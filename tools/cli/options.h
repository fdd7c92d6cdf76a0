// The command line: what was asked for, parsed and checked.
#ifndef TOOLS_CLI_OPTIONS_H_
#define TOOLS_CLI_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/config.h"
#include "metadata/error.h"
#include "parallel/cost_model.h"

namespace mla::cli {

enum class Command { kRun, kPlan, kInfo, kBench, kCalibrate };

/// Lengths drawn evenly from [least, most].
struct LengthRange {
  int32_t least = 0;
  int32_t most = 0;
};

struct ContextParallelOptions {
  int32_t world = 1;
  int32_t interleave = 1;
  std::string placement = "sharded";
  std::string queries = "replicated";
  std::string strategy = "auto";
  CostRates rates;
  double nic_bytes_per_second = 50e9;  // of a rank: a 400 Gbit/s NIC
  int32_t ranks_per_node = 8;
  bool spawn = false;
  bool simulate = false;
};

struct Options {
  Command command = Command::kRun;
  std::string model;  // a preset's name, or "custom"
  EngineConfig config;
  float kv_cache_scale = 0.01f;

  std::string backend = "auto";  // "cpu", "cuda", "auto"
  int32_t threads = 0;           // of the CPU backend; 0: one a core

  // The batch: lengths of one step, or requests that a scheduler cuts into steps.
  bool has_batch = false;
  bool single_step = false;
  std::vector<int32_t> query_lens;
  std::vector<int32_t> context_lens;  // as many as query_lens
  int32_t num_requests = 0;
  LengthRange prompt_lens;
  LengthRange prefix_lens;
  int32_t max_num_batched_tokens = 32768;
  uint64_t seed = 0;
  int32_t num_layers = 1;
  int32_t plan_step = 0;

  ContextParallelOptions cp;

  bool verify = false;
  std::string json_path;   // empty: none; "-": stdout
  std::string trace_path;  // empty: none
  std::string commit;      // of the build, for bench and info
  double bench_seconds = 0.5;

  bool json_on_stdout() const { return json_path == "-"; }
};

struct ParsedCommandLine {
  Options options;
  std::string help;  // asked for: there is nothing else to do
  /// What is wrong with a value. The command and the outputs are known all the same, so that the
  /// error can be reported where the results would have gone.
  std::optional<Error> error;
};

/// Throws kInvalidArgument, with a message of one line, for words that are no command or option.
ParsedCommandLine parse_command_line(int argc, const char* const* argv);

}  // namespace mla::cli

#endif  // TOOLS_CLI_OPTIONS_H_
