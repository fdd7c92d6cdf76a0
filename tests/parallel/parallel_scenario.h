// A scenario run by threads as ranks, each with a CPU backend, a cache and an engine of its own.
#ifndef TESTS_PARALLEL_PARALLEL_SCENARIO_H_
#define TESTS_PARALLEL_PARALLEL_SCENARIO_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/config.h"
#include "kernels/backend.h"
#include "parallel/in_process_communicator.h"
#include "parallel/partition.h"
#include "tests/engine/scenario.h"
#include "tests/parallel/ranks.h"

namespace mla::test {

struct ParallelOptions {
  float cache_scale = 1.0f;
  uint8_t fill = kPoison;  // every byte of the workspace before the first step
  DType out_dtype = DType::kBFloat16;
  bool strided = false;  // kv_c and k_pe: columns of one tensor
  bool lse_rows_first = false;
  bool without_lse = false;
  std::chrono::milliseconds time_limit = std::chrono::minutes(5);
  /// Puts another backend before the rank's own.
  std::function<std::unique_ptr<Backend>(Backend&)> wrap_backend = nullptr;
  /// Called on the rank's thread: what it throws is how the rank ends.
  std::function<void(int32_t rank, size_t step)> before_step = nullptr;
  std::function<void(int32_t rank, size_t step)> before_layer = nullptr;
  std::function<void(int32_t rank, std::vector<int32_t>& context_lens)> change_batch = nullptr;
};

struct ParallelRun {
  ScenarioResult result;  // rows in the batch's order; split queries: put together
  std::vector<RankOutcome> outcomes;
  std::vector<std::vector<CollectiveCall>> calls;  // by rank
  Strategy strategy = Strategy::kGatherKv;         // of the last step

  bool ok() const;
};

/// Runs all steps on all ranks. `parallel.shard.rank` is not looked at. Where no rank fails, also
/// expects of every rank the calls that its plans announce, of replicated queries the same bits on
/// all ranks, and nothing written past the workspace or beside the results.
ParallelRun run_parallel(EngineConfig config, const ParallelConfig& parallel,
                         const Scenario& scenario, const ParallelOptions& options = {});

/// For messages.
std::string describe(const ParallelConfig& parallel);

}  // namespace mla::test

#endif  // TESTS_PARALLEL_PARALLEL_SCENARIO_H_
