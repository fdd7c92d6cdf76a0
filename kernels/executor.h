// Where the CPU backend's work runs. The engine starts no thread of its own: the host program
// hands it an executor.
#ifndef KERNELS_EXECUTOR_H_
#define KERNELS_EXECUTOR_H_

#include <cstdint>
#include <functional>

namespace mla {

class Executor {
 public:
  virtual ~Executor() = default;

  /// How many tasks may run at once; workers are numbered 0 to num_workers() - 1.
  virtual int num_workers() const = 0;

  /// Calls task(i, worker) once for every i in [0, count), at most one call a worker at a time,
  /// and returns when all are done. An exception of a task is rethrown here, after the others.
  virtual void parallel_for(int64_t count,
                            const std::function<void(int64_t i, int worker)>& task) = 0;
};

/// Runs everything on the calling thread.
class InlineExecutor final : public Executor {
 public:
  int num_workers() const override { return 1; }
  void parallel_for(int64_t count, const std::function<void(int64_t, int)>& task) override {
    for (int64_t i = 0; i < count; ++i) task(i, 0);
  }
};

}  // namespace mla

#endif  // KERNELS_EXECUTOR_H_
