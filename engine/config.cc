#include "engine/config.h"

#include <limits>

#include "engine/carver.h"
#include "metadata/error.h"

namespace mla {
namespace {

/// Dims of a valid model make no product here that 64 bits can't hold.
size_t part(int64_t rows, int64_t elements_per_row, DType dtype) {
  return align_part(static_cast<size_t>(rows) * static_cast<size_t>(elements_per_row) *
                    static_cast<size_t>(dtype_bytes(dtype)));
}

void check_at_least_one(int32_t value, std::string_view name) {
  if (value < 1) throw_error(ErrorCode::kInvalidArgument, "{} is {}, at least 1", name, value);
}

void check_class_limit(int32_t value, int32_t least, int32_t most, std::string_view name) {
  if (value < least || value > most) {
    throw_error(ErrorCode::kInvalidArgument, "the shape class has {} = {}, must be from {} to {}",
                name, value, least, most);
  }
}

}  // namespace

MergeMode find_merge_mode(std::string_view name) {
  for (const MergeMode mode : {MergeMode::kFused, MergeMode::kDiscrete}) {
    if (name == merge_mode_name(mode)) return mode;
  }
  throw_error(ErrorCode::kInvalidArgument, "merge mode '{}' is not one of: fused, discrete", name);
}

std::string_view merge_mode_name(MergeMode mode) {
  return mode == MergeMode::kFused ? "fused" : "discrete";
}

void validate_config(const EngineConfig& config, const Backend& backend) {
  validate_dims(config.dims);
  if (config.softmax_scale != 0.0f) validate_softmax_scale(config.softmax_scale);
  kv_cache_row_bytes(config.kv_cache_format, config.dims);
  check_at_least_one(config.max_query_tokens, "max_query_tokens");
  check_at_least_one(config.max_requests, "max_requests");
  if (!backend.supports_path(config.dims, Path::kExpand)) {
    throw_error(ErrorCode::kUnsupported,
                "the {} backend has no attention for P = {}, Rr = {}, V = {}", backend.name(),
                config.dims.qk_nope_head_dim, config.dims.qk_rope_head_dim, config.dims.v_head_dim);
  }
  const bool absorb_wanted = config.path == PathPolicy::kAbsorb;
  if (absorb_wanted && !backend.supports_path(config.dims, Path::kAbsorb)) {
    throw_error(ErrorCode::kUnsupported,
                "the {} backend has no absorbed attention for L = {}, Rr = {}", backend.name(),
                config.dims.kv_lora_rank, config.dims.qk_rope_head_dim);
  }
  if (config.shape_class.enabled()) {
    const ShapeClass& shape = config.shape_class;
    constexpr int32_t kAny = std::numeric_limits<int32_t>::max();
    check_class_limit(shape.max_requests, 1, config.max_requests, "max_requests");
    check_class_limit(shape.max_query_tokens, 1, config.max_query_tokens, "max_query_tokens");
    check_class_limit(shape.max_chunks, 0, kAny, "max_chunks");
    check_class_limit(shape.max_pages, 0, kAny, "max_pages");
    if (absorb_wanted) {
      throw_error(
          ErrorCode::kUnsupported,
          "path absorb is not served in a shape class: its passes differ from step to step");
    }
  }
  const PlanConfig plan = plan_config(config, backend);
  validate_plan_config(plan);
  if (config.shape_class.enabled() && config.schedule == Schedule::kFixed &&
      config.shape_class.max_query_tokens > effective_split_tokens(plan)) {
    throw_error(ErrorCode::kUnsupported,
                "the shape class has max_query_tokens = {}, with schedule fixed at most "
                "split_tokens, {}",
                config.shape_class.max_query_tokens, effective_split_tokens(plan));
  }
}

PlanConfig plan_config(const EngineConfig& config, const Backend& backend) {
  PlanConfig plan{.dims = config.dims,
                  .workspace_tokens = config.workspace_tokens,
                  .page_size = config.page_size,
                  .schedule = config.schedule,
                  .split_tokens = config.split_tokens,
                  .path = config.path,
                  .shard = config.shard};
  if (config.path == PathPolicy::kAuto &&
      (config.shape_class.enabled() || !backend.supports_path(config.dims, Path::kAbsorb))) {
    plan.path = PathPolicy::kExpand;
  }
  return plan;
}

WorkspaceLayout workspace_layout(const EngineConfig& config, const Backend& backend) {
  validate_config(config, backend);
  const ModelDims& dims = config.dims;
  const int64_t heads = dims.num_heads;
  const int64_t rows = config.workspace_tokens;
  const int64_t tokens = config.max_query_tokens;
  const bool discrete = config.merge == MergeMode::kDiscrete;

  WorkspaceLayout layout;
  layout.latent = part(rows, dims.latent_dim(), DType::kBFloat16);
  layout.expanded = part(rows, heads * dims.kv_head_dim(), DType::kBFloat16);
  layout.partial_out = part(tokens, heads * dims.v_head_dim, DType::kFloat32);
  layout.partial_lse = part(tokens, heads, DType::kFloat32);
  if (discrete) {
    layout.chunk_out = layout.partial_out;
    layout.chunk_lse = layout.partial_lse;
  }
  if (plan_config(config, backend).path != PathPolicy::kExpand) {
    layout.absorbed = part(kAbsorbRows, heads * dims.latent_dim(), DType::kFloat32) +
                      part(kAbsorbRows, heads * dims.kv_lora_rank, DType::kFloat32);
    if (!discrete) {  // discrete: straight into the chunk's partial
      layout.absorbed += part(kAbsorbRows, heads * dims.v_head_dim, DType::kFloat32) +
                         part(kAbsorbRows, heads, DType::kFloat32);
    }
  }
  layout.scratch = align_part(backend.scratch_bytes({.dims = dims,
                                                     .max_query_tokens = config.max_query_tokens,
                                                     .max_rows = config.workspace_tokens,
                                                     .max_requests = config.max_requests}));
  layout.total = layout.latent + layout.expanded + layout.partial_out + layout.partial_lse +
                 layout.chunk_out + layout.chunk_lse + layout.absorbed + layout.scratch;
  return layout;
}

}  // namespace mla
