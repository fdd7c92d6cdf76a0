#include "engine/attention_runner.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "engine/carver.h"
#include "engine/views.h"
#include "kernels/validate.h"
#include "metadata/error.h"

namespace mla {
namespace {

/// What the ops' own checks leave open, by the names of LayerParams: the engine asks for it of
/// every tensor, so that no backend has to refuse one half-way through a layer.
void check_vector_access(const void* data, std::initializer_list<int64_t> strides,
                         std::string_view name) {
  if (data == nullptr) throw_error(ErrorCode::kInvalidArgument, "{} is null", name);
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    throw_error(ErrorCode::kInvalidArgument, "{} is at {}, must be aligned to 16 bytes", name,
                data);
  }
  for (const int64_t stride : strides) {
    if (stride % 8 != 0) {
      throw_error(ErrorCode::kInvalidArgument, "{} has stride {}, must be a multiple of 8", name,
                  stride);
    }
  }
}

void check_bf16(DType dtype, std::string_view name) {
  if (dtype == DType::kBFloat16) return;
  throw_error(ErrorCode::kUnsupported, "{} is {}, must be {}", name, dtype_name(dtype),
              dtype_name(DType::kBFloat16));
}

void check_cache_geometry(const LatentCache& cache, const EngineConfig& config) {
  if (cache.format != config.kv_cache_format) {
    throw_error(ErrorCode::kInvalidArgument, "the layer's cache holds {}, the engine's config {}",
                kv_cache_format_name(cache.format), kv_cache_format_name(config.kv_cache_format));
  }
  if (cache.page_size != config.page_size) {
    throw_error(ErrorCode::kInvalidArgument,
                "the layer's cache has pages of {} tokens, the engine's config of {}",
                cache.page_size, config.page_size);
  }
}

}  // namespace

AttentionRunner::AttentionRunner(const EngineConfig& config, Backend& backend,
                                 std::span<std::byte> workspace)
    : config_(config), backend_(&backend) {
  const WorkspaceLayout layout = workspace_layout(config, backend);  // validates the config
  if (config_.softmax_scale == 0.0f) config_.softmax_scale = default_softmax_scale(config.dims);
  if (workspace.size() < layout.total) {
    throw_error(ErrorCode::kInvalidArgument, "the workspace has {} bytes, this config needs {}",
                workspace.size(), layout.total);
  }
  if (reinterpret_cast<uintptr_t>(workspace.data()) % kWorkspaceAlignment != 0) {
    throw_error(ErrorCode::kInvalidArgument, "the workspace is at {}, must be aligned to {} bytes",
                static_cast<const void*>(workspace.data()), kWorkspaceAlignment);
  }
  const ModelDims& dims = config.dims;
  const int64_t heads = dims.num_heads;
  const int64_t tokens = config.max_query_tokens;
  Carver carver(workspace);
  workspace_.latent =
      carver.take_rows(config.workspace_tokens, dims.latent_dim(), DType::kBFloat16);
  workspace_.expanded =
      carver.take_rows(config.workspace_tokens, heads * dims.kv_head_dim(), DType::kBFloat16);
  workspace_.partial_out = carver.take_heads(tokens, heads, dims.v_head_dim, DType::kFloat32);
  workspace_.partial_lse = carver.take_lse(tokens, heads);
  if (layout.chunk_out > 0) {
    workspace_.chunk_out = carver.take_heads(tokens, heads, dims.v_head_dim, DType::kFloat32);
    workspace_.chunk_lse = carver.take_lse(tokens, heads);
  }
  if (layout.absorbed > 0) {
    workspace_.absorbed_query =
        carver.take_heads(kAbsorbRows, heads, dims.latent_dim(), DType::kFloat32);
    workspace_.absorbed_out =
        carver.take_heads(kAbsorbRows, heads, dims.kv_lora_rank, DType::kFloat32);
    if (config.merge == MergeMode::kFused) {
      workspace_.absorbed_values =
          carver.take_heads(kAbsorbRows, heads, dims.v_head_dim, DType::kFloat32);
      workspace_.absorbed_lse = carver.take_lse(kAbsorbRows, heads);
    }
  }
  workspace_.scratch = carver.take(layout.scratch);
}

