// Turns requests with long prompts into steps of bounded size (chunked prefill).
#ifndef ENGINE_STEP_SCHEDULER_H_
#define ENGINE_STEP_SCHEDULER_H_

#include <cstdint>
#include <deque>
#include <vector>

namespace mla {

/// A prompt to prefill: `prefix_len` tokens stand in the cache already, `prompt_len` are new.
struct PrefillRequest {
  int32_t id = 0;
  int32_t prefix_len = 0;
  int32_t prompt_len = 0;
};

/// What one request does in one step.
struct ScheduledRequest {
  int32_t id = 0;
  int32_t context_len = 0;  // tokens in the cache before the step: prefix and earlier steps
  int32_t query_len = 0;    // new tokens in this step
  bool last = false;        // the prompt is complete after this step
};

/// First come, first served: each step takes prompts in order until the token budget is spent; the
/// last one taken is cut, and goes on first in the next step with its own tokens as context.
class StepScheduler {
 public:
  /// Throws kInvalidArgument unless both limits are positive.
  StepScheduler(int32_t max_num_batched_tokens, int32_t max_num_requests);

  /// Throws kInvalidArgument for negative lengths or a sum above 2^31 - 1. A request without new
  /// tokens is scheduled once, with query_len 0.
  void add(const PrefillRequest& request);
  bool done() const { return waiting_.empty(); }
  /// Fills `step` (cleared first); empty only where done().
  void next_step(std::vector<ScheduledRequest>& step);

 private:
  int32_t max_num_batched_tokens_;
  int32_t max_num_requests_;
  std::deque<ScheduledRequest> waiting_;  // query_len: tokens still to do
};

}  // namespace mla

#endif  // ENGINE_STEP_SCHEDULER_H_
