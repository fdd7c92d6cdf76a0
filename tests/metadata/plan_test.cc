// Plans beside their schedule: paths, the block table, shape classes, the hash, refusals.
#include "metadata/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "metadata/error.h"
#include "tests/metadata/plan_checker.h"

namespace mla {
namespace {

constexpr Schedule kSchedules[] = {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed};

StepPlan plan_of(const PlanConfig& config, const OwnedBatch& batch,
                 const ShapeClass& shape_class = {}) {
  StepPlan plan;
  build_plan(config, batch.view(), nullptr, plan, shape_class);
  return plan;
}

std::vector<int32_t> lens_of(const StepPlan& plan, const Chunk& chunk) {
  const auto lens = plan.host(chunk.seq_lens);
  return {lens.begin(), lens.end()};
}

/// Expects build_plan to refuse, naming all of `words`, and to leave the plan empty.
void expect_refused(const PlanConfig& config, const OwnedBatch& batch,
                    const std::vector<std::string>& words, const HostBlockTable* table = nullptr,
                    const ShapeClass& shape_class = {},
                    ErrorCode code = ErrorCode::kInvalidArgument) {
  StepPlan plan = plan_of(make_config(1024, 16), OwnedBatch({3, 4}, {500, 700}));
  const std::string message =
      error_of(code, [&] { build_plan(config, batch.view(), table, plan, shape_class); });
  for (const std::string& word : words) {
    EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message;
  }
  EXPECT_EQ(plan.num_requests(), 0);
  EXPECT_EQ(plan.num_query_tokens(), 0);
  EXPECT_TRUE(plan.chunk_slots().empty());
  EXPECT_TRUE(plan.new_token_slots().empty());
  EXPECT_TRUE(plan.absorb_passes().empty());
  EXPECT_TRUE(plan.block().empty());
}

TEST(Paths, AbsorbedRequestsFillChunksOfTheirOwn) {
  PlanConfig config = make_config(4096, 16);
  config.path = PathPolicy::kAuto;
  const OwnedBatch batch({1000, 4, 1000, 300}, {3000, 3000, 500, 64});
  const std::vector<StepPlan> plans = build_all_ranks(config, batch);
  check_plans(plans, batch);
  const StepPlan& plan = plans[0];
  ASSERT_EQ(plan.chunks().size(), 2u);
  EXPECT_EQ(plan.chunks()[0].path, Path::kExpand);
  EXPECT_EQ(lens_of(plan, plan.chunks()[0]), (std::vector<int32_t>{3000, 0, 500, 64}));
  EXPECT_TRUE(plan.chunks()[0].has_empty_context);
  EXPECT_EQ(plan.chunks()[1].path, Path::kAbsorb);
  EXPECT_EQ(lens_of(plan, plan.chunks()[1]), (std::vector<int32_t>{3000}));
}

TEST(Paths, AbsorbedItemsGoInPassesOfBoundedRows) {
  PlanConfig config = make_config(4096, 16);
  config.path = PathPolicy::kAbsorb;
  const OwnedBatch batch({100, 600, 100, 100}, {10, 20, 0, 30});
  const std::vector<StepPlan> plans = build_all_ranks(config, batch);
  check_plans(plans, batch);
  std::vector<std::pair<int32_t, int32_t>> passes;
  for (const AbsorbPass& pass : plans[0].absorb_passes()) {
    passes.push_back({pass.row_begin, pass.row_end});
  }
  // Request 1 is cut at its own rows 256 and 512; its last 88 rows are alone, since request 3
  // begins 188 rows after them and would end past 256.
  EXPECT_EQ(passes, (std::vector<std::pair<int32_t, int32_t>>{
                        {0, 100}, {100, 356}, {356, 612}, {612, 700}, {800, 900}}));
}

TEST(Paths, BreakEvenWhereTheFlopsDo) {
  const ModelDims dims = find_preset("deepseek-v3");
  for (const int32_t k : {64, 171, 1024, 65536, 1 << 20}) {
    // The count solved for q: L(P+V)k / ((2L + Rr - P - Rr - V)k + L(P+V)) = 170.7k / (k + 170.7)
    const double even = 131072.0 * k / (768.0 * k + 131072.0);
    EXPECT_NEAR(even, 171.0 * k / (k + 171.0), 0.4);
    EXPECT_EQ(cheaper_path(dims, static_cast<int32_t>(even) - 1, k), Path::kAbsorb) << k;
    EXPECT_EQ(cheaper_path(dims, static_cast<int32_t>(even) + 1, k), Path::kExpand) << k;
  }
}

TEST(Paths, AreChosenByGlobalLengthsOnEveryRank) {
  PlanConfig config = make_config(4096, 16);
  config.path = PathPolicy::kAuto;
  config.shard = {8, 0, 16};
  // 130 new tokens over 800 cached ones are absorbed, over a rank's share of 100 they would not be.
  ASSERT_EQ(cheaper_path(config.dims, 130, 800), Path::kAbsorb);
  ASSERT_EQ(cheaper_path(config.dims, 130, 112), Path::kExpand);
  const OwnedBatch batch({130}, {800});
  const std::vector<StepPlan> plans = build_all_ranks(config, batch);
  check_plans(plans, batch);
  EXPECT_EQ(plans[0].chunks()[0].path, Path::kAbsorb);
}

TEST(Paths, AndSchedulesHaveNames) {
  for (const Schedule schedule : kSchedules) {
    EXPECT_EQ(find_schedule(schedule_name(schedule)), schedule);
  }
  EXPECT_EQ(path_name(Path::kAbsorb), "absorb");
  EXPECT_EQ(find_path_policy("auto"), PathPolicy::kAuto);
  EXPECT_EQ(error_of(ErrorCode::kInvalidArgument, [] { find_schedule("even"); }),
            "unknown schedule 'even'; known: packed, uniform, fixed");
  EXPECT_EQ(error_of(ErrorCode::kInvalidArgument, [] { find_path_policy("fold"); }),
            "unknown path 'fold'; known: auto, expand, absorb");
}

TEST(BlockTable, CarriesTheUsedPart) {
  const std::vector<int32_t> ids = {4, 9, 7, -5, 3, -5, -5, -5};
  const HostBlockTable table = {ids.data(), 2, 3, 4};
  StepPlan plan;
  build_plan(make_config(64, 16), OwnedBatch({1, 1}, {33, 5}).view(), &table, plan);
  EXPECT_EQ(plan.block_table_stride(), 3);
  const auto carried = plan.host(plan.block_table());
  EXPECT_EQ((std::vector<int32_t>{carried.begin(), carried.end()}),
            (std::vector<int32_t>{4, 9, 7, 3, 0, 0}));

  // Rank 1 of 2 holds 16 of 33 tokens, one page, and none of 5.
  PlanConfig config = make_config(64, 16);
  config.shard = {2, 1, 16};
  build_plan(config, OwnedBatch({1, 1}, {33, 5}).view(), &table, plan);
  EXPECT_EQ(plan.block_table_stride(), 1);
  EXPECT_EQ(plan.host(plan.block_table())[0], 4);
}

TEST(BlockTable, RefusesOneThatIsTooSmall) {
  const std::vector<int32_t> ids(8, 1);
  const OwnedBatch batch({1, 1}, {33, 5});
  const PlanConfig config = make_config(64, 16);
  const HostBlockTable few_pages = {ids.data(), 2, 2, 4};
  const HostBlockTable few_rows = {ids.data(), 1, 4, 4};
  const HostBlockTable overlapping = {ids.data(), 2, 4, 3};
  const HostBlockTable missing = {nullptr, 2, 4, 4};
  expect_refused(config, batch, {"2 rows of 2 pages", "2 of 3"}, &few_pages);
  expect_refused(config, batch, {"1 rows of 4 pages", "2 of 3"}, &few_rows);
  expect_refused(config, batch, {"stride 3", "4 pages"}, &overlapping);
  expect_refused(config, batch, {"null"}, &missing);
}

TEST(Hash, CoversScheduleAndBatchButNotTheRank) {
  PlanConfig config = make_config(1024, 16, Schedule::kFixed);
  config.shard = {4, 0, 16};
  const OwnedBatch batch({3, 4}, {500, 700});
  const uint64_t hash = plan_of(config, batch).hash();
  const auto hash_with = [&](auto change) {
    PlanConfig changed = config;
    change(changed);
    return plan_of(changed, batch).hash();
  };
  EXPECT_EQ(hash_with([](PlanConfig& c) { c.shard.rank = 3; }), hash);
  EXPECT_EQ(hash_with([](PlanConfig& c) { c.split_tokens = 1024; }), hash);  // the default
  EXPECT_NE(hash_with([](PlanConfig& c) { c.split_tokens = 512; }), hash);
  EXPECT_NE(hash_with([](PlanConfig& c) { c.workspace_tokens = 1040; }), hash);
  EXPECT_NE(hash_with([](PlanConfig& c) { c.page_size = 32; }), hash);
  EXPECT_NE(hash_with([](PlanConfig& c) { c.schedule = Schedule::kPacked; }), hash);
  EXPECT_NE(hash_with([](PlanConfig& c) { c.path = PathPolicy::kAuto; }), hash);
  EXPECT_NE(hash_with([](PlanConfig& c) { c.shard.world = 8; }), hash);
  EXPECT_NE(hash_with([](PlanConfig& c) { c.shard.interleave = 64; }), hash);
  EXPECT_NE(hash_with([](PlanConfig& c) { c.dims.num_heads = 16; }), hash);
  EXPECT_NE(plan_of(config, OwnedBatch({3, 4}, {500, 701})).hash(), hash);
  EXPECT_NE(plan_of(config, OwnedBatch({3, 4}, {700, 500})).hash(), hash);
  EXPECT_NE(plan_of(config, OwnedBatch({4, 3}, {500, 700})).hash(), hash);
  EXPECT_NE(plan_of(config, OwnedBatch({3, 4, 0}, {500, 700, 0})).hash(), hash);
}

template <typename T>
void expect_same_place(BlockArray<T> a, BlockArray<T> b) {
  EXPECT_EQ(a.offset, b.offset);
}

TEST(ShapeClass, FixesEveryOffset) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const ShapeClass shape_class = {8, 600, 30, 40};
  const std::vector<int32_t> ids(8 * 40, 1);
  const HostBlockTable table = {ids.data(), 8, 40, 40};
  for (const Schedule schedule : {Schedule::kPacked, Schedule::kUniform}) {
    const PlanConfig config = make_config(256, 16, schedule);
    StepPlan first;
    build_plan(config, OwnedBatch({}, {}).view(), &table, first, shape_class);
    StepPlan reused;
    for (int32_t repeat = 0; repeat < 30; ++repeat) {
      std::vector<int32_t> query_lens;
      std::vector<int32_t> context_lens;
      for (uint32_t r = random() % 9; r > 0; --r) {
        query_lens.push_back(static_cast<int32_t>(random() % 76));
        context_lens.push_back(random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 641));
      }
      const OwnedBatch batch(query_lens, context_lens);
      StepPlan plan;
      build_plan(config, batch.view(), &table, plan, shape_class);
      check_plans(std::span(&plan, 1), batch);

      EXPECT_EQ(plan.block().size(), first.block().size());
      EXPECT_EQ(plan_block_bytes(config, shape_class), static_cast<int64_t>(plan.block().size()));
      ASSERT_EQ(plan.chunk_slots().size(), 30u);
      ASSERT_EQ(plan.new_token_slots().size(), 3u);
      expect_same_place(plan.query_start_loc(), first.query_start_loc());
      expect_same_place(plan.context_start_loc(), first.context_start_loc());
      expect_same_place(plan.block_table(), first.block_table());
      EXPECT_EQ(plan.block_table_stride(), 40);
      for (size_t c = 0; c < plan.chunk_slots().size(); ++c) {
        const Chunk& a = plan.chunk_slots()[c];
        const Chunk& b = first.chunk_slots()[c];
        expect_same_place(a.starts, b.starts);
        expect_same_place(a.seq_lens, b.seq_lens);
        expect_same_place(a.cu_seq_lens, b.cu_seq_lens);
        expect_same_place(a.items, b.items);
        expect_same_place(a.counts, b.counts);
        EXPECT_EQ(a.request_begin, 0);
        EXPECT_EQ(a.request_end, plan.num_requests());
        const ChunkCounts& counts = plan.host(a.counts)[0];
        if (c < plan.chunks().size()) {
          EXPECT_GT(counts.rows, 0);
        } else {
          EXPECT_EQ(counts.requests + counts.rows + counts.items + counts.final_items, 0);
        }
      }
      for (size_t i = 0; i < plan.new_token_slots().size(); ++i) {
        const NewTokenPiece& a = plan.new_token_slots()[i];
        const NewTokenPiece& b = first.new_token_slots()[i];
        expect_same_place(a.carried_items, b.carried_items);
        expect_same_place(a.final_items, b.final_items);
        expect_same_place(a.counts, b.counts);
        const ChunkCounts& counts = plan.host(a.counts)[0];
        if (i < plan.new_token_pieces().size()) {
          EXPECT_EQ(a.row_begin, static_cast<int32_t>(i) * 256);
        } else {
          EXPECT_EQ(counts.requests + counts.rows + counts.items + counts.final_items, 0);
        }
      }

      // Padding requests have no tokens; a last one takes the rows up to the class's.
      const int32_t* query_start_loc = block_pointer(plan.block().data(), plan.query_start_loc());
      for (int32_t r = plan.num_requests(); r <= 8; ++r) {
        EXPECT_EQ(query_start_loc[r], plan.num_query_tokens());
      }
      EXPECT_EQ(query_start_loc[9], 600);

      build_plan(config, batch.view(), &table, reused, shape_class);
      EXPECT_TRUE(std::ranges::equal(reused.block(), plan.block()));
      if (HasFailure()) return;
    }
  }
}

