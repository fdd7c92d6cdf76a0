// A workload on a device: caches that hold the prefixes, weights, and one step's inputs.
#ifndef TOOLS_CLI_SESSION_H_
#define TOOLS_CLI_SESSION_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/paged_cache.h"
#include "kernels/backend.h"
#include "kernels/executor.h"
#include "tools/cli/options.h"
#include "tools/cli/workload.h"

namespace mla::cli {

/// The config of the options, with limits that the workload needs.
EngineConfig engine_config(const Options& options, const Workload& workload);

/// One layer's inputs and outputs of a step, in host memory.
struct HostLayer {
  std::vector<uint16_t> q;       // [T, H, P + Rr] bf16
  std::vector<uint16_t> latent;  // [T, L + Rr] bf16
  std::vector<uint16_t> out;     // [T, H, V] bf16
  std::vector<float> lse;        // [H, T]
};

class Session {
 public:
  /// Allocates everything and fills the caches with the prefixes; `poison` fills the workspace
  /// with NaN. Throws kInvalidArgument where the machine has too little memory.
  Session(const Options& options, const Workload& workload, Backend& backend, Executor& executor,
          bool poison);

  void begin_step(const Step& step);
  /// Makes the inputs of a layer and puts NaN into its outputs.
  void load_layer(int32_t layer);
  /// Returns when the layer is done.
  void run_layer(int32_t layer);
  /// Enqueues the layer only.
  void enqueue_layer(int32_t layer);
  void synchronize() { backend_.synchronize(stream_); }
  /// Copies the outputs; the inputs are there since load_layer.
  const HostLayer& fetch_layer();

  /// Rows of the layer's expansion by the backend: [rows, H * (P + V)] bf16, of the first
  /// `latent.size() / (L + Rr)` <= kMaxExpandRows rows.
  static constexpr int64_t kMaxExpandRows = 64;
  std::vector<uint16_t> expand_rows(int32_t layer, std::span<const uint16_t> latent);

  const SyntheticValues& values() const { return values_; }
  const EngineConfig& config() const { return config_; }
  const StepPlan& plan() const { return engine_.plan(); }
  const Step& step() const { return step_; }
  LayerParams layer_params(int32_t layer) const;
  LatentCache cache(int32_t layer) const { return cache_.layer(layer); }
  const void* weights(int32_t layer) const;
  OpContext op_context() const { return {stream_, workspace_.span()}; }

 private:
  void fill_prefixes(const Workload& workload);
  void load_weights();
  size_t layer_weight_bytes() const;

  Backend& backend_;
  Executor& executor_;
  Stream stream_;
  EngineConfig config_;
  int32_t num_layers_;
  int32_t num_pages_;
  SyntheticValues values_;
  PagedRequests pages_;  // request ids are those of the workload

  DeviceBuffer workspace_;
  DeviceBuffer op_scratch_;
  DeviceBuffer weights_;
  DeviceBuffer q_, latent_, out_, lse_, slots_;
  DeviceBuffer expand_latent_, expand_out_;
  LatentCacheStorage cache_;
  Engine engine_;

  Step step_;
  std::vector<int64_t> host_slots_;
  std::vector<int32_t> table_storage_;
  HostLayer host_;
};

}  // namespace mla::cli

#endif  // TOOLS_CLI_SESSION_H_
