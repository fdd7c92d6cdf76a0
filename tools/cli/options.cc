#include "tools/cli/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>
#include <sstream>
#include <string_view>
#include <utility>

#include "metadata/error.h"
#include "metadata/plan.h"

namespace mla::cli {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

std::string text_of(double value) { return fmt::format("{:.6g}", value); }

/// The command line's words before they are checked. Numbers are text here: the parser's own
/// conversions take an empty word for 0, and a number that does not fit for another one.
struct RawOptions {
  std::string model = "deepseek-v2-lite";
  std::optional<std::string> heads, nope, rope, vdim, lora;
  std::optional<std::string> softmax_scale;
  std::string backend = "auto";
  std::string threads = "0";
  std::optional<std::string> query_lens, context_lens;
  std::optional<std::string> requests;
  std::string prompt_lens = "512:4096";
  std::string prefix_lens = "0:0";
  std::string max_num_batched_tokens = "32768";
  std::string seed = "0";
  std::string workspace_tokens = "65536";
  std::string page_size = "64";
  std::string kv_cache_dtype = "bf16";
  std::string kv_cache_scale = "0.01";
  std::string schedule = "packed";
  std::string split_tokens = "0";
  std::string path = "auto";
  std::string merge = "fused";
  std::string layers = "1";
  std::string step = "0";
  std::string cp = "1";
  std::string cp_interleave = "1";
  std::string cp_link_gbps = text_of(CostRates().link_bytes_per_second * 1e-9);
  std::string cp_nic_gbps = text_of(ContextParallelOptions().nic_bytes_per_second * 1e-9);
  std::string cp_ranks_per_node = text_of(ContextParallelOptions().ranks_per_node);
  std::string cp_latency_us = text_of(CostRates().collective_seconds * 1e6);
  std::string cp_gemm_tflops = text_of(CostRates().gemm_flops * 1e-12);
  std::string cp_attention_tflops = text_of(CostRates().attention_flops * 1e-12);
  ContextParallelOptions cp_words;
  bool verify = false;
  std::optional<std::string> json;
  std::optional<std::string> trace;
  std::string commit;
  std::string bench_seconds = "0.5";
};

template <typename T>
std::from_chars_result parse_all(std::string_view text, T& value) {
  std::from_chars_result result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec == std::errc() && result.ptr != text.data() + text.size()) {
    result.ec = std::errc::invalid_argument;
  }
  return result;
}

template <typename T>
T parse_whole(std::string_view text, std::string_view option, T least, T most) {
  T value = 0;
  const std::errc error = parse_all(text, value).ec;
  if (error == std::errc::invalid_argument) {
    throw_error(ErrorCode::kInvalidArgument, "{}: '{}' is no whole number from {} to {}", option,
                text, least, most);
  }
  if (error != std::errc() || value < least || value > most) {
    throw_error(ErrorCode::kInvalidArgument, "{} is {}; it must be from {} to {}", option, text,
                least, most);
  }
  return value;
}

int32_t parse_int32(std::string_view text, std::string_view option, int64_t least,
                    int64_t most = kMaxInt32) {
  return static_cast<int32_t>(parse_whole<int64_t>(text, option, least, most));
}

/// Infinity and NaN are left to the caller, as is a number that float32 takes for one or for 0.
double parse_real(std::string_view text, std::string_view option) {
  double value = 0.0;
  const std::errc error = parse_all(text, value).ec;
  if (error != std::errc()) {
    throw_error(ErrorCode::kInvalidArgument, "{}: '{}' is {}", option, text,
                error == std::errc::result_out_of_range ? "out of range" : "no number");
  }
  return value;
}

/// "64,17,1"; the empty text is the empty list.
std::vector<int32_t> parse_lengths(std::string_view text, std::string_view option) {
  std::vector<int32_t> lengths;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    lengths.push_back(parse_int32(text.substr(0, comma), option, 0));
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
    if (text.empty()) {
      throw_error(ErrorCode::kInvalidArgument, "{}: the list ends with a comma", option);
    }
  }
  return lengths;
}