TEST(ShapeClass, RefusesPlansOutsideByName) {
  const PlanConfig config = make_config(256, 16);
  const ShapeClass shape_class = {2, 100, 2, 40};
  const std::vector<int32_t> ids(100, 1);
  const HostBlockTable table = {ids.data(), 2, 50, 50};
  expect_refused(config, OwnedBatch({1, 1, 1}, {0, 0, 0}), {"3 requests", "at most 2"}, nullptr,
                 shape_class);
  expect_refused(config, OwnedBatch({101}, {0}), {"101 new tokens", "at most 100"}, nullptr,
                 shape_class);
  expect_refused(config, OwnedBatch({1}, {600}), {"3 chunks", "at most 2"}, nullptr, shape_class);
  expect_refused(config, OwnedBatch({1}, {641}), {"41 pages", "at most 40"}, &table, shape_class);
}

TEST(ShapeClass, RefusesClassesThatCannotBeServed) {
  const OwnedBatch batch({1}, {1});
  PlanConfig config = make_config(256, 16);
  expect_refused(config, batch, {"-1 chunks"}, nullptr, {2, 100, -1, 4});
  expect_refused(config, batch, {"max_requests 0"}, nullptr, {0, 100, 2, 4});
  config.path = PathPolicy::kAuto;
  expect_refused(config, batch, {"expand path"}, nullptr, {2, 100, 2, 4}, ErrorCode::kUnsupported);
  config = make_config(256, 16, Schedule::kFixed);
  config.split_tokens = 96;
  expect_refused(config, batch, {"100 new tokens", "96"}, nullptr, {2, 100, 2, 4},
                 ErrorCode::kUnsupported);
  EXPECT_EQ(plan_of(config, OwnedBatch({96}, {0}), {2, 96, 2, 4}).new_token_slots().size(), 1u);
}

