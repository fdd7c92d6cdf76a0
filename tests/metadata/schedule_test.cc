// The schedules on batches whose right cuts are known.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "metadata/plan.h"
#include "tests/metadata/plan_checker.h"

namespace mla {
namespace {

using Spans = std::vector<std::vector<GlobalSpan>>;

Spans plan_spans(const PlanConfig& config, const OwnedBatch& batch) {
  const std::vector<StepPlan> plans = build_all_ranks(config, batch);
  check_plans(plans, batch);
  return spans_of(plans);
}

PlanConfig sharded(PlanConfig config, int32_t world, int32_t interleave) {
  config.shard = {world, 0, interleave};
  return config;
}

template <typename T>
std::vector<T> to_vector(std::span<const T> values) {
  return {values.begin(), values.end()};
}

/// seq_lens of a plan's only chunk.
std::vector<int32_t> only_seq_lens(const StepPlan& plan) {
  EXPECT_EQ(plan.chunks().size(), 1u);
  return to_vector(plan.host(plan.chunks()[0].seq_lens));
}

TEST(PackedSchedule, OneLongContextAmongShortOnesIsOneChunk) {
  std::vector<int32_t> contexts(32, 16);
  contexts[0] = 60000;
  const OwnedBatch batch = one_token_each(contexts);
  const std::vector<StepPlan> plans = build_all_ranks(make_config(65536, 64), batch);
  check_plans(plans, batch);
  ASSERT_EQ(plans[0].chunks().size(), 1u);
  EXPECT_EQ(plans[0].chunks()[0].seq_tot, 60496);
  EXPECT_FALSE(plans[0].chunks()[0].has_empty_context);

  const OwnedBatch same = one_token_each(contexts);
  EXPECT_EQ(build_all_ranks(make_config(65536, 64, Schedule::kUniform), same)[0].chunks().size(),
            30u);
}

TEST(PackedSchedule, CutsWhereTheChunkIsFull) {
  const PlanConfig config = make_config(1024, 16);
  EXPECT_EQ(plan_spans(config, one_token_each({960, 16, 16, 16, 16, 16, 16, 16})),
            (Spans{{{0, 0, 960}, {1, 0, 16}, {2, 0, 16}, {3, 0, 16}, {4, 0, 16}},
                   {{5, 0, 16}, {6, 0, 16}, {7, 0, 16}}}));
  EXPECT_EQ(plan_spans(config, one_token_each({2048, 320})),
            (Spans{{{0, 0, 1024}}, {{0, 1024, 2048}}, {{1, 0, 320}}}));
  EXPECT_EQ(plan_spans(config, one_token_each({1024, 1024, 1024})),
            (Spans{{{0, 0, 1024}}, {{1, 0, 1024}}, {{2, 0, 1024}}}));
  EXPECT_EQ(plan_spans(config, one_token_each({37, 1000, 5})),
            (Spans{{{0, 0, 37}, {1, 0, 976}}, {{1, 976, 1000}, {2, 0, 5}}}));
  EXPECT_EQ(plan_spans(config, one_token_each({1})), (Spans{{{0, 0, 1}}}));
}

// check_plans() sees that every row of each is in one chunk.
TEST(AllSchedules, CoverTheBatchesThatOtherEnginesTest) {
  const std::vector<std::vector<int32_t>> batches = {{960, 16, 16, 16, 16, 16, 16, 16},
                                                     {2048, 320},
                                                     {1024, 1024, 1024},
                                                     {37, 1000, 5},
                                                     {1},
                                                     {64, 0, 64, 0}};
  for (const Schedule schedule : {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed}) {
    SCOPED_TRACE(schedule_name(schedule));
    for (const std::vector<int32_t>& contexts : batches) {
      plan_spans(make_config(1024, 16, schedule), one_token_each(contexts));
    }
    plan_spans(sharded(make_config(1024, 128, schedule), 2, 64), one_token_each({3000, 200, 200}));
  }
}

TEST(PackedSchedule, ManySmallContextsNeedNoPageEach) {
  const OwnedBatch batch = one_token_each(std::vector<int32_t>(300, 48));
  for (const Schedule schedule : {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed}) {
    SCOPED_TRACE(schedule_name(schedule));
    EXPECT_EQ(plan_spans(make_config(256, 16, schedule), batch).size(),
              schedule == Schedule::kPacked    ? 57u   // 256 rows each, the last 64
              : schedule == Schedule::kUniform ? 57u   // 16 requests of 16 rows, three times
                                               : 60u)  // 5 whole contexts each
        << "chunks";
  }
}

TEST(AllSchedules, RequestsWithoutContextAreTrimmedAtTheEndsAndEmptyInside) {
  for (const Schedule schedule : {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed}) {
    SCOPED_TRACE(schedule_name(schedule));
    const OwnedBatch batch({3, 2, 4, 1}, {64, 0, 64, 0});
    const std::vector<StepPlan> plans = build_all_ranks(make_config(1024, 16, schedule), batch);
    check_plans(plans, batch);
    EXPECT_EQ(only_seq_lens(plans[0]), (std::vector<int32_t>{64, 0, 64}));
    EXPECT_TRUE(plans[0].chunks()[0].has_empty_context);
    EXPECT_EQ(plans[0].chunks()[0].token_end, 9);

    const OwnedBatch outer = one_token_each({0, 64, 64, 0});
    const StepPlan plan = std::move(build_all_ranks(make_config(1024, 16, schedule), outer)[0]);
    EXPECT_EQ(only_seq_lens(plan), (std::vector<int32_t>{64, 64}));
    EXPECT_EQ(plan.chunks()[0].request_begin, 1);
    EXPECT_FALSE(plan.chunks()[0].has_empty_context);
  }
}

TEST(UniformSchedule, KeepsFinishedRequestsInTheRange) {
  const OwnedBatch batch({64, 17, 1}, {10240, 0, 512});
  const std::vector<StepPlan> plans =
      build_all_ranks(make_config(4096, 64, Schedule::kUniform), batch);
  check_plans(plans, batch);
  // Two requests with context share 4,096 rows: 2,048 each.
  const std::vector<int32_t> expected[] = {
      {2048, 0, 512}, {2048, 0, 0}, {2048, 0, 0}, {2048, 0, 0}, {2048, 0, 0}};
  ASSERT_EQ(plans[0].chunks().size(), std::size(expected));
  for (size_t c = 0; c < std::size(expected); ++c) {
    EXPECT_EQ(to_vector(plans[0].host(plans[0].chunks()[c].seq_lens)), expected[c]);
    EXPECT_TRUE(plans[0].chunks()[c].has_empty_context);
  }
}

TEST(FixedSchedule, CutsDoNotDependOnTheBatch) {
  PlanConfig config = make_config(1024, 16, Schedule::kFixed);
  config.split_tokens = 384;
  EXPECT_EQ(plan_spans(config, one_token_each({1000})),
            (Spans{{{0, 0, 384}}, {{0, 384, 768}}, {{0, 768, 1000}}}));
  EXPECT_EQ(plan_spans(config, one_token_each({1000, 400, 500})),
            (Spans{{{0, 0, 384}, {1, 0, 384}},
                   {{0, 384, 768}, {1, 384, 400}},
                   {{0, 768, 1000}},
                   {{2, 0, 384}},
                   {{2, 384, 500}}}));
}

TEST(FixedSchedule, NewTokensAreCutByTheirOwnRequestOnly) {
  PlanConfig config = make_config(1024, 16, Schedule::kFixed);
  config.split_tokens = 384;
  const OwnedBatch batch({300, 900, 0, 20}, {0, 0, 0, 0});
  const std::vector<StepPlan> plans = build_all_ranks(config, batch);
  check_plans(plans, batch);
  std::vector<std::pair<int32_t, int32_t>> rows;
  for (const NewTokenPiece& piece : plans[0].new_token_pieces()) {
    rows.push_back({piece.row_begin, piece.row_end});
  }
  EXPECT_EQ(rows, (std::vector<std::pair<int32_t, int32_t>>{{0, 684}, {684, 1068}, {1068, 1220}}));
}

TEST(FixedSchedule, DefaultSplitIsAPageMultipleUpTo4096) {
  EXPECT_EQ(effective_split_tokens(make_config(65536, 64, Schedule::kFixed)), 4096);
  EXPECT_EQ(effective_split_tokens(make_config(65536, 48, Schedule::kFixed)), 4080);
  EXPECT_EQ(effective_split_tokens(make_config(1000, 64, Schedule::kFixed)), 960);
  EXPECT_EQ(effective_split_tokens(make_config(8192, 5000, Schedule::kFixed)), 5000);
}

TEST(NewTokens, AreCutWhereAPieceIsFull) {
  const OwnedBatch batch({700, 0, 1000, 5}, {0, 0, 0, 0});
  const std::vector<StepPlan> plans = build_all_ranks(make_config(1024, 16), batch);
  check_plans(plans, batch);
  EXPECT_TRUE(plans[0].chunks().empty());
  ASSERT_EQ(plans[0].new_token_pieces().size(), 2u);
  const NewTokenPiece& first = plans[0].new_token_pieces()[0];
  const NewTokenPiece& second = plans[0].new_token_pieces()[1];
  EXPECT_EQ(to_vector(plans[0].host(first.final_items)),
            (std::vector<AttentionItem>{{0, 700, 0, 700, 0, 0}, {700, 324, 700, 324, 0, 700}}));
  EXPECT_EQ(to_vector(plans[0].host(first.carried_items)),
            (std::vector<AttentionItem>{{1024, 676, 700, 324, kUnmasked, 1024}}));
  EXPECT_EQ(to_vector(plans[0].host(second.final_items)),
            (std::vector<AttentionItem>{{1024, 676, 0, 676, 0, 1024}, {1700, 5, 676, 5, 0, 1700}}));
}

TEST(AllSchedules, CutsThatWouldTakeAllMemoryAreRefused) {
  const OwnedBatch long_context = one_token_each({2'000'000'000});
  const OwnedBatch long_prompt({2'000'000'000}, {0});
  const OwnedBatch many_contexts = one_token_each(std::vector<int32_t>(1000, 2'000'000));
  for (const Schedule schedule : {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed}) {
    StepPlan plan;
    const auto refusal = [&](int32_t w, const OwnedBatch& batch) {
      const PlanConfig config = make_config(w, 1, schedule);
      return error_of(ErrorCode::kInvalidArgument,
                      [&] { build_plan(config, batch.view(), nullptr, plan); });
    };
    EXPECT_NE(refusal(1, long_context).find("1048576 chunks"), std::string::npos);
    EXPECT_NE(refusal(1, long_prompt).find("1048576 chunks"), std::string::npos);
    const char* const limit = schedule == Schedule::kUniform ? "4194304 spans" : "1048576 chunks";
    EXPECT_NE(refusal(1000, many_contexts).find(limit), std::string::npos);
    EXPECT_TRUE(plan.chunks().empty());
  }
}

TEST(EmptyBatch, IsAPlanWithoutWork) {
  for (const OwnedBatch& batch : {OwnedBatch({}, {}), OwnedBatch({0, 0}, {0, 0})}) {
    const StepPlan plan = std::move(build_all_ranks(make_config(1024, 16), batch)[0]);
    EXPECT_EQ(plan.num_requests(), static_cast<int32_t>(batch.context_lens.size()));
    EXPECT_TRUE(plan.chunks().empty());
    EXPECT_TRUE(plan.new_token_pieces().empty());
    EXPECT_EQ(plan.num_query_tokens(), 0);
  }
}

TEST(ContextParallelSchedule, SevenEqualContextsOverEightRanks) {
  const OwnedBatch batch(std::vector<int32_t>(7, 33), std::vector<int32_t>(7, 12345));
  const std::vector<StepPlan> plans = build_all_ranks(sharded(make_config(65536, 64), 8, 1), batch);
  check_plans(plans, batch);
  for (int32_t rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(only_seq_lens(plans[rank]), std::vector<int32_t>(7, rank == 0 ? 1544 : 1543));
  }
}

TEST(ContextParallelSchedule, AShortContextIsEmptyOnMostRanks) {
  const OwnedBatch batch({3, 3}, {1000, 50});
  const std::vector<StepPlan> plans =
      build_all_ranks(sharded(make_config(65536, 64), 4, 64), batch);
  check_plans(plans, batch);
  const std::vector<int32_t> expected[] = {{256, 50}, {256, 0}, {256, 0}, {232, 0}};
  for (int32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(only_seq_lens(plans[rank]), expected[rank]);
    EXPECT_EQ(plans[rank].chunks()[0].has_empty_context, rank != 0);
    EXPECT_EQ(plans[rank].chunks()[0].items.size, rank == 0 ? 2 : 1);
  }
}

TEST(ContextParallelSchedule, ASpanInTheMiddleOfACycle) {
  PlanConfig config = sharded(make_config(16, 16, Schedule::kFixed), 4, 16);
  const OwnedBatch batch = one_token_each({48});
  const std::vector<StepPlan> plans = build_all_ranks(config, batch);
  check_plans(plans, batch);
  ASSERT_EQ(plans[0].chunks().size(), 3u);
  // Span [16, 32) lives on rank 1 alone.
  const int32_t second[] = {0, 16, 0, 0};
  for (int32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(plans[rank].chunks()[1].seq_tot, second[rank]);
    EXPECT_EQ(plans[rank].chunks()[1].has_empty_context, rank != 1);
  }
}

TEST(ContextParallelSchedule, CutsAtWholeCyclesOfPages) {
  const OwnedBatch batch = one_token_each({3000, 200, 200});
  // lcm(page 128, N * I = 128) is 128; W counts a rank's rows, so a chunk takes 2 * 1024 tokens.
  EXPECT_EQ(plan_spans(sharded(make_config(1024, 128), 2, 64), batch),
            (Spans{{{0, 0, 2048}}, {{0, 2048, 3000}, {1, 0, 200}, {2, 0, 200}}}));
}

}  // namespace
}  // namespace mla
