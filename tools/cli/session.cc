#include "tools/cli/session.h"

#include <algorithm>

#include "metadata/error.h"
#include "tools/cli/device.h"
#include "tools/cli/verify.h"

namespace mla::cli {
namespace {

constexpr int64_t kFillRows = 4096;  // of a prefix, written at a time

/// Buffers are never empty, so that views of an empty batch have an address.
size_t bytes_of(int64_t rows, int64_t columns, int64_t element_bytes) {
  return static_cast<size_t>(std::max<int64_t>(rows, 1) * columns * element_bytes);
}

ScratchLimits op_limits(const ModelDims& dims) {
  return {.dims = dims, .max_query_tokens = kFillRows, .max_rows = kFillRows, .max_requests = 1};
}

size_t session_workspace_bytes(const EngineConfig& config, const Backend& backend,
                               const GroupMember* member) {
  return member == nullptr ? workspace_bytes(config, backend)
                           : parallel_layout(config, member->config, backend).total;
}

double needed_bytes(const Options& options, const Workload& workload, const EngineConfig& config,
                    const Backend& backend, const Executor& executor, const GroupMember* member) {
  const ModelDims& dims = config.dims;
  const double heads = dims.num_heads;
  const double tokens = config.max_query_tokens;
  const double cache = static_cast<double>(workload.num_pages(config.page_size)) *
                       config.page_size * kv_cache_row_bytes(config.kv_cache_format, dims);
  const double weights = heads * dims.kv_head_dim() * dims.kv_lora_rank * 2;
  const double io =
      tokens * (heads * (dims.qk_head_dim() * 2 + dims.v_head_dim * 2 + 4) + dims.latent_dim() * 2);
  // Inputs stand on host and device; filling the caches takes as much scratch as the engine.
  const double rank = static_cast<double>(session_workspace_bytes(config, backend, member)) +
                      static_cast<double>(backend.scratch_bytes(op_limits(dims))) +
                      options.num_layers * (cache + weights) + weights + 2 * io;
  const double oracle = options.verify ? verify_bytes(workload, dims, executor.num_workers()) : 0;
  return rank * options.cp.world + oracle;
}

EngineConfig checked_config(const Options& options, const Workload& workload,
                            const Backend& backend, const Executor& executor,
                            const GroupMember* member) {
  EngineConfig config = engine_config(options, workload);
  check_memory(backend, needed_bytes(options, workload, config, backend, executor, member));
  return config;
}

}  // namespace

EngineConfig engine_config(const Options& options, const Workload& workload) {
  EngineConfig config = options.config;
  config.max_query_tokens = std::max(workload.max_query_tokens, 1);
  config.max_requests = std::max(workload.max_requests, 1);
  return config;
}

ParallelConfig parallel_config(const Options& options, int32_t rank) {
  ParallelConfig config;
  config.shard = {.world = options.cp.world, .rank = rank, .interleave = options.cp.interleave};
  config.placement = find_cache_placement(options.cp.placement);
  config.queries = find_query_placement(options.cp.queries);
  config.strategy = find_strategy_policy(options.cp.strategy);
  config.rates = options.cp.rates;
  return config;
}

Session::Session(const Options& options, const Workload& workload, Backend& backend,
                 Executor& executor, bool poison, const GroupMember* member)
    : backend_(backend),
      executor_(executor),
      member_(member),
      config_(checked_config(options, workload, backend, executor, member)),
      num_layers_(options.num_layers),
      num_pages_(static_cast<int32_t>(std::max<int64_t>(workload.num_pages(config_.page_size), 1))),
      values_(options.seed, config_.dims),
      pages_(num_pages_, config_.page_size),
      workspace_(backend, session_workspace_bytes(config_, backend, member)),
      op_scratch_(backend, backend.scratch_bytes(op_limits(config_.dims))),
      weights_(backend, layer_weight_bytes() * num_layers_),
      q_(backend, bytes_of(config_.max_query_tokens,
                           int64_t{config_.dims.num_heads} * config_.dims.qk_head_dim(), 2)),
      latent_(backend, bytes_of(std::max<int64_t>(config_.max_query_tokens, kFillRows),
                                config_.dims.latent_dim(), 2)),
      out_(backend, bytes_of(config_.max_query_tokens,
                             int64_t{config_.dims.num_heads} * config_.dims.v_head_dim, 2)),
      lse_(backend, bytes_of(config_.max_query_tokens, config_.dims.num_heads, 4)),
      slots_(backend, bytes_of(std::max<int64_t>(config_.max_query_tokens, kFillRows), 1, 8)),
      expand_latent_(backend, bytes_of(kMaxExpandRows, config_.dims.latent_dim(), 2)),
      expand_out_(backend,
                  bytes_of(kMaxExpandRows,
                           int64_t{config_.dims.num_heads} * config_.dims.kv_head_dim(), 2)),
      cache_(backend, config_.dims, config_.kv_cache_format, options.kv_cache_scale, num_pages_,
             config_.page_size, num_layers_) {
  if (member == nullptr) {
    engine_.emplace(config_, backend, workspace_.span());
  } else {
    parallel_.emplace(config_, member->config, backend, member->communicator, workspace_.span());
  }
  // All bits set is NaN in every format that these buffers hold.
  if (poison) backend_.fill_bytes(workspace_.data(), 0xff, workspace_.bytes(), stream_);
  load_weights();
  fill_prefixes(workload);
}

size_t Session::layer_weight_bytes() const {
  return bytes_of(int64_t{config_.dims.num_heads} * config_.dims.kv_head_dim(),
                  config_.dims.kv_lora_rank, 2);
}

const void* Session::weights(int32_t layer) const {
  return weights_.span().subspan(layer_weight_bytes() * layer).data();
}

void Session::load_weights() {
  const int64_t rows = int64_t{config_.dims.num_heads} * config_.dims.kv_head_dim();
  const int64_t columns = config_.dims.kv_lora_rank;
  std::vector<uint16_t> host(static_cast<size_t>(rows * columns));
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    executor_.parallel_for(rows, [&](int64_t row, int) {
      values_.weight_row(layer, row, std::span(host).subspan(row * columns, columns));
    });
    std::byte* const device = weights_.span().subspan(layer_weight_bytes() * layer).data();
    backend_.copy_to_device(device, host.data(), host.size() * 2, stream_);
    backend_.synchronize(stream_);  // the next layer reuses `host`
  }
}

