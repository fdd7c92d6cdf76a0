#include "engine/parallel_engine.h"

#include <string>

#include "metadata/error.h"

namespace mla {
namespace {

/// What a rank that refuses the step shows in place of its plan's hash.
constexpr uint64_t kNoPlan = 0;

/// The cache that this rank's tables and slots are about.
EngineConfig local_config(EngineConfig config, const ParallelConfig& parallel) {
  const bool sharded = parallel.placement == CachePlacement::kSharded;
  config.shard = sharded ? parallel.shard : ContextShard{};
  return config;
}

constexpr size_t kPlanBytes = 256 << 10;  // most steps; the uploader grows

}  // namespace

ParallelEngine::ParallelEngine(const EngineConfig& config, const ParallelConfig& parallel,
                               Backend& backend, Communicator& communicator,
                               std::span<std::byte> workspace)
    : config_(local_config(config, parallel)),
      parallel_(parallel),
      communicator_(&communicator),
      runner_(config, parallel, backend, communicator, workspace),
      uploader_(backend.make_block_uploader(kPlanBytes)),
      plan_config_(plan_config(config_, backend)) {}

ParallelEngine::~ParallelEngine() = default;

void ParallelEngine::begin_step(const StepInputs& step, Stream stream) {
  device_plan_ = {};
  try {
    plan_step(step);
  } catch (...) {
    tell_refusal();
    throw;
  }
  compare_plan_hash(*communicator_, plan_.hash);
  num_pages_ = step.num_pages;
  device_plan_ = device_plan(plan_.plan, uploader_->upload(plan_.plan.block(), stream), step);
}

/// The others then need not wait to learn that this rank has no plan; its own error is what it
/// throws.
void ParallelEngine::tell_refusal() noexcept {
  try {
    compare_plan_hash(*communicator_, kNoPlan);
  } catch (const std::exception&) {
  }
}

void ParallelEngine::plan_step(const StepInputs& step) {
  validate_step_inputs(config_, step);
  const bool table_on_host = step.host_block_table.data != nullptr;
  build_rank_plan(parallel_, plan_config_, config_.kv_cache_format, step.batch,
                  table_on_host ? &step.host_block_table : nullptr, plan_);
}

void ParallelEngine::run_layer(const LayerParams& layer, Stream stream) {
  if (device_plan_.plan == nullptr) {
    throw_error(ErrorCode::kInvalidArgument,
                "run_layer without a step: the last begin_step failed, or there was none");
  }
  try {
    const bool uses_cache = !plan_.plan.chunks().empty() || device_plan_.slot_mapping != nullptr;
    if (uses_cache && layer.kv_cache.num_pages != num_pages_) {
      throw_error(ErrorCode::kInvalidArgument, "the layer's cache has {} pages, the step's {}",
                  layer.kv_cache.num_pages, num_pages_);
    }
    runner_.run_layer(device_plan_, plan_, layer, stream);
  } catch (const std::exception& error) {
    device_plan_ = {};
    communicator_->abort("rank " + std::to_string(parallel_.shard.rank) + ": " + error.what());
    throw;
  }
}

}  // namespace mla
