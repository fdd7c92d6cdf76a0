// Everything that a plan promises, checked token by token.
//
// Shares no arithmetic with metadata/: where a token lives is found by walking the tokens, never by
// a closed form.
#ifndef TESTS_METADATA_PLAN_CHECKER_H_
#define TESTS_METADATA_PLAN_CHECKER_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "metadata/batch.h"
#include "metadata/error.h"
#include "metadata/plan.h"

namespace mla {

/// A batch that owns its arrays.
struct OwnedBatch {
  std::vector<int32_t> query_start_loc = {0};
  std::vector<int32_t> context_lens;

  OwnedBatch(const std::vector<int32_t>& query_lens, std::vector<int32_t> contexts);
  Batch view() const { return {query_start_loc, context_lens}; }
};
/// One new token a request.
OwnedBatch one_token_each(const std::vector<int32_t>& context_lens);

/// DeepSeek-V3 dims, one rank, packed, expand path.
PlanConfig make_config(int32_t workspace_tokens, int32_t page_size,
                       Schedule schedule = Schedule::kPacked);

/// The plan of every rank of config.shard.world.
std::vector<StepPlan> build_all_ranks(PlanConfig config, const OwnedBatch& batch);

/// Global positions [begin, end) of one request in one chunk.
struct GlobalSpan {
  int32_t request;
  int32_t begin;
  int32_t end;
  bool operator==(const GlobalSpan&) const = default;
};
inline void PrintTo(const GlobalSpan& span, std::ostream* out) {
  *out << span.request << ": [" << span.begin << ", " << span.end << ")";
}
/// A plan's chunks as non-empty spans; `plans` are those of all ranks.
std::vector<std::vector<GlobalSpan>> spans_of(std::span<const StepPlan> plans);

/// Fails the running test for every promise that the plans of all ranks break.
void check_plans(std::span<const StepPlan> plans, const OwnedBatch& batch);

/// Runs `call`, expects an error of `code` and returns its message.
template <typename Call>
std::string error_of(ErrorCode code, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

}  // namespace mla

#endif  // TESTS_METADATA_PLAN_CHECKER_H_
