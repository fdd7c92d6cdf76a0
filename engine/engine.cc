#include "engine/engine.h"

#include <algorithm>
#include <vector>

#include "metadata/context_parallel.h"
#include "metadata/error.h"

namespace mla {
namespace {

/// A host block that carries most steps without growing; a class says how large its blocks are.
size_t uploader_capacity(const EngineConfig& config, const Backend& backend) {
  if (config.shape_class.enabled()) {
    return static_cast<size_t>(plan_block_bytes(plan_config(config, backend), config.shape_class));
  }
  constexpr size_t kFixedBytes = 64 << 10;
  constexpr size_t kBytesPerRequest = 1 << 10;
  return kFixedBytes + kBytesPerRequest * std::min(config.max_requests, 1024);
}

void check_limits(const EngineConfig& config, const Batch& batch) {
  if (batch.num_requests() > config.max_requests) {
    throw_error(ErrorCode::kInvalidArgument, "the step has {} requests, max_requests is {}",
                batch.num_requests(), config.max_requests);
  }
  if (batch.num_query_tokens() > config.max_query_tokens) {
    throw_error(ErrorCode::kInvalidArgument, "the step has {} new tokens, max_query_tokens is {}",
                batch.num_query_tokens(), config.max_query_tokens);
  }
}

void check_block_table(const EngineConfig& config, const StepInputs& step) {
  const bool on_host = step.host_block_table.data != nullptr;
  if (on_host && step.device_block_table != nullptr) {
    throw_error(ErrorCode::kInvalidArgument,
                "a block table is given in host memory and one in backend memory: give one");
  }
  if (on_host) {
    // What of each context this rank's cache, and so its table, holds.
    std::span<const int32_t> local_lens = step.batch.context_lens;
    std::vector<int32_t> storage;
    if (config.shard.world > 1) {
      for (const int32_t len : local_lens) storage.push_back(local_length(len, config.shard));
      local_lens = storage;
    }
    validate_block_table(step.host_block_table, local_lens, config.page_size, step.num_pages,
                         step.reject_duplicate_pages);
    return;
  }
  const auto longest = std::ranges::max_element(step.batch.context_lens);
  if (longest == step.batch.context_lens.end() || *longest == 0) return;
  if (step.device_block_table == nullptr) {
    throw_error(ErrorCode::kInvalidArgument,
                "request {} has {} tokens of context, but there is no block table",
                longest - step.batch.context_lens.begin(), *longest);
  }
  const int64_t least =
      (int64_t{local_length(*longest, config.shard)} + config.page_size - 1) / config.page_size;
  if (step.device_block_table_stride < least) {
    throw_error(ErrorCode::kInvalidArgument,
                "device_block_table_stride is {}, the context of request {} takes {} pages",
                step.device_block_table_stride, longest - step.batch.context_lens.begin(), least);
  }
}

void check_slot_mapping(const EngineConfig& config, const StepInputs& step) {
  if (step.host_slot_mapping.empty()) return;
  if (step.host_slot_mapping.size() != static_cast<size_t>(step.batch.num_query_tokens())) {
    throw_error(ErrorCode::kInvalidArgument, "host_slot_mapping has {} slots for {} new tokens",
                step.host_slot_mapping.size(), step.batch.num_query_tokens());
  }
  validate_slot_mapping(step.host_slot_mapping, int64_t{step.num_pages} * config.page_size);
}

}  // namespace

Engine::Engine(const EngineConfig& config, Backend& backend, std::span<std::byte> workspace)
    : config_(config),
      backend_(&backend),
      runner_(config, backend, workspace),
      uploader_(backend.make_block_uploader(uploader_capacity(config, backend))) {}

Engine::~Engine() = default;

void Engine::begin_step(const StepInputs& step, Stream stream) {
  device_plan_ = {};
  validate_batch(step.batch);
  check_limits(config_, step.batch);
  if (step.num_pages < 0) {
    throw_error(ErrorCode::kInvalidArgument, "num_pages is {}, at least 0", step.num_pages);
  }
  check_block_table(config_, step);
  check_slot_mapping(config_, step);

  const bool table_on_host = step.host_block_table.data != nullptr;
  build_plan(plan_config(config_, *backend_), step.batch,
             table_on_host ? &step.host_block_table : nullptr, plan_, config_.shape_class);
  num_pages_ = step.num_pages;

  DevicePlan device_plan;
  device_plan.plan = &plan_;
  device_plan.block = uploader_->upload(plan_.block(), stream);
  // A class's block has room for the table in steps without context too.
  if (table_on_host || (step.device_block_table == nullptr && config_.shape_class.max_pages > 0)) {
    device_plan.block_table = block_pointer(device_plan.block, plan_.block_table());
    device_plan.block_table_stride = plan_.block_table_stride();
  } else {
    device_plan.block_table = step.device_block_table;
    device_plan.block_table_stride = step.device_block_table_stride;
  }
  device_plan.slot_mapping = step.slot_mapping;
  device_plan_ = device_plan;
}

void Engine::run_layer(const LayerParams& layer, Stream stream) {
  if (device_plan_.plan == nullptr) {
    throw_error(ErrorCode::kInvalidArgument,
                "run_layer without a step: the last begin_step failed, or there was none");
  }
  const bool launches = plan_.num_query_tokens() > 0 || config_.shape_class.enabled();
  const bool uses_cache =
      launches && (!plan_.chunk_slots().empty() || device_plan_.slot_mapping != nullptr);
  if (uses_cache && layer.kv_cache.num_pages != num_pages_) {
    throw_error(ErrorCode::kInvalidArgument, "the layer's cache has {} pages, the step's {}",
                layer.kv_cache.num_pages, num_pages_);
  }
  runner_.run_layer(device_plan_, layer, stream);
}

}  // namespace mla
