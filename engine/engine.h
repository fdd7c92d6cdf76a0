// The embedding API: plan a step once, then run it through every layer.
//
//   auto executor = mla::make_thread_pool();
//   auto backend = mla::make_cpu_backend(*executor);     // or make_cuda_backend()
//   mla::DeviceBuffer workspace(*backend, mla::workspace_bytes(config, *backend));
//   mla::Engine engine(config, *backend, workspace.span());
//   engine.begin_step(step, stream);
//   for (const mla::LayerParams& layer : layers) engine.run_layer(layer, stream);
//
// An engine owns no thread, and no memory but its plan and the pinned ring that carries it; it
// never changes global state. Several engines may live in one process; one engine is used from
// one thread at a time. Work is ordered by the stream that is passed in; all layers of a step and
// the next begin_step use the same stream, or streams the caller has ordered.
#ifndef ENGINE_ENGINE_H_
#define ENGINE_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "engine/attention_runner.h"
#include "engine/config.h"
#include "engine/step_inputs.h"
#include "kernels/backend.h"
#include "metadata/plan.h"

namespace mla {

class Engine {
 public:
  /// Throws kInvalidArgument or kUnsupported, also for a workspace that is too small.
  Engine(const EngineConfig& config, Backend& backend, std::span<std::byte> workspace);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Validates, plans and enqueues the plan's copy. On an error the engine has no step: run_layer
  /// is refused until a begin_step succeeds.
  void begin_step(const StepInputs& step, Stream stream = {});

  /// Throws kInvalidArgument before anything is launched or written.
  void run_layer(const LayerParams& layer, Stream stream = {});

  const StepPlan& plan() const { return plan_; }
  const EngineConfig& config() const { return config_; }

 private:
  EngineConfig config_;
  Backend* backend_;
  AttentionRunner runner_;
  std::unique_ptr<BlockUploader> uploader_;
  StepPlan plan_;
  DevicePlan device_plan_;
  int32_t num_pages_ = 0;
};

}  // namespace mla

#endif  // ENGINE_ENGINE_H_