/// "A:B", or "A" for "A:A".
LengthRange parse_range(std::string_view text, std::string_view option) {
  const size_t colon = text.find(':');
  LengthRange range;
  range.least = parse_int32(text.substr(0, colon), option, 0);
  range.most = colon == std::string_view::npos ? range.least
                                               : parse_int32(text.substr(colon + 1), option, 0);
  if (range.most < range.least) {
    throw_error(ErrorCode::kInvalidArgument, "{}: the range {}:{} ends before it begins", option,
                range.least, range.most);
  }
  return range;
}

void set_model(const RawOptions& raw, Options& options) {
  ModelDims& dims = options.config.dims;
  dims = find_preset(raw.model);
  const ModelDims preset_dims = dims;
  const auto override_dim = [](const std::optional<std::string>& value, std::string_view option,
                               int32_t& dim) {
    constexpr int64_t kMaxDim = 1 << 16;  // sizes in bytes stay far below 2^63
    if (value) dim = parse_int32(*value, option, 1, kMaxDim);
  };
  override_dim(raw.heads, "--heads", dims.num_heads);
  override_dim(raw.nope, "--nope", dims.qk_nope_head_dim);
  override_dim(raw.rope, "--rope", dims.qk_rope_head_dim);
  override_dim(raw.vdim, "--vdim", dims.v_head_dim);
  override_dim(raw.lora, "--lora", dims.kv_lora_rank);
  validate_dims(dims);
  options.model = dims == preset_dims ? raw.model : "custom";

  options.config.softmax_scale = default_softmax_scale(dims);
  if (raw.softmax_scale) {
    options.config.softmax_scale =
        static_cast<float>(parse_real(*raw.softmax_scale, "--softmax-scale"));
    validate_softmax_scale(options.config.softmax_scale);
  }
}

void set_batch(const RawOptions& raw, Options& options) {
  options.max_num_batched_tokens =
      parse_int32(raw.max_num_batched_tokens, "--max-num-batched-tokens", 1);
  options.seed = parse_whole<uint64_t>(raw.seed, "--seed", 0, std::numeric_limits<uint64_t>::max());
  if (raw.query_lens && raw.requests) {
    throw_error(ErrorCode::kInvalidArgument,
                "--query-lens (one step) and --requests (many steps) exclude each other");
  }
  if (raw.context_lens && !raw.query_lens) {
    throw_error(ErrorCode::kInvalidArgument, "--context-lens needs --query-lens");
  }
  options.has_batch = raw.query_lens || raw.requests;
  if (raw.query_lens) {
    options.single_step = true;
    options.query_lens = parse_lengths(*raw.query_lens, "--query-lens");
    if (raw.context_lens) {
      options.context_lens = parse_lengths(*raw.context_lens, "--context-lens");
    } else {
      options.context_lens.assign(options.query_lens.size(), 0);
    }
    if (options.context_lens.size() != options.query_lens.size()) {
      throw_error(ErrorCode::kInvalidArgument,
                  "--query-lens has {} lengths and --context-lens {}; both list every request",
                  options.query_lens.size(), options.context_lens.size());
    }
  } else if (raw.requests) {
    constexpr int64_t kMaxRequests = 1 << 20;
    options.num_requests = parse_int32(*raw.requests, "--requests", 0, kMaxRequests);
    options.prompt_lens = parse_range(raw.prompt_lens, "--prompt-lens");
    options.prefix_lens = parse_range(raw.prefix_lens, "--prefix-lens");
  }
}

