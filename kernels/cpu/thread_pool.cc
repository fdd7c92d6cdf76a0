#include "kernels/cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "metadata/error.h"

namespace mla {
namespace {

using Task = std::function<void(int64_t, int)>;

/// One parallel_for. Lives on the caller's stack until every worker has left it.
struct Job {
  Job(int64_t count_in, const Task& task_in) : count(count_in), task(task_in) {}

  void run(int worker) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      try {
        task(i, worker);
      } catch (...) {
        const std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
      }
    }
  }

  const int64_t count;
  const Task& task;
  std::atomic<int64_t> next = 0;
  std::mutex error_mutex;
  std::exception_ptr error;  // the first one
};

class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int num_workers) {
    threads_.reserve(num_workers - 1);
    try {
      for (int w = 1; w < num_workers; ++w) threads_.emplace_back([this, w] { work(w); });
    } catch (const std::system_error& error) {
      stop();
      throw_error(ErrorCode::kDevice, "can't start worker {} of {}: {}", threads_.size() + 2,
                  num_workers, error.what());
    }
  }
  ~ThreadPool() override { stop(); }

  int num_workers() const override { return static_cast<int>(threads_.size()) + 1; }

  void parallel_for(int64_t count, const Task& task) override {
    Job job(count, task);
    if (current_pool == this) {
      // A task of ours asks: waiting for its own job to end would never return, so it runs these
      // alone, as the worker that it is.
      job.run(current_worker);
    } else {
      const std::lock_guard turn(turn_);
      if (count > 1) start(&job);
      run(job, 0);
      if (count > 1) wait_for_workers();
    }
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  void run(Job& job, int worker) {
    const ThreadPool* const outer_pool = current_pool;
    const int outer_worker = current_worker;
    current_pool = this;
    current_worker = worker;
    job.run(worker);
    current_pool = outer_pool;
    current_worker = outer_worker;
  }

  void start(Job* job) {
    const std::lock_guard lock(mutex_);
    job_ = job;
    ++generation_;
    active_ = static_cast<int>(threads_.size());
    started_.notify_all();
  }

  void wait_for_workers() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return active_ == 0; });
  }

  void work(int worker) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      started_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      Job* const job = job_;
      lock.unlock();
      run(*job, worker);
      lock.lock();
      if (--active_ == 0) finished_.notify_one();
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      started_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  // The pool whose task the thread is in, and as which worker.
  static thread_local const ThreadPool* current_pool;
  static thread_local int current_worker;

  std::mutex turn_;   // held by the caller whose job runs
  std::mutex mutex_;  // guards what follows
  std::condition_variable started_;
  std::condition_variable finished_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;  // of jobs
  int active_ = 0;           // threads that have not left the job
  bool stopping_ = false;

  std::vector<std::thread> threads_;
};

thread_local const ThreadPool* ThreadPool::current_pool = nullptr;
thread_local int ThreadPool::current_worker = 0;

}  // namespace

std::unique_ptr<Executor> make_thread_pool(int num_threads) {
  if (num_threads < 0) {
    throw_error(ErrorCode::kInvalidArgument, "num_threads is {}, at least 0", num_threads);
  }
  if (num_threads == 0) {
    num_threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  return std::make_unique<ThreadPool>(num_threads);
}

}  // namespace mla
