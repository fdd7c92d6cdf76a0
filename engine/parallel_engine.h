// The embedding API of one rank of a context-parallel group. What engine.h says holds here too;
// every rank makes the same calls with the same batch.
//
//   mla::DeviceBuffer workspace(*backend, mla::parallel_layout(config, parallel, *backend).total);
//   mla::ParallelEngine engine(config, parallel, *backend, *communicator, workspace.span());
//   engine.begin_step(step, stream);                       // ranks compare their plans here
//   for (const mla::LayerParams& layer : layers) engine.run_layer(layer, stream);
//   engine.wait(stream);                                   // never longer than the time limit
//
// After a kCommunication error, or any error of run_layer, the group is aborted: every later call
// of any rank throws, and engines can be destroyed.
#ifndef ENGINE_PARALLEL_ENGINE_H_
#define ENGINE_PARALLEL_ENGINE_H_

#include <memory>
#include <span>

#include "engine/parallel_runner.h"
#include "engine/step_inputs.h"
#include "kernels/backend.h"
#include "parallel/communicator.h"
#include "parallel/partition.h"

namespace mla {

class ParallelEngine {
 public:
  /// `config.shard` is not looked at: the shard is `parallel`'s. Throws as ParallelRunner does.
  ParallelEngine(const EngineConfig& config, const ParallelConfig& parallel, Backend& backend,
                 Communicator& communicator, std::span<std::byte> workspace);
  ~ParallelEngine();
  ParallelEngine(const ParallelEngine&) = delete;
  ParallelEngine& operator=(const ParallelEngine&) = delete;

  /// `step`: the global batch; the block table is that of this rank's cache (sharded: of its local
  /// positions). slot_mapping has all T new tokens in the batch's order, those that other ranks
  /// store negative.
  ///
  /// Ranks compare plans over the group's connection before any stream work. Where one refuses the
  /// step, it throws its own error and all others kCommunication.
  void begin_step(const StepInputs& step, Stream stream = {});

  /// With split queries, tensors hold this rank's rows: see ParallelRunner.
  void run_layer(const LayerParams& layer, Stream stream = {});

  /// Waits for the stream; throws kCommunication where a peer was lost meanwhile.
  void wait(Stream stream = {}) { communicator_->wait(stream); }

  const RankPlan& plan() const { return plan_; }
  const EngineConfig& config() const { return config_; }

 private:
  void plan_step(const StepInputs& step);
  void tell_refusal() noexcept;

  EngineConfig config_;  // shard: that of the cache on this rank
  ParallelConfig parallel_;
  Communicator* communicator_;
  ParallelRunner runner_;
  std::unique_ptr<BlockUploader> uploader_;
  PlanConfig plan_config_;
  RankPlan plan_;
  DevicePlan device_plan_;
  int32_t num_pages_ = 0;
};

}  // namespace mla

#endif  // ENGINE_PARALLEL_ENGINE_H_