void set_engine(const RawOptions& raw, Options& options) {
  EngineConfig& config = options.config;
  config.workspace_tokens = parse_int32(raw.workspace_tokens, "--workspace-tokens", 1);
  config.page_size = parse_int32(raw.page_size, "--page-size", 1);
  config.kv_cache_format = find_kv_cache_format(raw.kv_cache_dtype);
  kv_cache_row_bytes(config.kv_cache_format, config.dims);
  config.schedule = find_schedule(raw.schedule);
  config.split_tokens = parse_int32(raw.split_tokens, "--split-tokens", 0);
  config.path = find_path_policy(raw.path);
  config.merge = find_merge_mode(raw.merge);
  options.kv_cache_scale = static_cast<float>(parse_real(raw.kv_cache_scale, "--kv-cache-scale"));
  if (!std::isfinite(options.kv_cache_scale) || options.kv_cache_scale <= 0.0f) {
    throw_error(ErrorCode::kInvalidArgument,
                "--kv-cache-scale is {}; it must be finite and above 0", raw.kv_cache_scale);
  }
  PlanConfig plan;
  plan.dims = config.dims;
  plan.workspace_tokens = config.workspace_tokens;
  plan.page_size = config.page_size;
  plan.split_tokens = config.split_tokens;
  validate_plan_config(plan);
}

/// The outputs may not be one file: the one written last would be all there is.
void check_outputs(const RawOptions& raw) {
  for (const auto& [path, option] : {std::pair{&raw.json, "--json"}, {&raw.trace, "--trace"}}) {
    if (*path && (*path)->empty()) {
      throw_error(ErrorCode::kInvalidArgument, "{}: the file's name is empty", option);
    }
  }
  if (raw.trace == "-") {
    throw_error(ErrorCode::kInvalidArgument, "--trace is -; only --json writes to stdout");
  }
  const auto normal = [](const std::string& path) {
    return std::filesystem::path(path).lexically_normal();
  };
  if (raw.json && raw.trace && normal(*raw.json) == normal(*raw.trace)) {
    throw_error(ErrorCode::kInvalidArgument, "--json and --trace are both '{}'", *raw.json);
  }
}

/// Refuses, by name, what this build can't do for the command.
void check_context_parallel_options(const Options& options) {
  const ContextParallelOptions& cp = options.cp;
  const auto refuse = [](const std::string& what) {
    throw_error(ErrorCode::kUnsupported, "{} is not available in this build", what);
  };
  if (cp.spawn) refuse("--cp-spawn");
  if (cp.simulate && options.command != Command::kPlan) {
    throw_error(ErrorCode::kUnsupported, "--simulate is for plan");
  }
  if (cp.world == 1) return;
  if (options.command != Command::kPlan && options.command != Command::kRun) {
    refuse(fmt::format("--cp {} (context parallelism) beside plan and run", cp.world));
  }
  if (options.config.path == PathPolicy::kAbsorb) {
    throw_error(ErrorCode::kUnsupported, "--path absorb is not served with --cp {}", cp.world);
  }
  const int32_t most = options.command == Command::kPlan ? 1024 : 64;  // a thread each
  if (cp.world > most) {
    throw_error(ErrorCode::kInvalidArgument, "--cp is {}, the limit is {}", cp.world, most);
  }
  if (options.command == Command::kPlan) return;
  if (options.backend == "cuda") refuse(fmt::format("--cp {} with --backend cuda", cp.world));
  if (!options.trace_path.empty()) refuse(fmt::format("--trace with --cp {}", cp.world));
}