void AttentionRunner::run_layer(const DevicePlan& step, const LayerParams& layer, Stream stream) {
  const Call call = make_call(step, layer, stream);
  validate_call(call);
  if (call.rows() == 0) return;

  write_cache(call);
  if (call.has_partial()) clear_partial(call, call.tokens());
  for (const Chunk& chunk : call.plan().chunk_slots()) attend_chunk(call, chunk);
  const std::span<const NewTokenPiece> pieces = call.plan().new_token_slots();
  for (size_t i = 0; i < pieces.size(); ++i) {
    // In a class the i-th piece begins at row i * W, whatever the step; more slots than the class
    // has rows for stay unused.
    const int64_t w = config_.workspace_tokens;
    const int64_t row_begin = call.in_class() ? static_cast<int64_t>(i) * w : pieces[i].row_begin;
    if (row_begin >= call.rows()) break;
    const int64_t row_end =
        call.in_class() ? std::min(row_begin + w, call.rows()) : pieces[i].row_end;
    attend_new_tokens(call, pieces[i], row_begin, row_end);
  }
  if (call.in_class()) clear_padding(call);
}

AttentionRunner::Call AttentionRunner::make_call(const DevicePlan& step, const LayerParams& layer,
                                                 Stream stream) const {
  Call call{.step = step,
            .layer = layer,
            .partial_out = workspace_.partial_out,
            .partial_lse = workspace_.partial_lse,
            .context = {stream, workspace_.scratch}};
  if (step.plan != nullptr) call.q_rows = call.rows();
  return call;
}

/// Everything that an op would refuse, before the first of them runs: the ops' own checks, on
/// params as large as any that follow.
void AttentionRunner::validate_call(const Call& call) const {
  const ModelDims& dims = config_.dims;
  if (call.step.plan == nullptr || call.step.block == nullptr) {
    throw_error(ErrorCode::kInvalidArgument, "run_layer without a plan in backend memory");
  }
  const StepPlan& plan = call.plan();
  const PlanConfig& planned = plan.config();
  if (!(planned.dims == dims) || planned.workspace_tokens != config_.workspace_tokens ||
      planned.page_size != config_.page_size || !(plan.shape_class() == config_.shape_class)) {
    throw_error(ErrorCode::kInvalidArgument,
                "the plan is for other dims, workspace_tokens, page_size or shape class than the "
                "engine's config");
  }
  if (plan.num_query_tokens() > config_.max_query_tokens ||
      plan.num_requests() > config_.max_requests) {
    throw_error(ErrorCode::kInvalidArgument,
                "the plan has {} new tokens of {} requests, the config at most {} of {}",
                plan.num_query_tokens(), plan.num_requests(), config_.max_query_tokens,
                config_.max_requests);
  }
  const LayerParams& layer = call.layer;
  if (call.rows() == 0) return;

  check_bf16(layer.q.dtype, "q");
  check_bf16(layer.kv_c.dtype, "kv_c");
  check_bf16(layer.k_pe.dtype, "k_pe");
  check_vector_access(layer.kv_c.data, {layer.kv_c.row_stride}, "kv_c");
  if (call.rows() > 1 && layer.kv_c.row_stride < dims.kv_lora_rank) {
    throw_error(ErrorCode::kInvalidArgument, "kv_c has row stride {}, at least {}",
                layer.kv_c.row_stride, dims.kv_lora_rank);
  }
  check_vector_access(layer.kv_b_proj, {}, "kv_b_proj");
  check_vector_access(layer.out.data, {layer.out.row_stride, layer.out.head_stride}, "out");
  validate(expand_params(call, layer.kv_c, {call.rows()}));
  PrefillAttentionParams attention = attention_params(call, layer.k_pe, call.rows());
  attention.items = block_pointer(call.step.block, BlockArray<AttentionItem>{});
  attention.num_items = {1};
  attention.max_q_len = attention.max_k_len = static_cast<int32_t>(call.rows());
  attention.out = layer.out;
  attention.lse = layer.lse;
  validate(attention);

  // A class's slots may all be used. Of other chunks some are seen by no new token, and of some
  // this rank holds nothing.
  const auto gathers = [&](const Chunk& chunk) {
    if (call.in_class()) return true;
    return (chunk.assembly.padded_rows > 0 ? chunk.stored_rows : chunk.items.size) > 0;
  };
  const bool reads_cache = std::ranges::any_of(plan.chunk_slots(), gathers);
  if (reads_cache && call.step.block_table == nullptr) {
    throw_error(ErrorCode::kInvalidArgument, "the step has {} context chunks but no block table",
                plan.chunk_slots().size());
  }
  if (reads_cache || call.step.slot_mapping != nullptr) {
    check_cache_geometry(layer.kv_cache, config_);
  }
  if (call.step.slot_mapping != nullptr) validate(write_params(call));
  for (const Chunk& chunk : plan.chunk_slots()) {
    if (gathers(chunk)) validate(gather_params(call, chunk));
  }
}

