#include "engine/parallel_runner.h"

#include <algorithm>
#include <limits>

#include "engine/carver.h"
#include "engine/views.h"
#include "metadata/error.h"

namespace mla {
namespace {

bool may_gather_rows(const ParallelConfig& parallel) {
  return parallel.placement == CachePlacement::kSharded &&
         parallel.strategy != StrategyPolicy::kMergePartials;
}
bool may_merge(const ParallelConfig& parallel) {
  return parallel.strategy != StrategyPolicy::kGatherKv;
}
bool split(const ParallelConfig& parallel) { return parallel.queries == QueryPlacement::kSplit; }

/// The most that RankPlan::block_rows can be where blocks are exchanged.
int64_t max_block_rows(const EngineConfig& config, const ParallelConfig& parallel) {
  const int64_t tokens = config.max_query_tokens;
  const int64_t world = parallel.shard.world;
  return split(parallel) ? max_split_rows(config.max_query_tokens, parallel.shard.world)
                         : (tokens + world - 1) / world;
}

int64_t max_exchange_rows(const EngineConfig& config, const ParallelConfig& parallel) {
  return parallel.shard.world * max_block_rows(config, parallel);
}

/// Rows of the partials that arrive: E, or all of each rank's where those are small or the schedule
/// is fixed. A second block is where results are collected before they are gathered.
int64_t max_received_rows(const EngineConfig& config, const ParallelConfig& parallel) {
  const int64_t blocks = std::max(parallel.shard.world, 2) * max_block_rows(config, parallel);
  if (split(parallel)) return blocks;
  const ModelDims& dims = config.dims;
  const int64_t row_bytes = int64_t{dims.num_heads} * (dims.v_head_dim + 1) * 4;
  const int64_t whole = int64_t{parallel.shard.world} * config.max_query_tokens;
  if (config.schedule == Schedule::kFixed) return std::max(blocks, whole);
  return std::max(blocks, std::min(parallel.small_exchange_bytes / row_bytes, whole));
}

/// AttentionRunner's config: its partial holds what is exchanged, its items are of query pieces.
EngineConfig base_config(const EngineConfig& config, const ParallelConfig& parallel) {
  validate_parallel_config(parallel);
  if (config.shape_class.enabled()) {
    throw_error(ErrorCode::kUnsupported, "no shape class is served under context parallelism");
  }
  if (config.path == PathPolicy::kAbsorb) {
    throw_error(ErrorCode::kUnsupported,
                "the absorb path is not served under context parallelism: use expand or auto");
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t rows =
      std::max<int64_t>(config.max_query_tokens, max_exchange_rows(config, parallel));
  const int64_t items = int64_t{config.max_requests} * std::max(parallel.shard.world, 2);
  if (rows > kMost || items > kMost) {
    throw_error(ErrorCode::kInvalidArgument,
                "max_query_tokens {} and max_requests {} are too many for {} ranks",
                config.max_query_tokens, config.max_requests, parallel.shard.world);
  }
  EngineConfig base = config;
  base.path = PathPolicy::kExpand;
  base.shard = {};
  base.max_query_tokens = static_cast<int32_t>(rows);
  base.max_requests = static_cast<int32_t>(items);
  return base;
}

/// Stored rows as the ops see them that copy them unread: bf16 rows of as many bytes. (They are
/// multiples of 16 bytes wherever rows travel.)
constexpr int32_t kCopiedRope = 8;
int32_t copied_latent(size_t row_bytes) {
  return static_cast<int32_t>(row_bytes / 2) - kCopiedRope;
}

/// Rows of their own, one a page.
LatentCache row_cache(std::byte* rows, KvCacheFormat format, float scale, int64_t count,
                      size_t row_bytes) {
  return {rows, format, scale, static_cast<int32_t>(count), 1, static_cast<int64_t>(row_bytes)};
}

}  // namespace

ParallelLayout parallel_layout(const EngineConfig& config, const ParallelConfig& parallel,
                               const Backend& backend) {
  ParallelLayout layout;
  layout.base = workspace_layout(base_config(config, parallel), backend);
  const ModelDims& dims = config.dims;
  const auto world = static_cast<size_t>(parallel.shard.world);
  const auto heads = static_cast<size_t>(dims.num_heads);
  const auto rows = static_cast<size_t>(max_exchange_rows(config, parallel));
  const size_t latent_bytes = static_cast<size_t>(dims.latent_dim()) * 2;
  if (may_gather_rows(parallel)) {
    layout.gathered = world * static_cast<size_t>(config.workspace_tokens) *
                      static_cast<size_t>(kv_cache_row_bytes(config.kv_cache_format, dims));
  }
  if (split(parallel)) {
    layout.gathered = std::max(layout.gathered, rows * latent_bytes);
    layout.new_tokens = align_part(static_cast<size_t>(config.max_query_tokens) * latent_bytes);
    if (may_merge(parallel)) {
      layout.queries = align_part(rows * heads * static_cast<size_t>(dims.qk_head_dim()) * 2);
    }
  }
  layout.gathered = align_part(layout.gathered);
  if (may_merge(parallel)) {
    const auto received = static_cast<size_t>(max_received_rows(config, parallel));
    layout.received_out =
        align_part(received * heads * static_cast<size_t>(dims.v_head_dim) * sizeof(float));
    layout.received_lse = align_part(received * heads * sizeof(float));
  }
  layout.total = layout.base.total + layout.gathered + layout.new_tokens + layout.queries +
                 layout.received_out + layout.received_lse;
  return layout;
}

ParallelRunner::ParallelRunner(const EngineConfig& config, const ParallelConfig& parallel,
                               Backend& backend, Communicator& communicator,
                               std::span<std::byte> workspace)
    : AttentionRunner(base_config(config, parallel), backend, workspace),
      parallel_(parallel),
      communicator_(&communicator) {
  if (communicator.rank() != parallel.shard.rank || communicator.size() != parallel.shard.world) {
    throw_error(ErrorCode::kInvalidArgument,
                "the communicator is rank {} of {}, the config says {} of {}", communicator.rank(),
                communicator.size(), parallel.shard.rank, parallel.shard.world);
  }
  const ParallelLayout layout = parallel_layout(config, parallel, backend);
  if (workspace.size() < layout.total) {
    throw_error(ErrorCode::kInvalidArgument, "the workspace has {} bytes, this config needs {}",
                workspace.size(), layout.total);
  }
  Carver carver(workspace.subspan(layout.base.total));
  gathered_ = carver.take(layout.gathered).data();
  new_tokens_ = carver.take(layout.new_tokens).data();
  queries_ = carver.take(layout.queries).data();
  received_out_ = carver.take(layout.received_out).data();
  received_lse_ = reinterpret_cast<float*>(carver.take(layout.received_lse).data());
}

void ParallelRunner::run_layer(const DevicePlan& step, const RankPlan& plan,
                               const LayerParams& layer, Stream stream) {
  Call call = make_call(step, layer, stream);
  if (split(parallel_)) call.q_rows = plan.plan.num_out_rows();
  validate_call(call);
  if (split(parallel_)) validate_split(plan, layer);
  if (plan.plan.num_query_tokens() == 0) return;

  if (split(parallel_)) assemble_new_tokens(plan, call);
  write_cache(call);
  if (plan.exchanges_partials) {
    attend_and_merge_context(plan, call);
  } else {
    attend_context(plan, call, plan.plan.num_out_rows());
  }

  const bool shared_out = !split(parallel_) && !plan.every_rank_finishes;
  Partials results;
  if (shared_out) {
    // The second block that has arrived is merged and free.
    results =
        partials_from(partials(received_out_, received_lse_, DType::kFloat32), plan.block_rows);
    results =
        partials(static_cast<std::byte*>(results.out.data), results.lse.data, layer.out.dtype);
    call.layer.out = results.out;
    call.layer.lse = results.lse;
  }
  for (const NewTokenPiece& piece : plan.plan.new_token_pieces()) {
    attend_new_tokens(call, piece, piece.row_begin, piece.row_end);
  }
  if (shared_out) gather_results(plan, call, results, layer);
}

/// The queries go out as they lie there.
void ParallelRunner::validate_split(const RankPlan& plan, const LayerParams& layer) const {
  if (!plan.exchanges_partials) return;
  const int64_t dim = config_.dims.qk_head_dim();
  if (layer.q.head_stride != dim || layer.q.row_stride != config_.dims.num_heads * dim) {
    throw_error(ErrorCode::kInvalidArgument,
                "split queries have row stride {} and head stride {}; merge_partials sends them as "
                "they are, and needs {} and {}",
                layer.q.row_stride, layer.q.head_stride, config_.dims.num_heads * dim, dim);
  }
}

ParallelRunner::Partials ParallelRunner::partials(std::byte* out, float* lse, DType dtype) const {
  const int64_t heads = config_.dims.num_heads;
  const int64_t dim = config_.dims.v_head_dim;
  return {{out, dtype, heads * dim, dim}, {lse, 1, heads}};
}

ParallelRunner::Partials ParallelRunner::partials_from(const Partials& view, int64_t row) const {
  return {from_row(view.out, row), from_row(view.lse, row)};
}

/// Every rank packs its rows into its block; all blocks, in the order of the plan, are the new
/// tokens as a rank without split queries is given them.
void ParallelRunner::assemble_new_tokens(const RankPlan& plan, Call& call) {
  const RowAssembly& assembly = plan.plan.new_token_assembly();
  const int64_t latent = config_.dims.latent_dim();
  const size_t row_bytes = static_cast<size_t>(latent) * 2;
  const int64_t padded = assembly.padded_rows;
  std::byte* const own = gathered_ + static_cast<size_t>(parallel_.shard.rank * padded) * row_bytes;
  backend_->write_latent_cache(
      {.kv_lora_rank = config_.dims.kv_lora_rank,
       .qk_rope_head_dim = config_.dims.qk_rope_head_dim,
       .kv_c = call.layer.kv_c,
       .k_pe = call.layer.k_pe,
       .slot_mapping = call.block(plan.plan.packing_slots()),
       .num_tokens = {plan.plan.num_out_rows()},
       .kv_cache = row_cache(own, KvCacheFormat::kBf16, 1.0f, padded, row_bytes)},
      call.context);
  const Rows target{new_tokens_, DType::kBFloat16, latent};
  assemble_rows(
      call, assembly, plan.plan.num_query_tokens(), row_bytes,
      row_cache(gathered_, KvCacheFormat::kBf16, 1.0f, parallel_.shard.world * padded, row_bytes),
      target);
  call.layer.kv_c = as_const(target);
  call.layer.k_pe = from_column(as_const(target), config_.dims.kv_lora_rank);
}

void ParallelRunner::assemble_chunk(const RankPlan& plan, const Call& call, const Chunk& chunk) {
  const auto row_bytes = static_cast<size_t>(plan.stored_row_bytes);
  const int64_t padded = chunk.assembly.padded_rows;
  const LatentCache& cache = call.layer.kv_cache;
  if (chunk.stored_rows > 0) {
    GatherLatentParams stored = gather_params(call, chunk);
    stored.kv_lora_rank = copied_latent(row_bytes);
    stored.qk_rope_head_dim = kCopiedRope;
    stored.kv_cache.format = KvCacheFormat::kBf16;
    stored.starts = call.block(chunk.stored_starts);
    stored.cu_seq_lens = call.block(chunk.stored_cu_seq_lens);
    stored.num_rows = {chunk.stored_rows};
    stored.latent = {gathered_ + static_cast<size_t>(parallel_.shard.rank * padded) * row_bytes,
                     DType::kBFloat16, static_cast<int64_t>(row_bytes) / 2};
    backend_->gather_latent(stored, call.context);
  }
  assemble_rows(
      call, chunk.assembly, chunk.seq_tot, row_bytes,
      row_cache(gathered_, cache.format, cache.scale, parallel_.shard.world * padded, row_bytes),
      workspace_.latent);
}

/// Gathers the blocks of `stored` and reads their rows in the plan's order.
void ParallelRunner::assemble_rows(const Call& call, const RowAssembly& assembly, int64_t rows,
                                   size_t row_bytes, LatentCache stored, Rows target) {
  const size_t block_bytes = static_cast<size_t>(assembly.padded_rows) * row_bytes;
  communicator_->all_gather(gathered_ + static_cast<size_t>(parallel_.shard.rank) * block_bytes,
                            gathered_, block_bytes, call.context.stream);
  const int32_t* const bounds = call.block(assembly.bounds);
  backend_->gather_latent({.kv_lora_rank = config_.dims.kv_lora_rank,
                           .qk_rope_head_dim = config_.dims.qk_rope_head_dim,
                           .kv_cache = as_const(stored),
                           .block_table = call.block(assembly.sources),
                           .block_table_stride = rows,
                           .starts = bounds,
                           .cu_seq_lens = bounds + 1,
                           .num_spans = {1},
                           .num_rows = {rows},
                           .latent = target},
                          call.context);
}

/// `rows`: of the running partial.
void ParallelRunner::attend_context(const RankPlan& plan, const Call& call, int64_t rows) {
  if (call.has_partial()) clear_partial(call, {rows});
  for (const Chunk& chunk : plan.plan.chunks()) {
    if (chunk.assembly.padded_rows > 0) assemble_chunk(plan, call, chunk);
    attend_chunk(call, chunk);
  }
}

/// Attends the context with all queries; afterwards the call's partial is the merged one of the
/// rows that this rank finishes.
void ParallelRunner::attend_and_merge_context(const RankPlan& plan, Call& call) {
  const ModelDims& dims = config_.dims;
  const int64_t world = parallel_.shard.world;
  const int64_t block_rows = plan.block_rows;
  const Stream stream = call.context.stream;
  const auto row_heads = static_cast<size_t>(block_rows) * static_cast<size_t>(dims.num_heads);
  const size_t out_bytes = row_heads * static_cast<size_t>(dims.v_head_dim) * sizeof(float);
  const size_t lse_bytes = row_heads * sizeof(float);
  const Partials sent = partials(static_cast<std::byte*>(workspace_.partial_out.data),
                                 workspace_.partial_lse.data, DType::kFloat32);
  const Partials received = partials(received_out_, received_lse_, DType::kFloat32);

  Call all_queries = call;
  all_queries.partial_out = sent.out;
  all_queries.partial_lse = sent.lse;
  if (split(parallel_)) {
    communicator_->all_gather(call.layer.q.data, queries_,
                              row_heads * static_cast<size_t>(dims.qk_head_dim()) * 2, stream);
    all_queries.layer.q.data = queries_;
    all_queries.q_rows = world * block_rows;
  }
  attend_context(plan, all_queries, plan.every_rank_finishes ? block_rows : world * block_rows);

  if (plan.every_rank_finishes) {
    communicator_->all_gather(sent.out.data, received.out.data, out_bytes, stream);
    communicator_->all_gather(sent.lse.data, received.lse.data, lse_bytes, stream);
  } else {
    communicator_->all_to_all(sent.out.data, received.out.data, out_bytes, stream);
    communicator_->all_to_all(sent.lse.data, received.lse.data, lse_bytes, stream);
  }
  for (int64_t rank = 1; rank < world; ++rank) {
    const Partials block = partials_from(received, rank * block_rows);
    backend_->merge_attn_states({.num_heads = dims.num_heads,
                                 .head_dim = dims.v_head_dim,
                                 .num_tokens = {plan.plan.num_out_rows()},
                                 .prefix_out = as_const(received.out),
                                 .prefix_lse = as_const(received.lse),
                                 .suffix_out = as_const(block.out),
                                 .suffix_lse = as_const(block.lse),
                                 .output = received.out,
                                 .output_lse = received.lse},
                                call.context);
  }
  call.partial_out = received.out;
  call.partial_lse = received.lse;
}

/// The blocks of results are the rows in order. They arrive where the partials were sent from.
void ParallelRunner::gather_results(const RankPlan& plan, const Call& call, const Partials& results,
                                    const LayerParams& layer) {
  const ModelDims& dims = config_.dims;
  const auto row_heads = static_cast<size_t>(plan.block_rows) * static_cast<size_t>(dims.num_heads);
  const Partials all = partials(static_cast<std::byte*>(workspace_.partial_out.data),
                                workspace_.partial_lse.data, layer.out.dtype);
  const size_t row_bytes = static_cast<size_t>(dims.v_head_dim) * dtype_bytes(layer.out.dtype);
  communicator_->all_gather(results.out.data, all.out.data, row_heads * row_bytes,
                            call.context.stream);
  communicator_->all_gather(results.lse.data, all.lse.data, row_heads * sizeof(float),
                            call.context.stream);
  backend_->merge_attn_states({.num_heads = dims.num_heads,
                               .head_dim = dims.v_head_dim,
                               .num_tokens = {plan.plan.num_query_tokens()},
                               .prefix_tokens = 0,
                               .prefix_out = {},
                               .prefix_lse = {},
                               .suffix_out = as_const(all.out),
                               .suffix_lse = as_const(all.lse),
                               .output = layer.out,
                               .output_lse = layer.lse},
                              call.context);
}

}  // namespace mla