void check(const RawOptions& raw, Options& options) {
  check_outputs(raw);
  set_model(raw, options);
  set_batch(raw, options);
  set_engine(raw, options);
  options.backend = raw.backend;
  constexpr int64_t kMaxThreads = 1024;
  options.threads = parse_int32(raw.threads, "--threads", 0, kMaxThreads);
  options.num_layers = parse_int32(raw.layers, "--layers", 1);
  options.plan_step = parse_int32(raw.step, "--step", 0);
  options.cp = raw.cp_words;
  options.cp.world = parse_int32(raw.cp, "--cp", 1);
  options.cp.interleave = parse_int32(raw.cp_interleave, "--cp-interleave", 1);
  const auto rate = [](const std::string& text, double unit, std::string_view option) {
    const double value = parse_real(text, option);
    if (!(std::isfinite(value * unit) && value > 0.0)) {
      throw_error(ErrorCode::kInvalidArgument, "{} is {}; it must be finite and above 0", option,
                  value);
    }
    return value * unit;
  };
  options.cp.rates = {
      .link_bytes_per_second = rate(raw.cp_link_gbps, 1e9, "--cp-link-gbps"),
      .collective_seconds = rate(raw.cp_latency_us, 1e-6, "--cp-latency-us"),
      .gemm_flops = rate(raw.cp_gemm_tflops, 1e12, "--cp-gemm-tflops"),
      .attention_flops = rate(raw.cp_attention_tflops, 1e12, "--cp-attention-tflops")};
  options.cp.nic_bytes_per_second = rate(raw.cp_nic_gbps, 1e9, "--cp-nic-gbps");
  options.cp.ranks_per_node = parse_int32(raw.cp_ranks_per_node, "--cp-ranks-per-node", 1);
  options.verify = raw.verify;
  options.commit = raw.commit;
  constexpr double kMaxSeconds = 3600.0;
  options.bench_seconds = parse_real(raw.bench_seconds, "--seconds");
  if (!(options.bench_seconds > 0.0 && options.bench_seconds <= kMaxSeconds)) {
    throw_error(ErrorCode::kInvalidArgument, "--seconds is {}; it must be above 0, and {} at most",
                raw.bench_seconds, kMaxSeconds);
  }
  const bool needs_batch = options.command == Command::kRun || options.command == Command::kPlan;
  if (needs_batch && !options.has_batch) {
    throw_error(ErrorCode::kInvalidArgument,
                "no batch: give --query-lens (and --context-lens) for one step, such as "
                "--query-lens 64,17,1 --context-lens 10240,0,512, or --requests for many");
  }
  check_context_parallel_options(options);
}

