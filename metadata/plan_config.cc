#include <algorithm>

#include "metadata/error.h"
#include "metadata/plan.h"

namespace mla {

std::string_view schedule_name(Schedule schedule) {
  switch (schedule) {
    case Schedule::kPacked:
      return "packed";
    case Schedule::kUniform:
      return "uniform";
    case Schedule::kFixed:
      return "fixed";
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown schedule {}", static_cast<int>(schedule));
}

Schedule find_schedule(std::string_view name) {
  for (Schedule schedule : {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed}) {
    if (schedule_name(schedule) == name) return schedule;
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown schedule '{}'; known: packed, uniform, fixed",
              name);
}

std::string_view path_name(Path path) { return path == Path::kExpand ? "expand" : "absorb"; }

PathPolicy find_path_policy(std::string_view name) {
  if (name == "auto") return PathPolicy::kAuto;
  if (name == "expand") return PathPolicy::kExpand;
  if (name == "absorb") return PathPolicy::kAbsorb;
  throw_error(ErrorCode::kInvalidArgument, "unknown path '{}'; known: auto, expand, absorb", name);
}

Path cheaper_path(const ModelDims& dims, int32_t query_len, int32_t context_len) {
  // Multiply-adds of one head; in double, since the products pass 2^63.
  const double q = query_len;
  const double k = context_len;
  const double projection = double(dims.kv_lora_rank) * dims.kv_head_dim();
  const double expand = k * projection + q * k * (dims.qk_head_dim() + dims.v_head_dim);
  const double absorb = q * projection + q * k * (dims.latent_dim() + dims.kv_lora_rank);
  return absorb < expand ? Path::kAbsorb : Path::kExpand;
}

void validate_plan_config(const PlanConfig& config) {
  validate_dims(config.dims);
  validate_shard(config.shard);
  if (config.page_size < 1) {
    throw_error(ErrorCode::kInvalidArgument, "page_size is {}, at least 1 is needed",
                config.page_size);
  }
  if (config.workspace_tokens < config.page_size) {
    throw_error(ErrorCode::kInvalidArgument,
                "workspace_tokens is {}; one page, {} tokens, is its least",
                config.workspace_tokens, config.page_size);
  }
  if (config.split_tokens < 0 || config.split_tokens % config.page_size != 0 ||
      config.split_tokens > config.workspace_tokens) {
    throw_error(ErrorCode::kInvalidArgument,
                "split_tokens is {}; it must be a multiple of the page size {} up to "
                "workspace_tokens {}",
                config.split_tokens, config.page_size, config.workspace_tokens);
  }
  schedule_name(config.schedule);
}

int32_t effective_split_tokens(const PlanConfig& config) {
  if (config.split_tokens > 0) return config.split_tokens;
  constexpr int32_t kDefaultSplit = 4096;
  const int32_t most = std::min(config.workspace_tokens, kDefaultSplit);
  // A page above the default is the least there is; W holds one.
  return std::max(most - most % config.page_size, config.page_size);
}

}  // namespace mla
