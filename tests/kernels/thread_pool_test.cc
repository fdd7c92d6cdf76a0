// The thread pool keeps the executor's promises, alone, nested and shared.
#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "metadata/error.h"

namespace mla {
namespace {

/// Runs `count` tasks and expects each index once, by workers that exist and do one at a time.
void expect_each_once(Executor& executor, int64_t count) {
  std::vector<std::atomic<int>> calls(count);
  std::vector<std::atomic<bool>> busy(executor.num_workers());
  std::atomic<int> violations = 0;
  executor.parallel_for(count, [&](int64_t i, int worker) {
    if (worker < 0 || worker >= executor.num_workers() || busy[worker].exchange(true)) {
      ++violations;
      return;
    }
    ++calls[i];
    busy[worker] = false;
  });
  EXPECT_EQ(violations, 0);
  for (int64_t i = 0; i < count; ++i) EXPECT_EQ(calls[i], 1) << "task " << i;
}

class ThreadPoolTest : public ::testing::TestWithParam<int> {
 protected:
  std::unique_ptr<Executor> pool_ = make_thread_pool(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Workers, ThreadPoolTest, ::testing::Values(1, 2, 3, 8));

TEST_P(ThreadPoolTest, HasTheWorkersAskedFor) { EXPECT_EQ(pool_->num_workers(), GetParam()); }

TEST_P(ThreadPoolTest, CallsEachTaskOnce) {
  for (const int64_t count : {0, 1, 2, 7, 1000}) expect_each_once(*pool_, count);
}

TEST_P(ThreadPoolTest, ServesManyShortJobs) {
  std::atomic<int64_t> sum = 0;
  for (int job = 0; job < 2000; ++job) {
    pool_->parallel_for(3, [&](int64_t i, int) { sum += i; });
  }
  EXPECT_EQ(sum, 2000 * 3);
}

TEST_P(ThreadPoolTest, WritesOfTasksAreSeenAfterwards) {
  std::vector<int64_t> values(500);
  pool_->parallel_for(500, [&](int64_t i, int) { values[i] = i * i; });
  for (int64_t i = 0; i < 500; ++i) EXPECT_EQ(values[i], i * i);
}

TEST_P(ThreadPoolTest, RethrowsAfterTheOtherTasks) {
  std::atomic<int> calls = 0;
  const auto throwing = [&](int64_t i, int) {
    ++calls;
    if (i % 10 == 3) throw std::runtime_error("task failed");
  };
  EXPECT_THROW(pool_->parallel_for(100, throwing), std::runtime_error);
  EXPECT_EQ(calls, 100);
  expect_each_once(*pool_, 100);  // and is fit for more
}

TEST_P(ThreadPoolTest, ATaskMayCallItsOwnPool) {
  std::vector<std::atomic<bool>> busy(pool_->num_workers());
  std::atomic<int> calls = 0;
  std::atomic<int> violations = 0;
  pool_->parallel_for(6, [&](int64_t, int outer) {
    pool_->parallel_for(5, [&](int64_t, int inner) {
      if (inner != outer || busy[inner].exchange(true)) ++violations;
      ++calls;
      busy[inner] = false;
    });
  });
  EXPECT_EQ(calls, 30);
  EXPECT_EQ(violations, 0);
}

TEST_P(ThreadPoolTest, ATaskMayCallAnotherPool) {
  const std::unique_ptr<Executor> other = make_thread_pool(2);
  std::atomic<int> calls = 0;
  pool_->parallel_for(4, [&](int64_t, int) {
    other->parallel_for(4, [&](int64_t, int worker) {
      EXPECT_LT(worker, 2);
      ++calls;
    });
  });
  EXPECT_EQ(calls, 16);
}

/// Worker w is one thread of control, whichever caller's job it is in.
TEST_P(ThreadPoolTest, CallersTakeTurns) {
  std::vector<std::atomic<bool>> busy(pool_->num_workers());
  std::atomic<int> calls = 0;
  std::atomic<int> violations = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int job = 0; job < 50; ++job) {
        pool_->parallel_for(8, [&](int64_t, int worker) {
          if (busy[worker].exchange(true)) ++violations;
          ++calls;
          std::this_thread::yield();
          busy[worker] = false;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(calls, 4 * 50 * 8);
  EXPECT_EQ(violations, 0);
}

TEST(ThreadPool, ZeroMeansTheMachinesCores) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  EXPECT_EQ(make_thread_pool(0)->num_workers(), std::max(1, cores));
}

TEST(ThreadPool, RefusesANegativeNumber) {
  try {
    make_thread_pool(-1);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("-1"), std::string::npos);
  }
}

}  // namespace
}  // namespace mla
