// build_plan allocates nothing once its plan has grown. A binary of its own: it counts every
// allocation of the program.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "metadata/plan.h"
#include "tests/metadata/plan_checker.h"

namespace {
std::atomic<int64_t> allocations = 0;
}

void* operator new(size_t bytes) {
  ++allocations;
  if (void* data = std::malloc(bytes)) return data;
  throw std::bad_alloc();
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace mla {
namespace {

TEST(Plan, SteadyStateAllocatesNothing) {
  PlanConfig config;
  config.dims = find_preset("deepseek-v2-lite");
  config.workspace_tokens = 4096;
  config.page_size = 16;
  config.path = PathPolicy::kAuto;
  for (Schedule schedule : {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed}) {
    config.schedule = schedule;
    const OwnedBatch large(std::vector<int32_t>(64, 300), std::vector<int32_t>(64, 5000));
    const OwnedBatch small({1, 5000, 0, 7}, {10000, 0, 3, 4096});
    StepPlan plan;
    build_plan(config, large.view(), nullptr, plan);
    build_plan(config, small.view(), nullptr, plan);
    const int64_t before = allocations;
    build_plan(config, large.view(), nullptr, plan);
    build_plan(config, small.view(), nullptr, plan);
    EXPECT_EQ(allocations, before) << schedule_name(schedule);
  }
}

}  // namespace
}  // namespace mla