TEST(PlanConfig, RefusesWhatNoBatchCanBePlannedWith) {
  const OwnedBatch batch({1}, {1});
  expect_refused(make_config(15, 16), batch, {"workspace_tokens is 15", "16"});
  expect_refused(make_config(16, 0), batch, {"page_size is 0", "1"});
  PlanConfig config = make_config(64, 16, Schedule::kFixed);
  config.split_tokens = 24;
  expect_refused(config, batch, {"split_tokens is 24", "16"});
  config.split_tokens = 80;
  expect_refused(config, batch, {"split_tokens is 80", "64"});
  config.split_tokens = -16;
  expect_refused(config, batch, {"split_tokens is -16"});
  config = make_config(64, 16, static_cast<Schedule>(3));
  expect_refused(config, batch, {"unknown schedule 3"});
  config = make_config(64, 16);
  config.path = static_cast<PathPolicy>(7);
  expect_refused(config, batch, {"unknown path policy 7"});
  config = make_config(64, 16);
  config.dims.num_heads = 0;
  expect_refused(config, batch, {"num_heads is 0"});
  config = make_config(64, 16);
  config.shard = {2, 2, 1};
  expect_refused(config, batch, {"rank 2", "[0, 2)"});
  config.shard = {0, 0, 1};
  expect_refused(config, batch, {"world is 0"});
  config.shard = {2, 0, 0};
  expect_refused(config, batch, {"interleave is 0"});
}