WriteLatentCacheParams AttentionRunner::write_params(const Call& call) const {
  return {.kv_lora_rank = config_.dims.kv_lora_rank,
          .qk_rope_head_dim = config_.dims.qk_rope_head_dim,
          .kv_c = call.layer.kv_c,
          .k_pe = call.layer.k_pe,
          .slot_mapping = call.step.slot_mapping,
          .num_tokens = call.tokens(),
          .kv_cache = call.layer.kv_cache};
}

GatherLatentParams AttentionRunner::gather_params(const Call& call, const Chunk& chunk) const {
  const ChunkCounts* const counts = call.block(chunk.counts);
  return {.kv_lora_rank = config_.dims.kv_lora_rank,
          .qk_rope_head_dim = config_.dims.qk_rope_head_dim,
          .kv_cache = as_const(call.layer.kv_cache),
          .block_table = call.step.block_table + chunk.request_begin * call.step.block_table_stride,
          .block_table_stride = call.step.block_table_stride,
          .starts = call.block(chunk.starts),
          .cu_seq_lens = call.block(chunk.cu_seq_lens),
          .num_spans = call.count(chunk.request_end - chunk.request_begin, call.request_capacity(),
                                  &counts->requests),
          .num_rows = call.count(chunk.seq_tot, config_.workspace_tokens, &counts->rows),
          .latent = workspace_.latent};
}

ExpandParams AttentionRunner::expand_params(const Call& call, ConstRows latent,
                                            const Count& rows) const {
  return {.dims = config_.dims,
          .latent = latent,
          .kv_b_proj = call.layer.kv_b_proj,
          .expanded = workspace_.expanded,
          .num_rows = rows};
}

/// Attention over `k_rows` rows of the expansion; items and output are left to the caller.
PrefillAttentionParams AttentionRunner::attention_params(const Call& call, ConstRows k_pe,
                                                         int64_t k_rows) const {
  const ModelDims& dims = config_.dims;
  const ConstRows expanded = as_const(workspace_.expanded);
  const auto heads_from = [&](int64_t column) {
    return ConstHeadRows{from_column(expanded, column).data, expanded.dtype, expanded.row_stride,
                         dims.kv_head_dim()};
  };
  PrefillAttentionParams params;
  params.num_heads = dims.num_heads;
  params.qk_nope_head_dim = dims.qk_nope_head_dim;
  params.qk_rope_head_dim = dims.qk_rope_head_dim;
  params.v_head_dim = dims.v_head_dim;
  params.softmax_scale = config_.softmax_scale;
  params.q = call.layer.q;
  params.k_nope = heads_from(0);
  params.k_pe = k_pe;
  params.v = heads_from(dims.qk_nope_head_dim);
  params.q_rows = call.q_rows;
  params.k_rows = k_rows;
  return params;
}

void AttentionRunner::write_cache(const Call& call) {
  if (call.step.slot_mapping != nullptr) {
    backend_->write_latent_cache(write_params(call), call.context);
  }
}

