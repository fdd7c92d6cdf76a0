// Plans: the schedules of the field with their right values, and properties of random ones.
#include "metadata/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include "metadata/error.h"
#include "tests/metadata/plan_checker.h"

namespace mla {
namespace {

PlanConfig config_of(int32_t workspace_tokens, int32_t page_size,
                     Schedule schedule = Schedule::kPacked) {
  PlanConfig config;
  config.dims = find_preset("deepseek-v2-lite");
  config.workspace_tokens = workspace_tokens;
  config.page_size = page_size;
  config.schedule = schedule;
  return config;
}

StepPlan plan_of(const PlanConfig& config, const OwnedBatch& batch) {
  StepPlan plan;
  build_plan(config, batch.view(), nullptr, plan);
  return plan;
}

std::vector<int32_t> repeat(size_t n, int32_t value) { return std::vector<int32_t>(n, value); }

std::vector<int32_t> concat(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<int32_t> lens_of(const StepPlan& plan, const Chunk& chunk) {
  const auto lens = plan.host(chunk.seq_lens);
  return {lens.begin(), lens.end()};
}

constexpr Schedule kSchedules[] = {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed};

TEST(Plan, PacksOneLongAndManyShortContextsIntoOneChunk) {
  const OwnedBatch batch(repeat(32, 513), concat({60000}, repeat(31, 16)));
  const StepPlan plan = plan_of(config_of(65536, 16), batch);
  ASSERT_EQ(plan.chunks().size(), 1u);
  EXPECT_EQ(plan.chunks()[0].seq_tot, 60496);
  EXPECT_FALSE(plan.chunks()[0].has_empty_context);
  check_plan(plan, batch);
}

TEST(Plan, UniformSplitLeavesLaterChunksWithoutKeys) {
  const OwnedBatch batch(repeat(32, 513), concat({60000}, repeat(31, 16)));
  const StepPlan plan = plan_of(config_of(65536, 16, Schedule::kUniform), batch);
  ASSERT_EQ(plan.chunks().size(), 30u);  // ceil(60,000 / 2,048)
  EXPECT_FALSE(plan.chunks()[0].has_empty_context);
  for (const Chunk& chunk : plan.chunks().subspan(1)) {
    EXPECT_TRUE(chunk.has_empty_context);
    EXPECT_EQ(chunk.request_begin, 0);
    EXPECT_EQ(chunk.request_end, 32);
  }
  check_plan(plan, batch);
}

TEST(Plan, UniformTakesFewerRequestsWhereAPageEachDoesNotFit) {
  const OwnedBatch batch(repeat(300, 2), repeat(300, 48));
  for (Schedule schedule : kSchedules) {
    SCOPED_TRACE(schedule_name(schedule));
    check_plan(plan_of(config_of(256, 16, schedule), batch), batch);
  }
  EXPECT_EQ(plan_of(config_of(256, 16), batch).chunks().size(), 57u);  // ceil(14,400 / 256)
}

TEST(Plan, SchedulesOfTheField) {
  const std::vector<std::vector<int32_t>> contexts = {concat({960}, repeat(7, 16)),
                                                      {2048, 320},
                                                      {1024, 1024, 1024},
                                                      {37, 1000, 5},
                                                      {1},
                                                      {64, 0, 64, 0},
                                                      {0, 0, 7, 0, 0}};
  for (const std::vector<int32_t>& lens : contexts) {
    for (Schedule schedule : kSchedules) {
      SCOPED_TRACE(std::string(schedule_name(schedule)) + " " + testing::PrintToString(lens));
      const OwnedBatch batch(repeat(lens.size(), 3), lens);
      const StepPlan plan = plan_of(config_of(1024, 16, schedule), batch);
      check_plan(plan, batch);
      if (schedule == Schedule::kPacked) {
        int64_t total = 0;
        for (int32_t length : lens) total += length;
        EXPECT_LE(static_cast<int64_t>(plan.chunks().size()), (total + 1023) / 1024 + 1);
      }
    }
  }
}

TEST(Plan, TrimsContextFreeRequestsAtBothEndsAndKeepsThoseInside) {
  const OwnedBatch batch(repeat(6, 2), {0, 64, 0, 64, 0, 0});
  const StepPlan plan = plan_of(config_of(1024, 16), batch);
  ASSERT_EQ(plan.chunks().size(), 1u);
  const Chunk& chunk = plan.chunks()[0];
  EXPECT_EQ(chunk.request_begin, 1);
  EXPECT_EQ(chunk.request_end, 4);
  EXPECT_EQ(lens_of(plan, chunk), (std::vector<int32_t>{64, 0, 64}));
  EXPECT_TRUE(chunk.has_empty_context);
}

TEST(Plan, CutsOnlyWhereTheChunkIsFullAndAtPages) {
  const OwnedBatch batch({1, 1}, {100, 400});
  const StepPlan plan = plan_of(config_of(256, 16), batch);
  ASSERT_EQ(plan.chunks().size(), 2u);
  EXPECT_EQ(lens_of(plan, plan.chunks()[0]), (std::vector<int32_t>{100, 144}));
  EXPECT_EQ(lens_of(plan, plan.chunks()[1]), (std::vector<int32_t>{256}));
  check_plan(plan, batch);
}

TEST(Plan, FixedCutsDependOnTheRequestAlone) {
  PlanConfig config = config_of(4096, 16, Schedule::kFixed);
  config.split_tokens = 512;
  const auto cuts_of = [&](const OwnedBatch& batch, int32_t request) {
    const StepPlan plan = plan_of(config, batch);
    std::vector<int32_t> cuts;
    for (const Chunk& chunk : plan.chunks()) {
      if (request < chunk.request_begin || request >= chunk.request_end) continue;
      cuts.push_back(plan.host(chunk.starts)[request - chunk.request_begin]);
      cuts.push_back(plan.host(chunk.seq_lens)[request - chunk.request_begin]);
      if (cuts.back() == 0) cuts.resize(cuts.size() - 2);
    }
    const int32_t first = batch.query_start_loc[request];
    for (const NewTokenPiece& piece : plan.new_token_pieces()) {
      for (const AttentionItem& item : plan.host(piece.final_items)) {
        if (item.q_begin < first || item.q_begin >= batch.query_start_loc[request + 1]) continue;
        cuts.push_back(item.q_begin - first);
        cuts.push_back(item.q_len);
      }
    }
    return cuts;
  };
  const std::vector<int32_t> alone = cuts_of(OwnedBatch({1300}, {1337}), 0);
  EXPECT_EQ(alone,
            (std::vector<int32_t>{0, 512, 512, 512, 1024, 313, 0, 512, 512, 512, 1024, 276}));
  EXPECT_EQ(cuts_of(OwnedBatch({7, 0, 1300, 900}, {5000, 16, 1337, 3}), 2), alone);
  EXPECT_EQ(
      cuts_of(OwnedBatch(concat(repeat(31, 257), {1300}), concat(repeat(31, 999), {1337})), 31),
      alone);
}

TEST(Plan, DefaultSplitIsTheLargestPageMultiple) {
  EXPECT_EQ(effective_split_tokens(config_of(65536, 48)), 4080);
  EXPECT_EQ(effective_split_tokens(config_of(1000, 64)), 960);
  EXPECT_EQ(effective_split_tokens(config_of(16384, 8192)), 8192);
}

TEST(Plan, NewTokensAboveTheWorkspaceGoInPieces) {
  const OwnedBatch batch({100, 300, 20}, {0, 50, 0});
  const StepPlan plan = plan_of(config_of(128, 16), batch);
  ASSERT_EQ(plan.new_token_pieces().size(), 4u);
  EXPECT_EQ(plan.new_token_pieces()[0].carried_items.size, 1);
  check_plan(plan, batch);
}

TEST(Plan, ShardedLengthsOfOneToken) {
  PlanConfig config = config_of(65536, 16);
  const OwnedBatch batch(repeat(7, 33), repeat(7, 12345));
  for (int32_t rank = 0; rank < 8; ++rank) {
    config.shard = {8, rank, 1};
    const StepPlan plan = plan_of(config, batch);
    ASSERT_EQ(plan.chunks().size(), 1u);
    EXPECT_EQ(lens_of(plan, plan.chunks()[0]), repeat(7, rank == 0 ? 1544 : 1543));
    check_plan(plan, batch);
  }
}

TEST(Plan, AChunkCanBeEmptyOnOneRankOnly) {
  PlanConfig config = config_of(65536, 64);
  const OwnedBatch batch({5, 5}, {1000, 50});
  const int32_t first[] = {256, 256, 256, 232};
  for (int32_t rank = 0; rank < 4; ++rank) {
    config.shard = {4, rank, 64};
    const StepPlan plan = plan_of(config, batch);
    ASSERT_EQ(plan.chunks().size(), 1u);
    EXPECT_EQ(lens_of(plan, plan.chunks()[0]),
              (std::vector<int32_t>{first[rank], rank == 0 ? 50 : 0}));
    EXPECT_EQ(plan.chunks()[0].has_empty_context, rank != 0);
  }
}

TEST(Plan, DecodeContextParallelCaseOfTheField) {
  PlanConfig config = config_of(1024, 128);
  const OwnedBatch batch(repeat(3, 2), {3000, 200, 200});
  uint64_t hash = 0;
  for (int32_t rank = 0; rank < 2; ++rank) {
    config.shard = {2, rank, 64};
    const StepPlan plan = plan_of(config, batch);
    check_plan(plan, batch);
    if (rank > 0) {
      EXPECT_EQ(plan.hash(), hash);
    }
    hash = plan.hash();
  }
}

TEST(Plan, AbsorbedRequestsFillChunksOfTheirOwn) {
  PlanConfig config = config_of(4096, 16);
  config.path = PathPolicy::kAuto;
  const OwnedBatch batch({1000, 4, 1000, 300}, {3000, 3000, 500, 64});
  const StepPlan plan = plan_of(config, batch);
  ASSERT_EQ(plan.chunks().size(), 2u);
  EXPECT_EQ(plan.chunks()[0].path, Path::kExpand);
  EXPECT_EQ(lens_of(plan, plan.chunks()[0]), (std::vector<int32_t>{3000, 0, 500, 64}));
  EXPECT_TRUE(plan.chunks()[0].has_empty_context);
  EXPECT_EQ(plan.chunks()[1].path, Path::kAbsorb);
  EXPECT_EQ(lens_of(plan, plan.chunks()[1]), (std::vector<int32_t>{3000}));
  check_plan(plan, batch);
}

TEST(Plan, PathsBreakEvenWhereTheFlopsDo) {
  const ModelDims dims = find_preset("deepseek-v3");
  for (int32_t k : {64, 171, 1024, 65536, 1 << 20}) {
    // The count solved for q: L(P+V)k / ((2L + Rr - P - Rr - V)k + L(P+V)) = 170.7k / (k + 170.7)
    const double even = 131072.0 * k / (768.0 * k + 131072.0);
    EXPECT_EQ(cheaper_path(dims, static_cast<int32_t>(even) - 1, k), Path::kAbsorb) << k;
    EXPECT_EQ(cheaper_path(dims, static_cast<int32_t>(even) + 1, k), Path::kExpand) << k;
  }
}

TEST(Plan, EmptyBatches) {
  for (Schedule schedule : kSchedules) {
    for (const OwnedBatch& batch :
         {OwnedBatch({}, {}), OwnedBatch({0, 0}, {0, 0}), OwnedBatch({0}, {100})}) {
      const StepPlan plan = plan_of(config_of(64, 16, schedule), batch);
      EXPECT_TRUE(plan.new_token_pieces().empty());
      check_plan(plan, batch);
    }
    StepPlan plan;
    build_plan(config_of(64, 16, schedule), Batch{}, nullptr, plan);
    EXPECT_EQ(plan.num_requests(), 0);
  }
}

TEST(Plan, RandomPlansHoldEveryRowOnce) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto pick = [&](std::vector<int32_t> values) { return values[random() % values.size()]; };
  for (int round = 0; round < 400; ++round) {
    PlanConfig config = config_of(0, pick({1, 16, 64, 128}), kSchedules[random() % 3]);
    config.workspace_tokens = config.page_size * pick({1, 2, 3, 7, 40}) + pick({0, 0, 1, 13});
    config.path =
        std::array{PathPolicy::kExpand, PathPolicy::kAbsorb, PathPolicy::kAuto}[random() % 3];
    config.shard.world = pick({1, 1, 2, 3, 4, 8});
    config.shard.interleave = pick({1, 16, 64});
    std::vector<int32_t> query_lens;
    std::vector<int32_t> contexts;
    for (int32_t r = pick({1, 2, 5, 20}); r > 0; --r) {
      query_lens.push_back(pick({0, 1, 2, 3, 17, 300}));
      contexts.push_back(pick({0, 0, 1, config.shard.world - 1, 15, 64, 129, 1000, 2500}));
    }
    const OwnedBatch batch(query_lens, contexts);
    std::vector<int64_t> local(contexts.size(), 0);
    uint64_t hash = 0;
    size_t num_chunks = 0;
    for (int32_t rank = 0; rank < config.shard.world; ++rank) {
      config.shard.rank = rank;
      const StepPlan plan = plan_of(config, batch);
      check_plan(plan, batch);
      if (rank > 0) {
        EXPECT_EQ(plan.hash(), hash);
        EXPECT_EQ(plan.chunks().size(), num_chunks);
      }
      hash = plan.hash();
      num_chunks = plan.chunks().size();
      const auto context_start_loc = plan.host(plan.context_start_loc());
      for (size_t r = 0; r < contexts.size(); ++r) {
        local[r] += context_start_loc[r + 1] - context_start_loc[r];
      }
    }
    for (size_t r = 0; r < contexts.size(); ++r) EXPECT_EQ(local[r], contexts[r]);
    if (HasFailure()) FAIL() << "round " << round;
  }
}

TEST(Plan, CarriesTheUsedPartOfAHostTable) {
  const OwnedBatch batch({1, 1}, {33, 5});
  const std::vector<int32_t> ids = {4, 9, 7, -5, 3, -5, -5, -5};
  const HostBlockTable table = {ids.data(), 2, 3, 4};
  StepPlan plan;
  build_plan(config_of(64, 16), batch.view(), &table, plan);
  EXPECT_EQ(plan.block_table_stride(), 3);
  const auto carried = plan.host(plan.block_table());
  EXPECT_EQ((std::vector<int32_t>{carried.begin(), carried.end()}),
            (std::vector<int32_t>{4, 9, 7, 3, 0, 0}));
}

TEST(ShapeClass, FixesEveryOffset) {
  const PlanConfig config = config_of(256, 16);
  const ShapeClass shape_class = {8, 600, 6, 40};
  const std::vector<int32_t> ids(8 * 40, 1);
  const HostBlockTable table = {ids.data(), 8, 40, 40};
  StepPlan a;
  StepPlan b;
  build_plan(config, OwnedBatch({3, 200}, {600, 30}).view(), &table, a, shape_class);
  build_plan(config, OwnedBatch({1, 0, 0, 5, 590}, {0, 1, 500, 0, 0}).view(), &table, b,
             shape_class);
  EXPECT_EQ(a.block().size(), b.block().size());
  EXPECT_EQ(static_cast<int64_t>(a.block().size()), plan_block_bytes(config, shape_class));
  ASSERT_EQ(a.chunk_slots().size(), 6u);
  ASSERT_EQ(b.chunk_slots().size(), 6u);
  for (size_t c = 0; c < 6; ++c) {
    EXPECT_EQ(a.chunk_slots()[c].items.offset, b.chunk_slots()[c].items.offset);
    EXPECT_EQ(a.chunk_slots()[c].cu_seq_lens.offset, b.chunk_slots()[c].cu_seq_lens.offset);
    EXPECT_EQ(a.chunk_slots()[c].counts.offset, b.chunk_slots()[c].counts.offset);
  }
  ASSERT_EQ(a.new_token_slots().size(), 3u);
  ASSERT_EQ(b.new_token_slots().size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(a.new_token_slots()[i].final_items.offset, b.new_token_slots()[i].final_items.offset);
  }
  for (const Chunk& chunk : a.chunk_slots().subspan(a.chunks().size())) {
    EXPECT_EQ(a.host(chunk.counts)[0].items, 0);
    EXPECT_EQ(a.host(chunk.counts)[0].rows, 0);
  }
}

TEST(ShapeClass, RefusesPlansOutsideByName) {
  const PlanConfig config = config_of(256, 16);
  const ShapeClass shape_class = {2, 100, 2, 40};
  const auto refused = [&](const OwnedBatch& batch, const std::string& words) {
    StepPlan plan;
    try {
      build_plan(config, batch.view(), nullptr, plan, shape_class);
      ADD_FAILURE() << "not refused: " << words;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
    EXPECT_TRUE(plan.chunks().empty());
    EXPECT_TRUE(plan.block().empty());
  };
  refused(OwnedBatch({1, 1, 1}, {0, 0, 0}), "3 requests");
  refused(OwnedBatch({101}, {0}), "101 new tokens");
  refused(OwnedBatch({1}, {600}), "3 chunks");
}

TEST(PlanConfig, RefusesWhatNoBatchCanBePlannedWith) {
  const auto refused = [](const PlanConfig& config, const std::string& words) {
    StepPlan plan;
    try {
      build_plan(config, OwnedBatch({1}, {1}).view(), nullptr, plan);
      ADD_FAILURE() << "not refused: " << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  refused(config_of(15, 16), "workspace_tokens is 15");
  refused(config_of(16, 0), "page_size is 0");
  PlanConfig config = config_of(64, 16, Schedule::kFixed);
  config.split_tokens = 24;
  refused(config, "split_tokens is 24");
  config.split_tokens = 80;
  refused(config, "split_tokens is 80");
  config = config_of(64, 16);
  config.dims.num_heads = 0;
  refused(config, "num_heads is 0");
  config = config_of(64, 16);
  config.shard = {2, 2, 1};
  refused(config, "rank 2");
}

}  // namespace
}  // namespace mla