TEST(PlanConfig, RefusesBadBatches) {
  const PlanConfig config = make_config(64, 16);
  expect_refused(config, OwnedBatch({1, -1}, {1, 1}), {"request 1", "from 1 to 0"});
  expect_refused(config, OwnedBatch({1, 1}, {1}), {"3 entries", "context_lens 1"});
  expect_refused(config, OwnedBatch({1, 1}, {1, -3}), {"request 1", "-3"});
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  expect_refused(config, OwnedBatch({1}, {kMax}), {"request 0", "2147483648", "2147483647"});
}

TEST(LargePlans, ReachTheInt32Limit) {
  // One context of 2^31 - 2 tokens, all schedules: positions near the limit don't wrap.
  const OwnedBatch batch({1}, {std::numeric_limits<int32_t>::max() - 1});
  for (const Schedule schedule : kSchedules) {
    for (const int32_t world : {1, 8}) {
      PlanConfig config = make_config(1 << 28, 64, schedule);
      config.split_tokens = schedule == Schedule::kFixed ? 1 << 28 : 0;
      config.shard = {world, 0, 64};
      const StepPlan plan = plan_of(config, batch);
      int64_t rows = 0;
      for (const Chunk& chunk : plan.chunks()) {
        EXPECT_GT(chunk.seq_tot, 0);
        EXPECT_LE(chunk.seq_tot, config.workspace_tokens);
        EXPECT_EQ(plan.host(chunk.starts)[0], rows);
        rows += chunk.seq_tot;
      }
      EXPECT_EQ(rows, local_length(batch.context_lens[0], config.shard));
      EXPECT_EQ(plan.num_context_tokens(), rows);
    }
  }
  PlanConfig config = make_config(std::numeric_limits<int32_t>::max(), 64);
  config.shard = {std::numeric_limits<int32_t>::max(), 0, std::numeric_limits<int32_t>::max()};
  EXPECT_EQ(plan_of(config, batch).chunks().size(), 1u);
}

}  // namespace
}  // namespace mla