/// Negative for a token that another rank stores.
int64_t Session::slot_of(int32_t id, int32_t position) const {
  if (member_ == nullptr || member_->config.placement == CachePlacement::kReplicated) {
    return pages_.slot(id, position);
  }
  const ContextShard& shard = member_->config.shard;
  if (owner_rank(position, shard) != shard.rank) return -1;
  return pages_.slot(id, local_position(position, shard));
}

void Session::fill_prefixes(const Workload& workload) {
  const int64_t columns = config_.dims.latent_dim();
  std::vector<uint16_t> rows;
  std::vector<int64_t> slots;
  for (const PrefillRequest& request : workload.requests) {
    const int32_t id = pages_.add();
    pages_.grow(id, request.prefix_len + request.prompt_len);
    for (int64_t begin = 0; begin < request.prefix_len; begin += kFillRows) {
      const int64_t count = std::min(kFillRows, request.prefix_len - begin);
      slots.resize(count);
      for (int64_t i = 0; i < count; ++i) {
        slots[i] = slot_of(id, static_cast<int32_t>(begin + i));
      }
      backend_.copy_to_device(slots_.data(), slots.data(), count * sizeof(int64_t), stream_);
      rows.resize(count * columns);
      for (int32_t layer = 0; layer < num_layers_; ++layer) {
        executor_.parallel_for(count, [&](int64_t i, int) {
          values_.latent_row(layer, id, begin + i, std::span(rows).subspan(i * columns, columns));
        });
        backend_.copy_to_device(latent_.data(), rows.data(), rows.size() * 2, stream_);
        const LayerParams params = layer_params(layer);
        backend_.write_latent_cache({.kv_lora_rank = config_.dims.kv_lora_rank,
                                     .qk_rope_head_dim = config_.dims.qk_rope_head_dim,
                                     .kv_c = params.kv_c,
                                     .k_pe = params.k_pe,
                                     .slot_mapping = static_cast<const int64_t*>(slots_.data()),
                                     .num_tokens = {count},
                                     .kv_cache = params.kv_cache},
                                    {stream_, op_scratch_.span()});
        backend_.synchronize(stream_);  // `rows` and `slots` are used again
      }
    }
  }
}

