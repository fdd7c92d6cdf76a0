#include "engine/step_inputs.h"

#include <algorithm>
#include <vector>

#include "metadata/context_parallel.h"
#include "metadata/error.h"

namespace mla {
namespace {

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
  if (longest == step.batch.context_lens.end()) return;
  const int32_t longest_here = local_length(*longest, config.shard);
  if (longest_here == 0) return;
  if (step.device_block_table == nullptr) {
    throw_error(ErrorCode::kInvalidArgument,
                "request {} has {} tokens of context here, but there is no block table",
                longest - step.batch.context_lens.begin(), longest_here);
  }
  const int64_t least = (int64_t{longest_here} + config.page_size - 1) / config.page_size;
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

void validate_step_inputs(const EngineConfig& config, const StepInputs& step) {
  validate_batch(step.batch);
  check_limits(config, step.batch);
  if (step.num_pages < 0) {
    throw_error(ErrorCode::kInvalidArgument, "num_pages is {}, at least 0", step.num_pages);
  }
  check_block_table(config, step);
  check_slot_mapping(config, step);
}

DevicePlan device_plan(const StepPlan& plan, const std::byte* block, const StepInputs& step) {
  DevicePlan device{.plan = &plan, .block = block, .slot_mapping = step.slot_mapping};
  // A class's block has room for the table in steps without context too.
  if (step.host_block_table.data != nullptr ||
      (step.device_block_table == nullptr && plan.shape_class().max_pages > 0)) {
    device.block_table = block_pointer(block, plan.block_table());
    device.block_table_stride = plan.block_table_stride();
  } else {
    device.block_table = step.device_block_table;
    device.block_table_stride = step.device_block_table_stride;
  }
  return device;
}

}  // namespace mla
