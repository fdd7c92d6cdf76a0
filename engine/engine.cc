#include "engine/engine.h"

#include <algorithm>

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

}  // namespace

Engine::Engine(const EngineConfig& config, Backend& backend, std::span<std::byte> workspace)
    : config_(config),
      backend_(&backend),
      runner_(config, backend, workspace),
      uploader_(backend.make_block_uploader(uploader_capacity(config, backend))) {
  if (config.shard.world > 1) {
    throw_error(ErrorCode::kUnsupported,
                "the cache is sharded over {} ranks: that is for a ParallelEngine",
                config.shard.world);
  }
}

Engine::~Engine() = default;

void Engine::begin_step(const StepInputs& step, Stream stream) {
  device_plan_ = {};
  validate_step_inputs(config_, step);
  const bool table_on_host = step.host_block_table.data != nullptr;
  build_plan(plan_config(config_, *backend_), step.batch,
             table_on_host ? &step.host_block_table : nullptr, plan_, config_.shape_class);
  num_pages_ = step.num_pages;
  device_plan_ = device_plan(plan_, uploader_->upload(plan_.block(), stream), step);
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
