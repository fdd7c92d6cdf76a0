#include "tools/cli/info.h"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <utility>

#include "tools/cli/table.h"
#include "tools/cli/workload.h"

namespace mla::cli {

using nlohmann::ordered_json;

namespace {

std::string git_commit() {
  std::string commit;
  std::FILE* const pipe = popen("git rev-parse --short=12 HEAD 2>/dev/null", "r");
  if (pipe == nullptr) return commit;
  std::array<char, 64> line{};
  if (std::fgets(line.data(), line.size(), pipe) != nullptr) commit = line.data();
  pclose(pipe);
  while (!commit.empty() && commit.back() == '\n') commit.pop_back();
  return commit;
}

std::array<std::pair<const char*, size_t>, 9> workspace_parts(const WorkspaceLayout& w) {
  return {{{"latent", w.latent},
           {"expanded", w.expanded},
           {"partial_out", w.partial_out},
           {"partial_lse", w.partial_lse},
           {"chunk_out", w.chunk_out},
           {"chunk_lse", w.chunk_lse},
           {"absorbed", w.absorbed},
           {"scratch", w.scratch},
           {"total", w.total}}};
}

}  // namespace

std::string find_commit(const Options& options) {
  if (!options.commit.empty()) return options.commit;
  const char* const variable = std::getenv("MLA_COMMIT");
  if (variable != nullptr && *variable != '\0') return variable;
  const std::string commit = git_commit();
  return commit.empty() ? "unknown" : commit;
}

InfoReport make_info_report(const Options& options, const Device& device) {
  const Backend& backend = *device.backend;
  InfoReport report;
  report.model = options.model;
  report.config = options.config;
  report.config.max_query_tokens = options.max_num_batched_tokens;
  if (options.single_step) {
    const Workload workload = make_workload(options);
    report.config.max_query_tokens = std::max(workload.max_query_tokens, 1);
    report.config.max_requests = std::max(workload.max_requests, 1);
  }
  const ModelDims& dims = report.config.dims;
  report.cache_row_bytes = kv_cache_row_bytes(report.config.kv_cache_format, dims);
  report.workspace = workspace_layout(report.config, backend);
  report.backend = backend.name();
  report.device = backend.device_description();
  report.choice = device.choice;
  report.expand_kernel = backend.attention_kernel(dims, DType::kBFloat16, Path::kExpand);
  if (backend.supports_path(dims, Path::kAbsorb)) {
    report.absorb_kernel = backend.attention_kernel(dims, DType::kBFloat16, Path::kAbsorb);
  }
  report.commit = find_commit(options);
  return report;
}

ordered_json info_json(const InfoReport& report) {
  const EngineConfig& config = report.config;
  ordered_json json{{"model", report.model},
                    {"dims",
                     {{"num_heads", config.dims.num_heads},
                      {"qk_nope_head_dim", config.dims.qk_nope_head_dim},
                      {"qk_rope_head_dim", config.dims.qk_rope_head_dim},
                      {"v_head_dim", config.dims.v_head_dim},
                      {"kv_lora_rank", config.dims.kv_lora_rank}}},
                    {"softmax_scale", config.softmax_scale},
                    {"kv_cache_dtype", kv_cache_format_name(config.kv_cache_format)},
                    {"kv_cache_row_bytes", report.cache_row_bytes},
                    {"page_size", config.page_size},
                    {"workspace_tokens", config.workspace_tokens},
                    {"max_query_tokens", config.max_query_tokens},
                    {"max_requests", config.max_requests},
                    {"schedule", schedule_name(config.schedule)},
                    {"merge", merge_mode_name(config.merge)}};
  for (const auto& [name, bytes] : workspace_parts(report.workspace)) {
    json["workspace_bytes"][name] = bytes;
  }
  json["backend"] = report.backend;
  json["device"] = report.device;
  json["attention_kernel"] = {{"expand", report.expand_kernel}, {"absorb", nullptr}};
  if (!report.absorb_kernel.empty()) json["attention_kernel"]["absorb"] = report.absorb_kernel;
  for (const ModelPreset& preset : model_presets()) json["presets"].push_back(preset.name);
  json["commit"] = report.commit;
  return json;
}

std::string info_text(const InfoReport& report) {
  const EngineConfig& config = report.config;
  const ModelDims& dims = config.dims;
  std::string text = fmt::format(
      "Model     {}: H {}, P {}, Rr {}, V {}, L {}; softmax scale {:.6f}\n"
      "Cache     {}, {} bytes a row, {} tokens a page\n"
      "Backend   {} ({}{}{})\n"
      "Attention expand: {}\n"
      "          absorb: {}\n"
      "Commit    {}\n\n",
      report.model, dims.num_heads, dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim,
      dims.kv_lora_rank, config.softmax_scale, kv_cache_format_name(config.kv_cache_format),
      report.cache_row_bytes, config.page_size, report.backend, report.device,
      report.choice.empty() ? "" : "; ", report.choice, report.expand_kernel,
      report.absorb_kernel.empty() ? "not served" : report.absorb_kernel, report.commit);

  text += fmt::format("Workspace for W {} and steps of up to {} new tokens of {} requests\n\n",
                      with_commas(config.workspace_tokens), with_commas(config.max_query_tokens),
                      with_commas(config.max_requests));
  Table table({{"part", Table::Align::kLeft}, {"bytes"}, {""}});
  for (const auto& [name, bytes] : workspace_parts(report.workspace)) {
    table.add_row(
        {name, with_commas(static_cast<int64_t>(bytes)), bytes_text(static_cast<double>(bytes))});
  }
  text += table.to_string();

  text += "\nPresets:";
  for (const ModelPreset& preset : model_presets()) text += fmt::format(" {}", preset.name);
  return text + "\n";
}

}  // namespace mla::cli
