// What holds for every plan, checked by brute force from the definitions.
#ifndef TESTS_METADATA_PLAN_CHECKER_H_
#define TESTS_METADATA_PLAN_CHECKER_H_

#include <cstdint>
#include <vector>

#include "metadata/plan.h"

namespace mla {

/// A batch that owns its arrays.
struct OwnedBatch {
  std::vector<int32_t> query_start_loc = {0};
  std::vector<int32_t> context_lens;

  OwnedBatch(const std::vector<int32_t>& query_lens, std::vector<int32_t> contexts);
  Batch view() const { return {query_start_loc, context_lens}; }
};

/// Fails the running test unless `plan`, of `batch`, has every context row of its rank exactly
/// once, in order, within W; items, ranges, offsets and flags that follow from the lengths; and
/// every (new token, earlier or equal new token) pair exactly once.
void check_plan(const StepPlan& plan, const OwnedBatch& batch);

}  // namespace mla

#endif  // TESTS_METADATA_PLAN_CHECKER_H_
