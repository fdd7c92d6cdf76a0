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

/// One layer's tensors, all in backend memory and the caller's. T: of the step; in a shape class
/// they have its max_query_tokens rows, and rows past T of `out` and `lse` become 0 and -inf.
/// Data is 16-byte aligned and strides are multiples of 8 elements, those of `lse` apart.
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

 protected:
  // What a runner that exchanges between the stages of a layer builds on.
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
  struct Call;  // one run_layer's step, layer and stream

  Call make_call(const DevicePlan& step, const LayerParams& layer, Stream stream) const;
  void validate_call(const Call& call) const;
  WriteLatentCacheParams write_params(const Call& call) const;
  GatherLatentParams gather_params(const Call& call, const Chunk& chunk) const;
  ExpandParams expand_params(const Call& call, ConstRows latent, const Count& rows) const;
  PrefillAttentionParams attention_params(const Call& call, ConstRows k_pe, int64_t k_rows) const;

  void write_cache(const Call& call);
  void clear_partial(const Call& call, const Count& rows);
  /// An assembled chunk's rows are in the workspace already; others are gathered.
  void attend_chunk(const Call& call, const Chunk& chunk);
  /// Key rows [row_begin, row_end) of the layer's kv_c and k_pe.
  void attend_new_tokens(const Call& call, const NewTokenPiece& piece, int64_t row_begin,
                         int64_t row_end);

  EngineConfig config_;
  Backend* backend_;
  Workspace workspace_;

 private:
  void attend_expanded(const Call& call, const Chunk& chunk);
  void attend_absorbed(const Call& call, const Chunk& chunk, const AbsorbPass& pass);
  void attend_into(PrefillAttentionParams& attention, const Call& call, MergeMode mode);
  void mask_chunk(const Call& call, const Chunk& chunk);
  void merge(const Call& call, int64_t row_begin, const Count& rows, HeadRows suffix_out,
             Lse suffix_lse, HeadRows out, Lse lse);
  void merge_into_partial(const Call& call, int64_t row_begin, const Count& rows,
                          HeadRows suffix_out, Lse suffix_lse);
  void merge_rows(const Call& call, int64_t row_begin, const Count& rows);
  void merge_chunk(const Call& call, const Chunk& chunk);
  void merge_carried(const Call& call, const NewTokenPiece& piece);
  void clear_unused_slot(const Call& call);
  void clear_padding(const Call& call);
};

/// The layer's tensors and the running partial as a stage sees them.
struct AttentionRunner::Call {
  const DevicePlan& step;
  LayerParams layer;
  HeadRows partial_out;
  Lse partial_lse;
  int64_t q_rows = 0;  // of layer.q
  OpContext context;

  const StepPlan& plan() const { return *step.plan; }
  bool in_class() const { return plan().shape_class().enabled(); }

  template <typename T>
  const T* block(BlockArray<T> array) const {
    return block_pointer(step.block, array);
  }
  /// In a shape class a launch is sized by its capacity and finds the real length in the block.
  Count count(int64_t actual, int64_t capacity, const int32_t* in_block) const {
    return in_class() ? Count{capacity, in_block} : Count{actual, nullptr};
  }
  /// New tokens: rows of the layer's kv_c and k_pe.
  int64_t rows() const {
    return in_class() ? plan().shape_class().max_query_tokens : plan().num_query_tokens();
  }
  Count tokens() const {
    const int32_t* const last = block(plan().query_start_loc()) + plan().shape_class().max_requests;
    return count(plan().num_query_tokens(), rows(), last);
  }
  int32_t request_capacity() const { return plan().shape_class().max_requests; }

  /// Whether the last merge finds a running partial. Schedule kFixed always makes one, since the
  /// batch may not decide how a row's result is formed, down to the sign of a zero.
  bool has_partial() const {
    return in_class() || !plan().chunks().empty() || plan().new_token_pieces().size() > 1 ||
           plan().config().schedule == Schedule::kFixed;
  }
};

}  // namespace mla

#endif  // ENGINE_ATTENTION_RUNNER_H_