LayerParams Session::layer_params(int32_t layer) const {
  const ModelDims& dims = config_.dims;
  const int64_t qk = dims.qk_head_dim();
  const int64_t heads = dims.num_heads;
  const auto* const latent = static_cast<const uint16_t*>(latent_.data());
  return {.q = {q_.data(), DType::kBFloat16, heads * qk, qk},
          .kv_c = {latent, DType::kBFloat16, dims.latent_dim()},
          .k_pe = {latent + dims.kv_lora_rank, DType::kBFloat16, dims.latent_dim()},
          .kv_b_proj = weights(layer),
          .kv_cache = cache_.layer(layer),
          .out = {out_.data(), DType::kBFloat16, heads * dims.v_head_dim, dims.v_head_dim},
          .lse = {static_cast<float*>(lse_.data()), config_.max_query_tokens, 1}};
}

void Session::begin_step(const Step& step) {
  step_ = step;
  const StepBatch batch(step);
  std::vector<int32_t> ids;
  host_slots_.clear();
  for (const ScheduledRequest& request : step) {
    ids.push_back(request.id);
    for (int32_t i = 0; i < request.query_len; ++i) {
      host_slots_.push_back(slot_of(request.id, request.context_len + i));
    }
  }
  backend_.copy_to_device(slots_.data(), host_slots_.data(), host_slots_.size() * sizeof(int64_t),
                          stream_);
  StepInputs inputs;
  inputs.batch = batch.batch();
  inputs.num_pages = num_pages_;
  inputs.host_block_table = pages_.block_table(ids, table_storage_);
  inputs.reject_duplicate_pages = true;
  inputs.slot_mapping = static_cast<const int64_t*>(slots_.data());
  inputs.host_slot_mapping = host_slots_;
  if (member_ == nullptr) {
    engine_->begin_step(inputs, stream_);
    return;
  }
  parallel_->begin_step(inputs, stream_);
  split_rows_.clear();
  if (member_->config.queries == QueryPlacement::kSplit) set_split_rows(inputs.batch);
}

void Session::set_split_rows(const Batch& batch) {
  for (int32_t rank = 0; rank < member_->config.shard.world; ++rank) {
    std::vector<int32_t>& rows = split_rows_.emplace_back();
    for (const QueryRows& part : split_queries(batch, member_->config.shard.world, rank)) {
      for (int32_t i = 0; i < part.length; ++i) {
        rows.push_back(batch.query_start_loc[part.request] + part.position + i);
      }
    }
  }
}

/// Rows of the step, or this rank's of them.
void Session::copy_rows_to_device(const DeviceBuffer& buffer, const std::vector<uint16_t>& rows,
                                  int64_t columns) {
  std::vector<uint16_t> own;
  if (!split_rows_.empty()) {
    for (const int64_t row : split_rows_[member_->config.shard.rank]) {
      own.insert(own.end(), rows.begin() + row * columns, rows.begin() + (row + 1) * columns);
    }
  }
  const std::vector<uint16_t>& copied = split_rows_.empty() ? rows : own;
  backend_.copy_to_device(buffer.data(), copied.data(), copied.size() * 2, stream_);
  backend_.synchronize(stream_);
}

void Session::load_layer(int32_t layer) {
  const int64_t q_columns = int64_t{config_.dims.num_heads} * config_.dims.qk_head_dim();
  const int64_t latent_columns = config_.dims.latent_dim();
  const int64_t tokens = plan().num_query_tokens();
  host_.q.resize(tokens * q_columns);
  host_.latent.resize(tokens * latent_columns);
  int64_t row = 0;
  for (const ScheduledRequest& request : step_) {
    executor_.parallel_for(request.query_len, [&](int64_t i, int) {
      const int64_t position = request.context_len + i;
      values_.query_row(layer, request.id, position,
                        std::span(host_.q).subspan((row + i) * q_columns, q_columns));
      values_.latent_row(
          layer, request.id, position,
          std::span(host_.latent).subspan((row + i) * latent_columns, latent_columns));
    });
    row += request.query_len;
  }
  copy_rows_to_device(q_, host_.q, q_columns);
  copy_rows_to_device(latent_, host_.latent, latent_columns);
  backend_.fill_bytes(out_.data(), 0xff, out_.bytes(), stream_);
  backend_.fill_bytes(lse_.data(), 0xff, lse_.bytes(), stream_);
  backend_.synchronize(stream_);
}

