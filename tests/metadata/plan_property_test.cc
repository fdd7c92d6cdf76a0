// Random batches over every schedule, path and placement; the checker walks every token.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "metadata/plan.h"
#include "tests/metadata/plan_checker.h"

namespace mla {
namespace {

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int32_t between(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(engine_);
  }
  bool one_in(int32_t n) { return between(1, n) == 1; }

 private:
  std::mt19937 engine_;
};

OwnedBatch random_batch(Random& random, int32_t longest) {
  std::vector<int32_t> query_lens;
  std::vector<int32_t> context_lens;
  const int32_t num_requests = random.between(1, 12);
  for (int32_t r = 0; r < num_requests; ++r) {
    const int32_t bound = random.one_in(2) ? longest : 70;
    query_lens.push_back(random.one_in(5) ? 0 : random.between(1, bound));
    context_lens.push_back(random.one_in(4) ? 0 : random.between(1, bound));
  }
  return {query_lens, context_lens};
}

class PlanProperty : public testing::TestWithParam<std::tuple<Schedule, int32_t, int32_t>> {};

TEST_P(PlanProperty, HoldsForRandomBatches) {
  const auto [schedule, world, interleave] = GetParam();
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  StepPlan reused;
  for (const int32_t page : {1, 16, 64, 128}) {
    for (const PathPolicy path : {PathPolicy::kExpand, PathPolicy::kAbsorb, PathPolicy::kAuto}) {
      PlanConfig config =
          make_config(page * random.between(1, 8) + random.between(0, page), page, schedule);
      config.path = path;
      config.shard = {world, 0, interleave};
      if (random.one_in(2)) {
        config.split_tokens = page * random.between(1, config.workspace_tokens / page);
      }
      const OwnedBatch batch = random_batch(random, 40 * page > 1200 ? 1200 : 40 * page);
      SCOPED_TRACE(testing::Message()
                   << "page " << page << " W " << config.workspace_tokens << " split "
                   << config.split_tokens << " path " << static_cast<int>(path) << " queries "
                   << testing::PrintToString(batch.query_start_loc) << " contexts "
                   << testing::PrintToString(batch.context_lens));
      const std::vector<StepPlan> plans = build_all_ranks(config, batch);
      check_plans(plans, batch);

      // A plan that held other steps before has the same bytes as a fresh one.
      build_plan(config, batch.view(), nullptr, reused);
      EXPECT_TRUE(std::ranges::equal(reused.block(), plans[0].block()));
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, PlanProperty,
    testing::Combine(testing::Values(Schedule::kPacked, Schedule::kUniform, Schedule::kFixed),
                     testing::Values(1, 2, 3, 4, 8), testing::Values(1, 16, 64)),
    [](const auto& param_info) {
      return std::string(schedule_name(std::get<0>(param_info.param))) + "_N" +
             std::to_string(std::get<1>(param_info.param)) + "_I" +
             std::to_string(std::get<2>(param_info.param));
    });

TEST(FixedScheduleProperty, ARequestIsCutTheSameInEveryBatch) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  for (int32_t repeat = 0; repeat < 50; ++repeat) {
    PlanConfig config = make_config(512, 16, Schedule::kFixed);
    config.split_tokens = 16 * random.between(1, 32);
    config.path = PathPolicy::kAuto;
    const OwnedBatch batch = random_batch(random, 1200);
    const StepPlan together = std::move(build_all_ranks(config, batch)[0]);
    for (int32_t r = 0; r < together.num_requests(); ++r) {
      const OwnedBatch one({batch.view().query_len(r)}, {batch.context_lens[r]});
      const StepPlan alone = std::move(build_all_ranks(config, one)[0]);

      // (path, start, length) of the request's spans, and the lengths of its own new-token pieces.
      const auto cuts = [](const StepPlan& plan, int32_t request) {
        std::vector<std::tuple<Path, int32_t, int32_t>> spans;
        for (const Chunk& chunk : plan.chunks()) {
          const int32_t j = request - chunk.request_begin;
          if (j < 0 || request >= chunk.request_end) continue;
          const int32_t length = plan.host(chunk.seq_lens)[j];
          if (length > 0) spans.push_back({chunk.path, plan.host(chunk.starts)[j], length});
        }
        return spans;
      };
      const auto pieces = [](const StepPlan& plan, int32_t begin, int32_t end) {
        std::vector<std::pair<int32_t, int32_t>> rows;
        for (const NewTokenPiece& piece : plan.new_token_pieces()) {
          for (const AttentionItem& item : plan.host(piece.final_items)) {
            if (item.q_begin >= begin && item.q_begin < end) {
              rows.push_back({item.q_begin - begin, item.q_len});
            }
          }
        }
        return rows;
      };
      EXPECT_EQ(cuts(together, r), cuts(alone, 0));
      EXPECT_EQ(pieces(together, batch.query_start_loc[r], batch.query_start_loc[r + 1]),
                pieces(alone, 0, one.query_start_loc[1]));
    }
  }
}

}  // namespace
}  // namespace mla