void AttentionRunner::clear_partial(const Call& call, const Count& rows) {
  backend_->clear_partial(
      {.num_heads = config_.dims.num_heads, .num_tokens = rows, .lse = call.partial_lse},
      call.context);
}

void AttentionRunner::attend_chunk(const Call& call, const Chunk& chunk) {
  if (!call.in_class() && chunk.items.size == 0) return;  // no new token sees it
  const bool discrete = config_.merge == MergeMode::kDiscrete;
  if (discrete) clear_unused_slot(call);
  if (chunk.assembly.padded_rows == 0) {
    backend_->gather_latent(gather_params(call, chunk), call.context);
  }
  if (chunk.path == Path::kExpand) {
    attend_expanded(call, chunk);
  } else {
    const auto passes =
        call.plan().absorb_passes().subspan(chunk.pass_begin, chunk.pass_end - chunk.pass_begin);
    for (const AbsorbPass& pass : passes) attend_absorbed(call, chunk, pass);
  }
  if (!discrete) return;
  mask_chunk(call, chunk);
  merge_chunk(call, chunk);
}

/// Rows of requests without keys in the chunk belong to no item: what the chunk's partial holds for
/// them is not this chunk's.
void AttentionRunner::mask_chunk(const Call& call, const Chunk& chunk) {
  if (!call.in_class() && !chunk.has_empty_context) return;
  const StepPlan& plan = call.plan();
  for (int32_t block = 0; block < plan.num_row_blocks(); ++block) {
    const int32_t* const row_starts =
        call.block(plan.context_row_starts()) + int64_t{block} * (plan.num_requests() + 1);
    backend_->mask_empty_context(
        {.num_heads = config_.dims.num_heads,
         .head_dim = config_.dims.v_head_dim,
         .query_start_loc = row_starts + chunk.request_begin,
         .context_start_loc = call.block(chunk.cu_seq_lens),
         .num_requests = call.count(chunk.request_end - chunk.request_begin,
                                    call.request_capacity(), &call.block(chunk.counts)->requests),
         .max_query_len =
             call.in_class() ? static_cast<int32_t>(call.rows()) : call.plan().max_query_len(),
         .output = workspace_.chunk_out,
         .lse = workspace_.chunk_lse},
        call.context);
  }
}

void AttentionRunner::merge_chunk(const Call& call, const Chunk& chunk) {
  if (call.in_class()) {
    merge_rows(call, 0, call.tokens());
    return;
  }
  const StepPlan& plan = call.plan();
  const int64_t entries = int64_t{plan.num_requests()} + 1;
  for (int32_t block = 0; block < plan.num_row_blocks(); ++block) {
    const auto row_starts = plan.host(plan.context_row_starts()).subspan(block * entries, entries);
    const int32_t begin = row_starts[chunk.request_begin];
    merge_rows(call, begin, {row_starts[chunk.request_end] - begin});
  }
}

void AttentionRunner::attend_expanded(const Call& call, const Chunk& chunk) {
  const int64_t workspace_rows = config_.workspace_tokens;
  const ChunkCounts* const counts = call.block(chunk.counts);
  const Count rows = call.count(chunk.seq_tot, workspace_rows, &counts->rows);
  const ConstRows latent = as_const(workspace_.latent);
  backend_->expand(expand_params(call, latent, rows), call.context);

  PrefillAttentionParams attention =
      attention_params(call, from_column(latent, config_.dims.kv_lora_rank), rows.capacity);
  attention.items = call.block(chunk.items);
  attention.num_items = call.count(chunk.items.size, call.request_capacity(), &counts->items);
  attention.max_q_len = call.in_class() ? static_cast<int32_t>(call.rows()) : chunk.max_query_len;
  attention.max_k_len = call.in_class() ? config_.workspace_tokens : chunk.max_seq_len;
  attend_into(attention, call, config_.merge);
}

