// A workload on a device: caches that hold the prefixes, weights, and one step's inputs.
#ifndef TOOLS_CLI_SESSION_H_
#define TOOLS_CLI_SESSION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/paged_cache.h"
#include "engine/parallel_engine.h"
#include "kernels/backend.h"
#include "kernels/executor.h"
#include "tools/cli/options.h"
#include "tools/cli/workload.h"

namespace mla::cli {

/// The config of the options, with limits that the workload needs.
EngineConfig engine_config(const Options& options, const Workload& workload);

/// The group's config as the options have it, for one rank.
ParallelConfig parallel_config(const Options& options, int32_t rank);

/// A rank of a context-parallel group.
struct GroupMember {
  ParallelConfig config;
  Communicator& communicator;
};

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
          bool poison, const GroupMember* member = nullptr);

  void begin_step(const Step& step);
  /// Makes the inputs of a layer and puts NaN into its outputs.
  void load_layer(int32_t layer);
  /// Returns when the layer is done.
  void run_layer(int32_t layer);
  /// Enqueues the layer only.
  void enqueue_layer(int32_t layer);
  void synchronize() { backend_.synchronize(stream_); }
  /// Copies the outputs; the inputs are there since load_layer. With split queries, those of all
  /// ranks, which all have to call it.
  const HostLayer& fetch_layer();

  /// Rows of the layer's expansion by the backend: [rows, H * (P + V)] bf16, of the first
  /// `latent.size() / (L + Rr)` <= kMaxExpandRows rows.
  static constexpr int64_t kMaxExpandRows = 64;
  std::vector<uint16_t> expand_rows(int32_t layer, std::span<const uint16_t> latent);

  const SyntheticValues& values() const { return values_; }
  const EngineConfig& config() const { return config_; }
  const StepPlan& plan() const { return parallel_ ? parallel_->plan().plan : engine_->plan(); }
  const Step& step() const { return step_; }
  LayerParams layer_params(int32_t layer) const;
  LatentCache cache(int32_t layer) const { return cache_.layer(layer); }
  const void* weights(int32_t layer) const;
  OpContext op_context() const { return {stream_, workspace_.span()}; }

 private:
  void fill_prefixes(const Workload& workload);
  void load_weights();
  size_t layer_weight_bytes() const;
  int64_t slot_of(int32_t id, int32_t position) const;
  void set_split_rows(const Batch& batch);
  void copy_rows_to_device(const DeviceBuffer& buffer, const std::vector<uint16_t>& rows,
                           int64_t columns);
  void exchange_outputs();

  Backend& backend_;
  Executor& executor_;
  const GroupMember* member_;  // null: one rank alone
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
  std::optional<Engine> engine_;
  std::optional<ParallelEngine> parallel_;  // with a member

  Step step_;
  std::vector<std::vector<int32_t>>
      split_rows_;  // split queries: [N], the step's rows of each rank
  std::vector<int64_t> host_slots_;
  std::vector<int32_t> table_storage_;
  HostLayer host_;
};

}  // namespace mla::cli

#endif  // TOOLS_CLI_SESSION_H_
