// Single ops on synthetic tensors: their costs, checks of sampled results, and times.
#ifndef TOOLS_CLI_OP_BENCH_H_
#define TOOLS_CLI_OP_BENCH_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/config.h"
#include "tools/cli/bench.h"
#include "tools/cli/device.h"
#include "tools/cli/options.h"
#include "tools/cli/report.h"
#include "tools/cli/workload.h"

namespace mla::cli {

/// What some work takes at least.
struct LayerCost {
  double flops = 0.0;      // by the definition of the op, for tflops
  double all_flops = 0.0;  // with expansion, by the cheapest path
  double bytes = 0.0;      // read and written
};

/// One layer of a step: attention's FLOPs by definition; for the floor, each request by the path
/// with fewer FLOPs.
LayerCost layer_cost(const EngineConfig& config, const Step& step);

/// Rates and, where the device is an H200, the fraction of its floor: 790 TFLOP/s (cuBLAS, bf16
/// 8192^3) and 4.25 TB/s (device copy), both measured.
void set_rates(const LayerCost& cost, const Backend& backend, BenchResult& result);

struct OpTensors;

/// One op, ready to be called and checked.
struct OpCase {
  std::string name;
  std::string shape;
  LayerCost cost;
  std::function<void(int64_t call)> enqueue;  // rotates among buffer sets
  std::function<bool()> check;                // after call 0: sampled results are right
};

/// The ops for `query_tokens` new tokens over `key_rows` rows of keys. Cases refer to this object.
class OpBench {
 public:
  OpBench(const Options& options, Device& device, int32_t query_tokens, int32_t key_rows);
  ~OpBench();
  OpBench(const OpBench&) = delete;
  OpBench& operator=(const OpBench&) = delete;

  OpCase gather();
  OpCase expand();
  OpCase attention();         // no mask: a context chunk
  OpCase causal_attention();  // new tokens alone
  OpCase absorbed_attention();
  OpCase mask();
  OpCase merge();

 private:
  std::unique_ptr<OpTensors> tensors_;
};

/// Appends a result for every op.
void run_op_bench(const Options& options, Device& device, Progress& progress, BenchReport& report);

}  // namespace mla::cli

#endif  // TOOLS_CLI_OP_BENCH_H_
