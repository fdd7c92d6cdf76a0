// What a serving stack says of a step.
#ifndef ENGINE_STEP_INPUTS_H_
#define ENGINE_STEP_INPUTS_H_

#include <cstdint>
#include <span>

#include "engine/attention_runner.h"
#include "engine/config.h"
#include "kernels/backend.h"
#include "metadata/batch.h"
#include "metadata/plan.h"

namespace mla {

struct StepInputs {
  Batch batch;
  int32_t num_pages = 0;  // of the cache that every layer passes

  /// Either a table in host memory, whose used ids are always checked and which travels with the
  /// plan, or one in backend memory [R, *], whose ids are taken on trust.
  HostBlockTable host_block_table;
  const int32_t* device_block_table = nullptr;
  int64_t device_block_table_stride = 0;
  bool reject_duplicate_pages = false;  // within one request, host tables only

  const int64_t* slot_mapping = nullptr;       // [T] backend memory; null: cache not written
  std::span<const int64_t> host_slot_mapping;  // optional host copy, checked where given
};

/// Everything that can be refused of a step before it is planned, the shard's table among it.
/// Throws kInvalidArgument.
void validate_step_inputs(const EngineConfig& config, const StepInputs& step);

/// The step's arrays on the device, once its plan's block is there.
DevicePlan device_plan(const StepPlan& plan, const std::byte* block, const StepInputs& step);

}  // namespace mla

#endif  // ENGINE_STEP_INPUTS_H_
