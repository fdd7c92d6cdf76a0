// One layer of one step: the sequence of ops that turns queries, new latent rows and the paged
// cache into attention output.
#ifndef ENGINE_ATTENTION_RUNNER_H_
#define ENGINE_ATTENTION_RUNNER_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/config.h"
#include "kernels/backend.h"
#include "metadata/plan.h"

namespace mla {

/// One layer's tensors, all in backend memory and the caller's. T, R: of the step.
struct LayerParams {
  ConstHeadRows q;                  // [T, H, P + Rr] bf16, RoPE applied
  ConstRows kv_c;                   // [T, L] bf16, may be a strided view
  ConstRows k_pe;                   // [T, Rr] bf16, RoPE applied, may be a strided view
  const void* kv_b_proj = nullptr;  // [H * (P + V), L] bf16, contiguous
  LatentCache kv_cache;
  HeadRows out;  // [T, H, V] bf16 or float32
  Lse lse;       // [H, T] natural log; null: not wanted
};

/// The step's arrays in backend memory.
struct DevicePlan {
  const StepPlan* plan = nullptr;
  const std::byte* block = nullptr;      // the plan's block, as uploaded
  const int32_t* block_table = nullptr;  // [R, *]
  int64_t block_table_stride = 0;
  const int64_t* slot_mapping = nullptr;  // [T]; null: the cache is not written
};

/// Runs layers through a fixed workspace. Per layer, in stream order:
///   write_latent_cache; then per context chunk gather -> expand -> attend (-> mask -> merge);
///   then the new tokens, piece by piece, whose last merge writes `out`.
/// No allocation, no copy to the host and no wait. One runner is used from one thread at a time.
class AttentionRunner {
 public:
  /// `workspace`: workspace_bytes(config, backend) bytes of backend memory, 256-byte aligned; it
  /// and the backend must outlive the runner.
  AttentionRunner(const EngineConfig& config, Backend& backend, std::span<std::byte> workspace);

  /// Throws kInvalidArgument before anything is launched or written.
  void run_layer(const DevicePlan& step, const LayerParams& layer, Stream stream);

 private:
  struct Workspace {
    Rows latent;
    Rows expanded;
    HeadRows partial_out;
    Lse partial_lse;
    HeadRows chunk_out;
    Lse chunk_lse;
    HeadRows absorbed_query;
    HeadRows absorbed_out;
    HeadRows absorbed_values;
    Lse absorbed_lse;
    std::span<std::byte> scratch;
  };

  EngineConfig config_;
  Backend* backend_;
  Workspace workspace_;
};

}  // namespace mla

#endif  // ENGINE_ATTENTION_RUNNER_H_
