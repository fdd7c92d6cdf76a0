// The engine's configuration and the memory that follows from it.
#ifndef ENGINE_CONFIG_H_
#define ENGINE_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/backend.h"
#include "metadata/model.h"
#include "metadata/plan.h"

namespace mla {

/// Who merges a chunk's partial result into the running one.
enum class MergeMode {
  kFused,     // the attention op's epilogue; a request without keys in a chunk costs nothing
  kDiscrete,  // prefill_attention -> mask_empty_context -> merge_attn_states, an op each
};
MergeMode find_merge_mode(std::string_view name);  // "fused", "discrete"
std::string_view merge_mode_name(MergeMode mode);

struct EngineConfig {
  ModelDims dims;
  float softmax_scale = 0.0f;  // 0: default_softmax_scale(dims)
  KvCacheFormat kv_cache_format = KvCacheFormat::kBf16;
  int32_t page_size = 64;
  int32_t workspace_tokens = 65536;  // [W]
  Schedule schedule = Schedule::kPacked;
  int32_t split_tokens = 0;  // see PlanConfig
  PathPolicy path = PathPolicy::kAuto;
  MergeMode merge = MergeMode::kFused;
  int32_t max_query_tokens = 32768;  // new tokens of one step
  int32_t max_requests = 1024;
  ContextShard shard;
  /// Enabled: steps are planned for this class and refused outside it, and every layer call makes
  /// the same launches, whatever the step. Only the expand path; with kFixed, max_query_tokens is
  /// at most split_tokens, since the pieces of new tokens may not depend on the step.
  ShapeClass shape_class;
};

/// Throws kInvalidArgument or kUnsupported for a config that `backend` can't serve.
void validate_config(const EngineConfig& config, const Backend& backend);

/// The plan's share of the config. Where the backend has no absorbed attention, and in a shape
/// class, kAuto becomes kExpand.
PlanConfig plan_config(const EngineConfig& config, const Backend& backend);

/// Exact bytes of the workspace an engine of this config needs, for any context and any step
/// within its limits: the parts, and their sum, each rounded up to 256 bytes.
struct WorkspaceLayout {
  size_t latent = 0;       // [W, L + Rr] bf16
  size_t expanded = 0;     // [W, H * (P + V)] bf16
  size_t partial_out = 0;  // [max_query_tokens, H, V] float32, the running partial
  size_t partial_lse = 0;  // [H, max_query_tokens] float32
  size_t chunk_out = 0;    // kDiscrete: as partial_out, for one chunk
  size_t chunk_lse = 0;    // kDiscrete
  size_t absorbed = 0;     // absorb path: query, latent output and values of kAbsorbRows tokens
  size_t scratch = 0;      // the backend's
  size_t total = 0;
};
WorkspaceLayout workspace_layout(const EngineConfig& config, const Backend& backend);
inline size_t workspace_bytes(const EngineConfig& config, const Backend& backend) {
  return workspace_layout(config, backend).total;
}

}  // namespace mla

#endif  // ENGINE_CONFIG_H_