/// `attention` with its result merged into the running partial, or alone in the chunk's.
void AttentionRunner::attend_into(PrefillAttentionParams& attention, const Call& call,
                                  MergeMode mode) {
  if (mode == MergeMode::kFused) {
    attention.prefix_out = as_const(call.partial_out);
    attention.prefix_lse = as_const(call.partial_lse);
    attention.out = call.partial_out;
    attention.lse = call.partial_lse;
  } else {
    attention.out = workspace_.chunk_out;
    attention.lse = workspace_.chunk_lse;
  }
  backend_->prefill_attention(attention, call.context);
}

/// One latent row is key and value of every head; the op runs at L + Rr / L.
void AttentionRunner::attend_absorbed(const Call& call, const Chunk& chunk,
                                      const AbsorbPass& pass) {
  const ModelDims& dims = config_.dims;
  const bool fused = config_.merge == MergeMode::kFused;
  const Count rows{pass.row_end - pass.row_begin};
  const HeadRows values =
      fused ? workspace_.absorbed_values : from_row(workspace_.chunk_out, pass.row_begin);
  const Lse lse = fused ? workspace_.absorbed_lse : from_row(workspace_.chunk_lse, pass.row_begin);

  backend_->absorb_query({.dims = dims,
                          .q = from_row(call.layer.q, pass.row_begin),
                          .kv_b_proj = call.layer.kv_b_proj,
                          .absorbed = workspace_.absorbed_query,
                          .num_rows = rows},
                         call.context);
  if (fused && chunk.has_empty_context) {  // discrete: the mask sees to rows of no item
    backend_->clear_partial({.num_heads = dims.num_heads, .num_tokens = rows, .lse = lse},
                            call.context);
  }

  const ConstRows latent = as_const(workspace_.latent);
  PrefillAttentionParams attention;
  attention.num_heads = dims.num_heads;
  attention.qk_nope_head_dim = dims.kv_lora_rank;
  attention.qk_rope_head_dim = dims.qk_rope_head_dim;
  attention.v_head_dim = dims.kv_lora_rank;
  attention.softmax_scale = config_.softmax_scale;
  attention.q = as_const(workspace_.absorbed_query);
  attention.k_nope = shared_by_heads(latent);
  attention.k_pe = from_column(latent, dims.kv_lora_rank);
  attention.v = shared_by_heads(latent);
  attention.q_rows = rows.capacity;
  attention.k_rows = chunk.seq_tot;
  attention.items = call.block(pass.items);
  attention.num_items = {pass.items.size};
  attention.max_q_len = pass.max_query_len;
  attention.max_k_len = chunk.max_seq_len;
  attention.out = workspace_.absorbed_out;
  attention.lse = lse;
  backend_->prefill_attention(attention, call.context);

  backend_->project_value({.dims = dims,
                           .latent_out = as_const(workspace_.absorbed_out),
                           .kv_b_proj = call.layer.kv_b_proj,
                           .values = values,
                           .num_rows = rows},
                          call.context);
  if (fused) merge_into_partial(call, pass.row_begin, rows, values, lse);
}

/// Rows of the running partial from `row_begin` on; the suffix starts there too.
void AttentionRunner::merge_into_partial(const Call& call, int64_t row_begin, const Count& rows,
                                         HeadRows suffix_out, Lse suffix_lse) {
  merge(call, row_begin, rows, suffix_out, suffix_lse, from_row(call.partial_out, row_begin),
        from_row(call.partial_lse, row_begin));
}

void AttentionRunner::merge_rows(const Call& call, int64_t row_begin, const Count& rows) {
  merge_into_partial(call, row_begin, rows, from_row(workspace_.chunk_out, row_begin),
                     from_row(workspace_.chunk_lse, row_begin));
}

void AttentionRunner::merge(const Call& call, int64_t row_begin, const Count& rows,
                            HeadRows suffix_out, Lse suffix_lse, HeadRows out, Lse lse) {
  backend_->merge_attn_states({.num_heads = config_.dims.num_heads,
                               .head_dim = config_.dims.v_head_dim,
                               .num_tokens = rows,
                               .prefix_out = as_const(from_row(call.partial_out, row_begin)),
                               .prefix_lse = as_const(from_row(call.partial_lse, row_begin)),
                               .suffix_out = as_const(suffix_out),
                               .suffix_lse = as_const(suffix_lse),
                               .output = out,
                               .output_lse = lse},
                              call.context);
}

