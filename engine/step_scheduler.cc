#include "engine/step_scheduler.h"

#include <algorithm>
#include <limits>

#include "metadata/error.h"

namespace mla {

StepScheduler::StepScheduler(int32_t max_num_batched_tokens, int32_t max_num_requests)
    : max_num_batched_tokens_(max_num_batched_tokens), max_num_requests_(max_num_requests) {
  if (max_num_batched_tokens < 1) {
    throw_error(ErrorCode::kInvalidArgument, "max_num_batched_tokens is {}, at least 1",
                max_num_batched_tokens);
  }
  if (max_num_requests < 1) {
    throw_error(ErrorCode::kInvalidArgument, "max_num_requests is {}, at least 1",
                max_num_requests);
  }
}

void StepScheduler::add(const PrefillRequest& request) {
  if (request.prefix_len < 0 || request.prompt_len < 0) {
    throw_error(ErrorCode::kInvalidArgument,
                "request {} has prefix_len {} and prompt_len {}, both at least 0", request.id,
                request.prefix_len, request.prompt_len);
  }
  const int64_t total = int64_t{request.prefix_len} + request.prompt_len;
  if (total > std::numeric_limits<int32_t>::max()) {
    throw_error(ErrorCode::kInvalidArgument,
                "request {} has prefix_len + prompt_len = {}, at most 2^31 - 1", request.id, total);
  }
  waiting_.push_back({.id = request.id,
                      .context_len = request.prefix_len,
                      .query_len = request.prompt_len,
                      .last = false});
}

void StepScheduler::next_step(std::vector<ScheduledRequest>& step) {
  step.clear();
  int32_t budget = max_num_batched_tokens_;
  while (!waiting_.empty() && step.size() < static_cast<size_t>(max_num_requests_)) {
    ScheduledRequest& next = waiting_.front();
    const int32_t taken = std::min(next.query_len, budget);
    if (taken == 0 && next.query_len > 0) return;  // the budget is spent
    const bool last = taken == next.query_len;
    step.push_back(
        {.id = next.id, .context_len = next.context_len, .query_len = taken, .last = last});
    budget -= taken;
    if (last) {
      waiting_.pop_front();
    } else {
      next.context_len += taken;
      next.query_len -= taken;
      return;
    }
  }
}

}  // namespace mla