void add_options(CLI::App& app, RawOptions& raw) {
  app.option_defaults()->group("Model");
  app.add_option("--model", raw.model,
                 "Preset, the dimensions below over its own (`info` lists them)")
      ->capture_default_str();
  app.add_option("--heads", raw.heads, "Heads on this rank [H]")->type_name("INT");
  app.add_option("--nope", raw.nope, "qk_nope_head_dim [P]")->type_name("INT");
  app.add_option("--rope", raw.rope, "qk_rope_head_dim [Rr]")->type_name("INT");
  app.add_option("--vdim", raw.vdim, "v_head_dim [V]")->type_name("INT");
  app.add_option("--lora", raw.lora, "kv_lora_rank [L]")->type_name("INT");
  app.add_option("--softmax-scale", raw.softmax_scale, "Default 1/sqrt(P + Rr)")
      ->type_name("FLOAT");
  app.add_option("--layers", raw.layers, "Layers, each with its own weights and cache")
      ->type_name("INT")
      ->capture_default_str();

  app.option_defaults()->group("One step");
  app.add_option("--query-lens", raw.query_lens, "New tokens of each request, such as 64,17,1");
  app.add_option("--context-lens", raw.context_lens,
                 "Tokens in the cache of each request, such as 10240,0,512 (default: all 0)");

  app.option_defaults()->group("Many steps, chunked prefill");
  app.add_option("--requests", raw.requests, "Number of requests")->type_name("INT");
  app.add_option("--prompt-lens", raw.prompt_lens, "New tokens of a request, drawn from A:B")
      ->capture_default_str();
  app.add_option("--prefix-lens", raw.prefix_lens, "Tokens already in the cache, drawn from A:B")
      ->capture_default_str();
  app.add_option("--max-num-batched-tokens", raw.max_num_batched_tokens, "New tokens of a step")
      ->type_name("INT")
      ->capture_default_str();
  app.add_option("--seed", raw.seed, "Of lengths, inputs and weights")
      ->type_name("INT")
      ->capture_default_str();

  app.option_defaults()->group("Engine");
  app.add_option("--backend", raw.backend, "cpu, cuda, or auto: cuda where there is a device")
      ->check(CLI::IsMember({"cpu", "cuda", "auto"}))
      ->capture_default_str();
  app.add_option("--threads", raw.threads, "Of the cpu backend; 0: one a core")
      ->capture_default_str();
  app.add_option("--workspace-tokens", raw.workspace_tokens, "Latent rows in the workspace [W]")
      ->type_name("INT")
      ->capture_default_str();
  app.add_option("--page-size", raw.page_size, "Tokens a page")
      ->type_name("INT")
      ->capture_default_str();
  app.add_option("--kv-cache-dtype", raw.kv_cache_dtype, "bf16, fp8_e4m3 or fp8_ds_mla")
      ->capture_default_str();
  app.add_option("--kv-cache-scale", raw.kv_cache_scale, "Of fp8_e4m3: value = stored * scale")
      ->type_name("FLOAT")
      ->capture_default_str();
  app.add_option("--schedule", raw.schedule, "packed, uniform or fixed")->capture_default_str();
  app.add_option("--split-tokens", raw.split_tokens,
                 "Of fixed; 0: the largest page multiple up to min(W, 4096)")
      ->capture_default_str();
  app.add_option("--path", raw.path, "auto, expand or absorb")->capture_default_str();
  app.add_option("--merge", raw.merge, "fused or discrete")->capture_default_str();

  app.option_defaults()->group("Context parallelism");
  app.add_option("--cp", raw.cp, "Ranks")->type_name("INT")->capture_default_str();
  app.add_option("--cp-placement", raw.cp_words.placement, "sharded or replicated")
      ->check(CLI::IsMember({"sharded", "replicated"}))
      ->capture_default_str();
  app.add_option("--cp-queries", raw.cp_words.queries, "replicated or split")
      ->check(CLI::IsMember({"replicated", "split"}))
      ->capture_default_str();
  app.add_option("--cp-strategy", raw.cp_words.strategy, "gather_kv, merge_partials or auto")
      ->check(CLI::IsMember({"gather_kv", "merge_partials", "auto"}))
      ->capture_default_str();
  app.add_option("--cp-interleave", raw.cp_interleave, "Tokens on a rank in a row [I]")
      ->type_name("INT")
      ->capture_default_str();
  app.add_option("--cp-link-gbps", raw.cp_link_gbps, "Cost model: GB/s that a rank receives")
      ->type_name("FLOAT")
      ->capture_default_str();
  app.add_option("--cp-nic-gbps", raw.cp_nic_gbps,
                 "--simulate: GB/s that a rank receives from other nodes")
      ->type_name("FLOAT")
      ->capture_default_str();
  app.add_option("--cp-ranks-per-node", raw.cp_ranks_per_node, "--simulate: GPUs of a node")
      ->type_name("INT")
      ->capture_default_str();
  app.add_option("--cp-latency-us", raw.cp_latency_us, "Cost model: of one collective")
      ->type_name("FLOAT")
      ->capture_default_str();
  app.add_option("--cp-gemm-tflops", raw.cp_gemm_tflops, "Cost model: of the expansion")
      ->type_name("FLOAT")
      ->capture_default_str();
  app.add_option("--cp-attention-tflops", raw.cp_attention_tflops, "Cost model: of attention")
      ->type_name("FLOAT")
      ->capture_default_str();
  app.add_flag("--cp-spawn", raw.cp_words.spawn, "Start the ranks as processes");
  app.add_flag("--simulate", raw.cp_words.simulate,
               "Predict the time of a step from the cost model");

  app.option_defaults()->group("Output");
  app.add_flag("--verify", raw.verify, "Check the results against a float64 oracle");
  app.add_option("--json", raw.json, "Write JSON to FILE; with -, stdout is JSON alone")
      ->type_name("FILE|-");
  app.add_option("--trace", raw.trace, "Write Chrome trace events, for ui.perfetto.dev")
      ->type_name("FILE");
  app.add_option("--commit", raw.commit, "Named in results (default: $MLA_COMMIT, else git's)");
}

