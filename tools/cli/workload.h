// Synthetic requests: which tokens come in which step, and their values.
#ifndef TOOLS_CLI_WORKLOAD_H_
#define TOOLS_CLI_WORKLOAD_H_

#include <cstdint>
#include <span>
#include <vector>

#include "engine/step_scheduler.h"
#include "metadata/batch.h"
#include "metadata/model.h"
#include "tools/cli/options.h"

namespace mla::cli {

using Step = std::vector<ScheduledRequest>;

struct Workload {
  std::vector<PrefillRequest> requests;  // ids 0 to size - 1, in order
  std::vector<Step> steps;

  int32_t max_query_tokens = 0;  // of one step
  int32_t max_requests = 0;      // of one step
  int64_t num_query_tokens = 0;
  int64_t num_context_tokens = 0;  // summed over the steps

  /// Pages that hold every request in full.
  int64_t num_pages(int32_t page_size) const;
};

/// Throws kInvalidArgument where a length or a sum over one step does not fit.
Workload make_workload(const Options& options);

/// The step as the engine takes it; views of this object.
struct StepBatch {
  explicit StepBatch(const Step& step);
  Batch batch() const { return {query_start_loc, context_lens}; }

  std::vector<int32_t> query_start_loc;
  std::vector<int32_t> context_lens;
};

/// Normal random values in bf16. Each row is a function of the seed and its own place (layer,
/// request, position), not of steps or batches, so that a run's inputs can be made again anywhere.
class SyntheticValues {
 public:
  SyntheticValues(uint64_t seed, const ModelDims& dims);

  /// `row` [H * (P + Rr)]: unit variance.
  void query_row(int32_t layer, int32_t request, int64_t position, std::span<uint16_t> row) const;
  /// `row` [L + Rr]: unit variance.
  void latent_row(int32_t layer, int32_t request, int64_t position, std::span<uint16_t> row) const;
  /// `row` [L] of kv_b_proj: variance 1 / L, so that K and V have unit variance.
  void weight_row(int32_t layer, int64_t index, std::span<uint16_t> row) const;

 private:
  uint64_t seed_;
  std::vector<uint16_t> unit_;    // equally likely values of a normal distribution
  std::vector<uint16_t> weight_;  // the same by 1 / sqrt(L)
};

/// The value of bf16 bits.
float bf16_value(uint16_t bits);

}  // namespace mla::cli

#endif  // TOOLS_CLI_WORKLOAD_H_
