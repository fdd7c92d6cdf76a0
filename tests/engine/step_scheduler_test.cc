#include "engine/step_scheduler.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "metadata/error.h"

namespace mla {
namespace {

TEST(StepSchedulerTest, CutsTheLastPromptAndGoesOnWithIt) {
  StepScheduler scheduler(10, 8);
  scheduler.add({.id = 7, .prefix_len = 3, .prompt_len = 6});
  scheduler.add({.id = 8, .prefix_len = 0, .prompt_len = 9});
  std::vector<ScheduledRequest> step;

  scheduler.next_step(step);
  ASSERT_EQ(step.size(), 2u);
  EXPECT_EQ(step[0].id, 7);
  EXPECT_EQ(step[0].context_len, 3);
  EXPECT_EQ(step[0].query_len, 6);
  EXPECT_TRUE(step[0].last);
  EXPECT_EQ(step[1].id, 8);
  EXPECT_EQ(step[1].context_len, 0);
  EXPECT_EQ(step[1].query_len, 4);
  EXPECT_FALSE(step[1].last);
  EXPECT_FALSE(scheduler.done());

  scheduler.next_step(step);
  ASSERT_EQ(step.size(), 1u);
  EXPECT_EQ(step[0].id, 8);
  EXPECT_EQ(step[0].context_len, 4);
  EXPECT_EQ(step[0].query_len, 5);
  EXPECT_TRUE(step[0].last);
  EXPECT_TRUE(scheduler.done());

  scheduler.next_step(step);
  EXPECT_TRUE(step.empty());
}

TEST(StepSchedulerTest, EveryTokenOnceInOrderWithinTheBudget) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int round = 0; round < 200; ++round) {
    const int32_t budget = draw(1, 50);
    const int32_t max_requests = draw(1, 6);
    StepScheduler scheduler(budget, max_requests);
    std::map<int32_t, PrefillRequest> requests;
    int64_t total = 0;
    for (int32_t id = 0; id < 12; ++id) {
      const PrefillRequest request{id, draw(0, 100), draw(0, 3) == 0 ? 0 : draw(1, 120)};
      requests[id] = request;
      total += request.prompt_len;
      scheduler.add(request);
    }

    std::map<int32_t, int32_t> done;
    std::map<int32_t, int> times_last;
    int32_t newest = -1;
    std::vector<ScheduledRequest> step;
    while (!scheduler.done()) {
      scheduler.next_step(step);
      ASSERT_FALSE(step.empty());
      ASSERT_LE(step.size(), static_cast<size_t>(max_requests));
      int32_t tokens = 0;
      for (const ScheduledRequest& r : step) {
        ASSERT_GE(r.id, newest);  // first come, first served
        newest = r.id;
        ASSERT_EQ(r.context_len, requests[r.id].prefix_len + done[r.id]);
        ASSERT_EQ(r.query_len == 0, requests[r.id].prompt_len == 0);
        done[r.id] += r.query_len;
        tokens += r.query_len;
        ASSERT_EQ(r.last, done[r.id] == requests[r.id].prompt_len);
        times_last[r.id] += r.last ? 1 : 0;
      }
      ASSERT_LE(tokens, budget);
      // A step with room left has taken all there was, or as many requests as it may.
      if (!scheduler.done() && step.size() < static_cast<size_t>(max_requests)) {
        ASSERT_EQ(tokens, budget);
      }
      total -= tokens;
    }
    EXPECT_EQ(total, 0);
    for (const auto& [id, request] : requests) {
      EXPECT_EQ(done[id], request.prompt_len);
      EXPECT_EQ(times_last[id], 1);
    }
  }
}

TEST(StepSchedulerTest, RefusesWhatMakesNoSense) {
  EXPECT_THROW(StepScheduler(0, 1), Error);
  EXPECT_THROW(StepScheduler(1, 0), Error);
  StepScheduler scheduler(1, 1);
  EXPECT_THROW(scheduler.add({0, -1, 1}), Error);
  EXPECT_THROW(scheduler.add({0, 1, -1}), Error);
  EXPECT_THROW(scheduler.add({0, 2147483647, 1}), Error);
  EXPECT_TRUE(scheduler.done());
  scheduler.add({0, 2147483646, 1});
  EXPECT_FALSE(scheduler.done());
}

}  // namespace
}  // namespace mla