struct CommandHelp {
  Command command;
  const char* name;
  const char* description;
  const char* examples;
};

constexpr CommandHelp kCommands[] = {
    {Command::kRun, "run", "Prefill a synthetic batch, step by step, and report times",
     "Examples:\n"
     "  engine_cli run --query-lens 64,17,1 --context-lens 10240,0,512 --workspace-tokens 4096 "
     "--verify\n"
     "  engine_cli run --requests 8 --prompt-lens 512:4096 --max-num-batched-tokens 2048 --verify\n"
     "  engine_cli run --model glm-5 --query-lens 128 --context-lens 8192 --trace trace.json"},
    {Command::kPlan, "plan", "Show how contexts are cut into chunks; runs nothing",
     "Examples:\n"
     "  engine_cli plan --query-lens 64,17,1 --context-lens 10240,0,512 --workspace-tokens 4096\n"
     "  engine_cli plan --query-lens 33,33 --context-lens 1000,50 --cp 4 --cp-interleave 64 "
     "--json -"},
    {Command::kInfo, "info", "Show dimensions, memory, device and kernels of a configuration",
     "Examples:\n"
     "  engine_cli info\n"
     "  engine_cli info --model deepseek-v3 --heads 16 --kv-cache-dtype fp8_ds_mla --json -"},
    {Command::kBench, "bench", "Time ops and whole layers, after checking their results",
     "Examples:\n"
     "  engine_cli bench --json results.json\n"
     "  engine_cli bench --model deepseek-v3 --query-lens 512 --context-lens 65536"},
    {Command::kCalibrate, "calibrate", "Measure the rates that a cost model needs",
     "Example:\n"
     "  engine_cli calibrate --model deepseek-v2-lite --json -"},
};

}  // namespace

ParsedCommandLine parse_command_line(int argc, const char* const* argv) {
  CLI::App app("Chunked prefill of multi-head latent attention, on synthetic requests.",
               "engine_cli");
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 right, 1 verification failed, 2 bad arguments, input or unsupported option,\n"
      "3 a device or communication failure.\n"
      "Options and examples: engine_cli COMMAND --help");
  app.get_formatter()->column_width(34);

  RawOptions raw;
  std::vector<std::pair<CLI::App*, Command>> commands;
  for (const CommandHelp& help : kCommands) {
    CLI::App* command = app.add_subcommand(help.name, help.description);
    command->footer(help.examples);
    add_options(*command, raw);
    command->option_defaults()->group("Options");
    if (help.command == Command::kPlan) {
      command->add_option("--step", raw.step, "Which of many steps to plan")
          ->type_name("INT")
          ->capture_default_str();
    }
    if (help.command == Command::kBench || help.command == Command::kCalibrate) {
      command->add_option("--seconds", raw.bench_seconds, "Time spent on each measurement")
          ->type_name("FLOAT")
          ->capture_default_str();
    }
    commands.emplace_back(command, help.command);
  }

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // help
    std::ostringstream out;
    std::ostringstream err;
    app.exit(success, out, err);
    return {.options = {}, .help = out.str(), .error = std::nullopt};
  } catch (const CLI::ParseError& error) {
    std::string message = error.what();
    std::replace(message.begin(), message.end(), '\n', ' ');
    throw_error(ErrorCode::kInvalidArgument, "{}; see engine_cli --help", message);
  }
  for (const auto& [command, value] : commands) {
    if (!command->parsed()) continue;
    ParsedCommandLine parsed;
    parsed.options.command = value;
    parsed.options.json_path = raw.json.value_or("");
    parsed.options.trace_path = raw.trace.value_or("");
    try {
      check(raw, parsed.options);
    } catch (const Error& error) {
      parsed.error = error;
    }
    return parsed;
  }
  throw_error(ErrorCode::kInvalidArgument, "a command is needed; see engine_cli --help");
}

}  // namespace mla::cli