/// In a shape class every row is merged whether or not this launch has attended it: rows that it
/// has not must be empty. Otherwise only attended and masked rows are merged.
void AttentionRunner::clear_unused_slot(const Call& call) {
  if (!call.in_class()) return;
  backend_->clear_partial({.num_heads = config_.dims.num_heads,
                           .num_tokens = call.tokens(),
                           .lse = workspace_.chunk_lse},
                          call.context);
}

void AttentionRunner::attend_new_tokens(const Call& call, const NewTokenPiece& piece,
                                        int64_t row_begin, int64_t row_end) {
  if (!call.in_class() && piece.carried_items.size + piece.final_items.size == 0) return;
  const LayerParams& layer = call.layer;
  const bool discrete = config_.merge == MergeMode::kDiscrete;
  const ChunkCounts* const counts = call.block(piece.counts);
  const Count rows = call.count(row_end - row_begin, row_end - row_begin, &counts->rows);
  backend_->expand(expand_params(call, from_row(layer.kv_c, row_begin), rows), call.context);

  PrefillAttentionParams attention =
      attention_params(call, from_row(layer.k_pe, row_begin), rows.capacity);
  attention.max_q_len = call.in_class() ? static_cast<int32_t>(call.rows()) : piece.max_query_len;
  attention.max_k_len = call.in_class() ? static_cast<int32_t>(rows.capacity) : piece.max_seq_len;

  const bool may_carry = call.in_class() ? row_end < call.rows() : piece.carried_items.size > 0;
  if (may_carry) {
    if (discrete) clear_unused_slot(call);
    attention.items = call.block(piece.carried_items);
    attention.num_items = call.count(piece.carried_items.size, 1, &counts->items);
    attend_into(attention, call, config_.merge);
    if (discrete) merge_carried(call, piece);
  }

  attention.items = call.block(piece.final_items);
  attention.num_items =
      call.count(piece.final_items.size, call.request_capacity(), &counts->final_items);
  if (discrete && call.has_partial()) {
    attend_into(attention, call, MergeMode::kDiscrete);
    const int64_t out_begin = call.in_class() ? row_begin : piece.out_row_begin;
    const Count out_rows = call.in_class() ? rows : Count{piece.out_row_end - piece.out_row_begin};
    merge(call, out_begin, out_rows, from_row(workspace_.chunk_out, out_begin),
          from_row(workspace_.chunk_lse, out_begin), from_row(layer.out, out_begin),
          from_row(layer.lse, out_begin));
    return;
  }
  if (call.has_partial()) {
    attention.prefix_out = as_const(call.partial_out);
    attention.prefix_lse = as_const(call.partial_lse);
  } else {
    attention.prefix_out = {};
    attention.prefix_lse = {};
  }
  attention.out = layer.out;
  attention.lse = layer.lse;
  backend_->prefill_attention(attention, call.context);
}

void AttentionRunner::merge_carried(const Call& call, const NewTokenPiece& piece) {
  if (call.in_class()) {
    merge_rows(call, 0, call.tokens());
    return;
  }
  for (const AttentionItem& item : call.plan().host(piece.carried_items)) {
    merge_rows(call, item.out_row, {item.q_len});
  }
}

/// The class's last request has the rows past T and no context, so masking it empties them.
void AttentionRunner::clear_padding(const Call& call) {
  const int32_t last = call.request_capacity();
  backend_->mask_empty_context(
      {.num_heads = config_.dims.num_heads,
       .head_dim = config_.dims.v_head_dim,
       .query_start_loc = call.block(call.plan().query_start_loc()) + last,
       .context_start_loc = call.block(call.plan().context_start_loc()) + last,
       .num_requests = {1},
       .max_query_len = static_cast<int32_t>(call.rows()),
       .output = call.layer.out,
       .lse = call.layer.lse.data != nullptr ? call.layer.lse : workspace_.partial_lse},
      call.context);
}

}  // namespace mla