void Session::enqueue_layer(int32_t layer) {
  if (member_ == nullptr) {
    engine_->run_layer(layer_params(layer), stream_);
  } else {
    parallel_->run_layer(layer_params(layer), stream_);
  }
}

void Session::run_layer(int32_t layer) {
  enqueue_layer(layer);
  member_ == nullptr ? synchronize() : parallel_->wait(stream_);
}

const HostLayer& Session::fetch_layer() {
  const int64_t tokens = plan().num_query_tokens();
  const int64_t heads = config_.dims.num_heads;
  const int64_t lse_stride = config_.max_query_tokens;
  host_.out.resize(tokens * heads * config_.dims.v_head_dim);
  std::vector<float> lse(heads * lse_stride);
  backend_.copy_to_host(host_.out.data(), out_.data(), host_.out.size() * 2, stream_);
  backend_.copy_to_host(lse.data(), lse_.data(), lse.size() * sizeof(float), stream_);
  backend_.synchronize(stream_);
  host_.lse.resize(heads * tokens);
  for (int64_t h = 0; h < heads; ++h) {
    std::copy_n(lse.begin() + h * lse_stride, tokens, host_.lse.begin() + h * tokens);
  }
  if (!split_rows_.empty()) exchange_outputs();
  return host_;
}

/// From this rank's rows, which stand first, to those of all ranks in their places.
void Session::exchange_outputs() {
  const auto tokens = static_cast<size_t>(plan().num_query_tokens());
  const auto heads = static_cast<size_t>(config_.dims.num_heads);
  const size_t columns = heads * static_cast<size_t>(config_.dims.v_head_dim);
  std::vector<uint16_t> outs(host_.out.size() * split_rows_.size());
  std::vector<float> lses(host_.lse.size() * split_rows_.size());
  Communicator& communicator = member_->communicator;
  communicator.exchange_host(std::as_bytes(std::span(host_.out)),
                             std::as_writable_bytes(std::span(outs)));
  communicator.exchange_host(std::as_bytes(std::span(host_.lse)),
                             std::as_writable_bytes(std::span(lses)));
  for (size_t rank = 0; rank < split_rows_.size(); ++rank) {
    for (size_t i = 0; i < split_rows_[rank].size(); ++i) {
      const auto row = static_cast<size_t>(split_rows_[rank][i]);
      std::copy_n(outs.begin() + (rank * tokens + i) * columns, columns,
                  host_.out.begin() + row * columns);
      for (size_t h = 0; h < heads; ++h) {
        host_.lse[h * tokens + row] = lses[(rank * heads + h) * tokens + i];
      }
    }
  }
}

std::vector<uint16_t> Session::expand_rows(int32_t layer, std::span<const uint16_t> latent) {
  const ModelDims& dims = config_.dims;
  const int64_t columns = int64_t{dims.num_heads} * dims.kv_head_dim();
  const auto rows = static_cast<int64_t>(latent.size()) / dims.latent_dim();
  backend_.copy_to_device(expand_latent_.data(), latent.data(), latent.size() * 2, stream_);
  backend_.fill_bytes(expand_out_.data(), 0xff, expand_out_.bytes(), stream_);
  backend_.expand({.dims = dims,
                   .latent = {expand_latent_.data(), DType::kBFloat16, dims.latent_dim()},
                   .kv_b_proj = weights(layer),
                   .expanded = {expand_out_.data(), DType::kBFloat16, columns},
                   .num_rows = {rows}},
                  {stream_, op_scratch_.span()});
  std::vector<uint16_t> expanded(rows * columns);
  backend_.copy_to_host(expanded.data(), expand_out_.data(), expanded.size() * 2, stream_);
  backend_.synchronize(stream_);
  return expanded;
}

}  // namespace mla::cli
