// The plans of all ranks together, against brute force over every pair of query and key.
#include "parallel/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "metadata/error.h"
#include "parallel/in_process_communicator.h"
#include "tests/parallel/ranks.h"

namespace mla::test {
namespace {

constexpr ModelDims kDims{4, 24, 8, 40, 48};
constexpr ModelDims kDeepSeek{128, 128, 64, 128, 512};
constexpr CachePlacement kPlacements[] = {CachePlacement::kSharded, CachePlacement::kReplicated};
constexpr QueryPlacement kQueries[] = {QueryPlacement::kReplicated, QueryPlacement::kSplit};
constexpr StrategyPolicy kStrategies[] = {StrategyPolicy::kGatherKv, StrategyPolicy::kMergePartials,
                                          StrategyPolicy::kAuto};
constexpr Schedule kSchedules[] = {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed};

struct OwnedBatch {
  std::vector<int32_t> query_start_loc = {0};
  std::vector<int32_t> context_lens;

  OwnedBatch(const std::vector<int32_t>& queries, std::vector<int32_t> contexts)
      : context_lens(std::move(contexts)) {
    for (const int32_t q : queries) query_start_loc.push_back(query_start_loc.back() + q);
  }
  Batch batch() const { return {query_start_loc, context_lens}; }
};

class PartitionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* given = std::getenv("MLA_TEST_SEED");
    seed_ = given == nullptr ? std::random_device{}() : std::stoull(given);
    random_.seed(seed_);
  }
  void TearDown() override {
    if (HasFailure()) std::printf("repeat with MLA_TEST_SEED=%llu\n", seed_);
  }
  int32_t random_int(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random_);
  }
  template <typename T, size_t kCount>
  T one_of(const T (&values)[kCount]) {
    return values[random_int(0, kCount - 1)];
  }

  OwnedBatch random_batch(int32_t longest_query, int32_t longest_context) {
    std::vector<int32_t> queries, contexts;
    for (int32_t n = random_int(0, 6); n > 0; --n) {
      queries.push_back(random_int(0, 2) == 0 ? random_int(0, 2) : random_int(0, longest_query));
      contexts.push_back(random_int(0, 2) == 0 ? random_int(0, 2) : random_int(0, longest_context));
    }
    return {queries, contexts};
  }

  ParallelConfig random_parallel(int32_t world) {
    ParallelConfig parallel;
    constexpr int32_t kInterleaves[] = {1, 3, 16, 64};
    parallel.shard = {world, 0, one_of(kInterleaves)};
    parallel.placement = one_of(kPlacements);
    parallel.queries = one_of(kQueries);
    parallel.strategy = one_of(kStrategies);
    parallel.small_exchange_bytes = random_int(0, 1) == 0 ? 0 : 20000;
    return parallel;
  }

  PlanConfig random_config() {
    constexpr int32_t kPages[] = {1, 16, 64};
    PlanConfig config;
    config.dims = kDims;
    config.page_size = one_of(kPages);
    config.workspace_tokens = config.page_size + random_int(0, 200);
    config.schedule = one_of(kSchedules);
    return config;
  }

  unsigned long long seed_ = 0;
  std::mt19937_64 random_;
};

std::vector<RankPlan> plan_ranks(ParallelConfig parallel, const PlanConfig& config,
                                 const Batch& batch, KvCacheFormat format = KvCacheFormat::kBf16) {
  std::vector<RankPlan> plans(static_cast<size_t>(parallel.shard.world));
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    parallel.shard.rank = static_cast<int32_t>(rank);
    build_rank_plan(parallel, config, format, batch, nullptr, plans[rank]);
  }
  return plans;
}

// --- Split queries ------------------------------------------------------------------------------

TEST_F(PartitionTest, SplitQueriesAreTheZigzagOfEveryRequest) {
  for (int round = 0; round < 200; ++round) {
    const OwnedBatch owned = random_batch(50, 5);
    const int32_t world = random_int(1, 8);
    std::vector<std::vector<int32_t>> owners;  // [request][position]
    for (int32_t r = 0; r < owned.batch().num_requests(); ++r) {
      owners.emplace_back(owned.batch().query_len(r), -1);
    }
    for (int32_t rank = 0; rank < world; ++rank) {
      int32_t row = 0;
      std::pair<int32_t, int32_t> last = {-1, -1};
      for (const QueryRows& rows : split_queries(owned.batch(), world, rank)) {
        ASSERT_LT(last, std::pair(rows.request, rows.position));
        last = {rows.request, rows.position};
        ASSERT_GT(rows.length, 0);
        ASSERT_EQ(rows.q_row, row);
        ASSERT_EQ(rows.out_row, row);
        row += rows.length;
        for (int32_t i = 0; i < rows.length; ++i) {
          ASSERT_EQ(owners[rows.request].at(rows.position + i), -1);
          owners[rows.request][rows.position + i] = rank;
        }
      }
      ASSERT_LE(row, max_split_rows(owned.batch().num_query_tokens(), world));
    }
    for (const std::vector<int32_t>& of : owners) {
      // Ascending ranks, then descending ones, each with its even share, give or take one a piece.
      const auto length = static_cast<int32_t>(of.size());
      ASSERT_TRUE(std::ranges::none_of(of, [](int32_t rank) { return rank < 0; }));
      const auto turn = std::ranges::max_element(of);
      ASSERT_TRUE(std::is_sorted(of.begin(), turn));
      ASSERT_TRUE(std::is_sorted(turn, of.end(), std::greater<>()));
      for (int32_t rank = 0; rank < world; ++rank) {
        const auto count = static_cast<int32_t>(std::ranges::count(of, rank));
        ASSERT_GE(count, length / (2 * world) * 2);
        ASSERT_LE(count, length / (2 * world) * 2 + 2);
      }
    }
  }
}

// --- Who attends what ---------------------------------------------------------------------------

/// Global positions of the rows of a chunk's request on one rank.
std::vector<int32_t> positions_of(const RankPlan& plan, const Chunk& chunk, int32_t j) {
  const int32_t start = plan.plan.host(chunk.starts)[j];
  const int32_t length = plan.plan.host(chunk.seq_lens)[j];
  const ContextShard shard = plan.plan.config().shard;
  std::vector<int32_t> positions;
  if (shard.world == 1 || plan.strategy == Strategy::kGatherKv) {
    for (int32_t i = 0; i < length; ++i) positions.push_back(start + i);
    return positions;
  }
  for (int32_t t = 0; static_cast<int32_t>(positions.size()) < length; ++t) {
    if (owner_rank(t, shard) == shard.rank && local_position(t, shard) >= start) {
      positions.push_back(t);
    }
  }
  return positions;
}

using Token = std::pair<int32_t, int32_t>;  // request, position

/// The token of each row that queries come from and of each row that results go to, by the row's
/// number: of the context's part or of the new tokens'.
struct RowTokens {
  std::map<int32_t, Token> queries, results;
};

RowTokens context_tokens(const std::vector<RankPlan>& plans, size_t rank, const Batch& batch) {
  const RankPlan& plan = plans[rank];
  const auto world = static_cast<int32_t>(plans.size());
  RowTokens tokens;
  if (plan.config.queries == QueryPlacement::kReplicated) {
    for (int32_t r = 0; r < batch.num_requests(); ++r) {
      for (int32_t i = 0; i < batch.query_len(r); ++i) {
        tokens.queries[batch.query_start_loc[r] + i] = {r, i};
      }
    }
    tokens.results = tokens.queries;
    return tokens;
  }
  for (int32_t owner = 0; owner < world; ++owner) {
    if (!plan.exchanges_partials && owner != static_cast<int32_t>(rank)) continue;
    const int32_t block = plan.exchanges_partials ? owner * plan.block_rows : 0;
    for (const QueryRows& rows : split_queries(batch, world, owner)) {
      for (int32_t i = 0; i < rows.length; ++i) {
        tokens.queries[block + rows.q_row + i] = {rows.request, rows.position + i};
      }
    }
  }
  tokens.results = tokens.queries;
  return tokens;
}

/// Counts, over all ranks, how often each new token meets each context token.
void check_context(const std::vector<RankPlan>& plans, const Batch& batch) {
  const bool once = plans[0].exchanges_partials;
  std::map<std::tuple<int32_t, int32_t, int32_t>, int32_t> meetings;  // request, query, position
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    const StepPlan& plan = plans[rank].plan;
    const RowTokens tokens = context_tokens(plans, rank, batch);
    const int32_t row_starts = batch.num_requests() + 1;
    for (const Chunk& chunk : plan.chunks()) {
      ASSERT_LE(chunk.seq_tot, plan.config().workspace_tokens);
      const auto cu_seq_lens = plan.host(chunk.cu_seq_lens);
      bool some_empty = false;
      for (int32_t j = 0; j < chunk.request_end - chunk.request_begin; ++j) {
        some_empty |= cu_seq_lens[j + 1] == cu_seq_lens[j];
      }
      ASSERT_EQ(chunk.has_empty_context, some_empty);
      for (const AttentionItem& item : plan.host(chunk.items)) {
        ASSERT_EQ(item.causal_offset, kUnmasked);
        ASSERT_GT(item.q_len, 0);
        ASSERT_GT(item.k_len, 0);
        ASSERT_LE(item.q_len, chunk.max_query_len);
        ASSERT_LE(item.k_len, chunk.max_seq_len);
        const int32_t request = tokens.queries.at(item.q_begin).first;
        const int32_t j = request - chunk.request_begin;
        ASSERT_EQ(item.k_begin, cu_seq_lens[j]);
        ASSERT_EQ(item.k_len, cu_seq_lens[j + 1] - cu_seq_lens[j]);
        const std::vector<int32_t> positions = positions_of(plans[rank], chunk, j);
        for (int32_t i = 0; i < item.q_len; ++i) {
          const Token query = tokens.queries.at(item.q_begin + i);
          ASSERT_EQ(query.first, request);
          ASSERT_EQ(tokens.results.at(item.out_row + i), query);
          // The row lies where the mask and the merges look for the request's.
          bool found = false;
          for (int32_t block = 0; block < plan.num_row_blocks(); ++block) {
            const auto starts =
                plan.host(plan.context_row_starts()).subspan(block * row_starts, row_starts);
            found |= starts[request] <= item.out_row + i && item.out_row + i < starts[request + 1];
          }
          ASSERT_TRUE(found);
          for (const int32_t position : positions) {
            ++meetings[{request, query.second, position}];
          }
        }
      }
    }
  }
  const auto world = static_cast<int32_t>(plans.size());
  const int32_t times = once || plans[0].config.queries == QueryPlacement::kSplit ? 1 : world;
  size_t expected = 0;
  for (int32_t r = 0; r < batch.num_requests(); ++r) {
    expected += size_t{1} * batch.query_len(r) * batch.context_lens[r];
  }
  ASSERT_EQ(meetings.size(), expected);
  for (const auto& [meeting, count] : meetings) ASSERT_EQ(count, times);
}

/// Every new token is finished where it should be, by the keys up to its own.
void check_new_tokens(const std::vector<RankPlan>& plans, const Batch& batch) {
  const auto world = static_cast<int32_t>(plans.size());
  std::map<Token, int32_t> finished;
  for (int32_t rank = 0; rank < world; ++rank) {
    const RankPlan& rank_plan = plans[rank];
    const StepPlan& plan = rank_plan.plan;
    std::map<int32_t, Token> by_query, by_result;
    for (const QueryRows& rows : rank_plan.new_token_rows) {
      for (int32_t i = 0; i < rows.length; ++i) {
        by_query[rows.q_row + i] = by_result[rows.out_row + i] = {rows.request, rows.position + i};
      }
    }
    ASSERT_LE(plan.num_out_rows(), rank_plan.block_rows);
    ASSERT_EQ(plan.num_out_rows(), static_cast<int32_t>(by_result.size()));
    std::map<std::pair<Token, Token>, int32_t> meetings;
    std::map<int32_t, Token> keys;  // by row
    for (int32_t r = 0; r < batch.num_requests(); ++r) {
      for (int32_t i = 0; i < batch.query_len(r); ++i) {
        keys[batch.query_start_loc[r] + i] = {r, i};
      }
    }
    int32_t next_out_row = 0;
    for (const NewTokenPiece& piece : plan.new_token_pieces()) {
      ASSERT_LE(piece.row_end - piece.row_begin, plan.config().workspace_tokens);
      for (const bool final : {false, true}) {
        for (const AttentionItem& item :
             plan.host(final ? piece.final_items : piece.carried_items)) {
          ASSERT_LE(item.q_len, piece.max_query_len);
          ASSERT_LE(item.k_len, piece.max_seq_len);
          ASSERT_LE(piece.row_begin + item.k_begin + item.k_len, piece.row_end);
          if (final) {
            ASSERT_EQ(item.out_row, next_out_row);
            next_out_row += item.q_len;
            ASSERT_GE(item.out_row, piece.out_row_begin);
            ASSERT_LE(next_out_row, piece.out_row_end);
          }
          for (int32_t i = 0; i < item.q_len; ++i) {
            const Token query = by_query.at(item.q_begin + i);
            ASSERT_EQ(by_result.at(item.out_row + i), query);
            if (final) ++finished[query];
            for (int32_t k = 0; k < item.k_len && k <= int64_t{i} + item.causal_offset; ++k) {
              ++meetings[{query, keys.at(piece.row_begin + item.k_begin + k)}];
            }
          }
        }
      }
    }
    ASSERT_EQ(next_out_row, plan.num_out_rows());
    size_t expected = 0;
    for (const auto& [row, token] : by_result) expected += token.second + 1;
    ASSERT_EQ(meetings.size(), expected);
    for (const auto& [pair, count] : meetings) {
      ASSERT_EQ(count, 1);
      ASSERT_EQ(pair.first.first, pair.second.first);
      ASSERT_LE(pair.second.second, pair.first.second);
    }
  }
  ASSERT_EQ(static_cast<int32_t>(finished.size()), batch.num_query_tokens());
  for (const auto& [token, count] : finished) {
    ASSERT_EQ(count, plans[0].every_rank_finishes ? world : 1);
  }
}

/// What ranks send of an assembled chunk, put in order by the sources, is the context in order.
void check_assembly(const std::vector<RankPlan>& plans, const Batch& batch) {
  const auto world = static_cast<int32_t>(plans.size());
  const RankPlan& first = plans[0];
  if (first.config.placement != CachePlacement::kSharded || first.strategy != Strategy::kGatherKv) {
    return;
  }
  for (size_t c = 0; c < first.plan.chunks().size(); ++c) {
    std::map<int32_t, Token> sent;  // by row of what arrives
    bool seen = false;
    for (int32_t rank = 0; rank < world; ++rank) {
      const StepPlan& plan = plans[rank].plan;
      const Chunk& chunk = plan.chunks()[c];
      for (int32_t r = chunk.request_begin; r < chunk.request_end; ++r) {
        seen |= plan.host(chunk.seq_lens)[r - chunk.request_begin] > 0 && batch.query_len(r) > 0;
      }
      const int32_t padded = chunk.assembly.padded_rows;
      ASSERT_EQ(padded > 0, seen);
      if (padded == 0) continue;
      ASSERT_LE(chunk.stored_rows, padded);
      const auto cu = plan.host(chunk.stored_cu_seq_lens);
      ASSERT_EQ(cu.back(), chunk.stored_rows);
      for (int32_t j = 0; j + 1 < static_cast<int32_t>(cu.size()); ++j) {
        for (int32_t i = cu[j]; i < cu[j + 1]; ++i) {
          const int32_t local = plan.host(chunk.stored_starts)[j] + i - cu[j];
          int32_t t = 0;
          const ContextShard shard{world, rank, first.config.shard.interleave};
          while (owner_rank(t, shard) != rank || local_position(t, shard) != local) ++t;
          sent[rank * padded + i] = {chunk.request_begin + j, t};
        }
      }
    }
    if (!seen) continue;
    const Chunk& chunk = first.plan.chunks()[c];
    const auto sources = first.plan.host(chunk.assembly.sources);
    ASSERT_EQ(static_cast<int32_t>(sources.size()), chunk.seq_tot);
    const auto cu = first.plan.host(chunk.cu_seq_lens);
    for (int32_t j = 0; j + 1 < static_cast<int32_t>(cu.size()); ++j) {
      for (int32_t i = cu[j]; i < cu[j + 1]; ++i) {
        const Token token{chunk.request_begin + j, first.plan.host(chunk.starts)[j] + i - cu[j]};
        ASSERT_EQ(sent.at(sources[i]), token);
      }
    }
  }
}

void check_sources(const std::vector<RankPlan>& plans, const Batch& batch) {
  if (plans[0].config.queries != QueryPlacement::kSplit) return;
  const auto world = static_cast<int32_t>(plans.size());
  for (int32_t rank = 0; rank < world; ++rank) {
    for (const QueryRows& rows : split_queries(batch, world, rank)) {
      for (int32_t i = 0; i < rows.length; ++i) {
        ASSERT_EQ(
            plans[0].new_token_sources[batch.query_start_loc[rows.request] + rows.position + i],
            rank * plans[0].block_rows + rows.q_row + i);
      }
    }
  }
}

TEST_F(PartitionTest, EveryPairMeetsOnce) {
  for (int round = 0; round < 400; ++round) {
    const OwnedBatch owned = random_batch(20, 150);
    const ParallelConfig parallel = random_parallel(random_int(1, 8));
    const PlanConfig config = random_config();
    SCOPED_TRACE(fmt::format("round {}: N {} I {} {} {} W {} page {} {}", round,
                             parallel.shard.world, parallel.shard.interleave,
                             cache_placement_name(parallel.placement),
                             query_placement_name(parallel.queries), config.workspace_tokens,
                             config.page_size, schedule_name(config.schedule)));
    const std::vector<RankPlan> plans = plan_ranks(parallel, config, owned.batch());
    ASSERT_NO_FATAL_FAILURE(check_context(plans, owned.batch()));
    ASSERT_NO_FATAL_FAILURE(check_new_tokens(plans, owned.batch()));
    ASSERT_NO_FATAL_FAILURE(check_assembly(plans, owned.batch()));
    ASSERT_NO_FATAL_FAILURE(check_sources(plans, owned.batch()));
  }
}

TEST_F(PartitionTest, EveryRankCallsTheSameCollectives) {
  int64_t with_calls = 0;
  for (int round = 0; round < 10000; ++round) {
    const OwnedBatch owned = random_batch(300, 3000);
    const ParallelConfig parallel = random_parallel(random_int(2, 8));
    PlanConfig config = random_config();
    config.workspace_tokens *= 10;
    const std::vector<RankPlan> plans = plan_ranks(parallel, config, owned.batch());
    const std::vector<CollectiveCall> calls = plans[0].collectives(DType::kBFloat16);
    with_calls += calls.size() > 1;
    for (const RankPlan& plan : plans) {
      ASSERT_EQ(plan.collectives(DType::kBFloat16), calls) << round;
      ASSERT_EQ(plan.hash, plans[0].hash) << round;
      ASSERT_EQ(plan.load(), plans[0].load()) << round;
    }
    for (const CollectiveCall& call : calls) ASSERT_GT(call.bytes, 0u);
  }
  EXPECT_GT(with_calls, 5000);
}

// --- Balance, values of the field, opinions -----------------------------------------------------

TEST_F(PartitionTest, ReplicatedChunksAreSharedOutEvenly) {
  ParallelConfig parallel{.shard = {8, 0, 1},
                          .placement = CachePlacement::kReplicated,
                          .strategy = StrategyPolicy::kMergePartials};
  const PlanConfig config{.dims = kDeepSeek, .workspace_tokens = 65536, .page_size = 64};
  const OwnedBatch equal(std::vector<int32_t>(8, 512), std::vector<int32_t>(8, 20000));
  EXPECT_LE(plan_ranks(parallel, config, equal.batch())[0].load(), 1.05);
  const OwnedBatch one({2048}, {131072});
  EXPECT_LE(plan_ranks(parallel, config, one.batch())[0].load(), 1.15);
  for (int round = 0; round < 50; ++round) {
    std::vector<int32_t> queries, contexts;
    for (int32_t n = random_int(4, 40); n > 0; --n) {
      queries.push_back(random_int(1, 2000));
      contexts.push_back(random_int(5000, 60000));
    }
    parallel.shard.world = random_int(2, 8);
    const OwnedBatch mixed(queries, contexts);
    EXPECT_LE(plan_ranks(parallel, config, mixed.batch())[0].load(), 1.15);
  }
}

TEST_F(PartitionTest, LocalLengthsOfTheField) {
  const ParallelConfig by_one{.shard = {8, 0, 1}, .strategy = StrategyPolicy::kMergePartials};
  const OwnedBatch seven(std::vector<int32_t>(7, 33), std::vector<int32_t>(7, 12345));
  const auto plans = plan_ranks(by_one, {.dims = kDims, .workspace_tokens = 65536, .page_size = 64},
                                seven.batch());
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    ASSERT_EQ(plans[rank].plan.chunks().size(), 1u);
    for (const int32_t length : plans[rank].plan.host(plans[rank].plan.chunks()[0].seq_lens)) {
      EXPECT_EQ(length, rank == 0 ? 1544 : 1543);
    }
  }

  const ParallelConfig by_page{.shard = {4, 0, 64}, .strategy = StrategyPolicy::kMergePartials};
  const OwnedBatch two({5, 3}, {1000, 50});
  const auto ranks =
      plan_ranks(by_page, {.dims = kDims, .workspace_tokens = 65536, .page_size = 64}, two.batch());
  const std::vector<int32_t> first = {256, 256, 256, 232}, second = {50, 0, 0, 0};
  for (size_t rank = 0; rank < 4; ++rank) {
    const Chunk& chunk = ranks[rank].plan.chunks()[0];
    EXPECT_EQ(ranks[rank].plan.host(chunk.seq_lens)[0], first[rank]);
    EXPECT_EQ(ranks[rank].plan.host(chunk.seq_lens)[1], second[rank]);
    EXPECT_EQ(chunk.has_empty_context, rank > 0);
  }
}

TEST_F(PartitionTest, AutoFollowsTheRates) {
  ParallelConfig parallel{.shard = {8, 0, 64}, .queries = QueryPlacement::kSplit};
  const PlanConfig config{.dims = kDeepSeek, .workspace_tokens = 65536, .page_size = 64};
  // Few queries over a long context: their partials are small, and 8 ranks share its expansion.
  const OwnedBatch few({256}, {131072});
  EXPECT_EQ(plan_ranks(parallel, config, few.batch())[0].strategy, Strategy::kMergePartials);
  // Many queries over a short one: partials are large beside its latent rows.
  const OwnedBatch many({32768}, {4096});
  EXPECT_EQ(plan_ranks(parallel, config, many.batch())[0].strategy, Strategy::kGatherKv);
  // A link so fast that traffic is free leaves the work alone to decide.
  parallel.rates.link_bytes_per_second = 1e18;
  parallel.rates.collective_seconds = 1e-12;
  EXPECT_EQ(plan_ranks(parallel, config, many.batch())[0].strategy, Strategy::kMergePartials);
  EXPECT_EQ(plan_ranks(parallel, config, many.batch())[0].reasons.size(), 3u);
}

TEST_F(PartitionTest, AnythingThatMattersChangesTheHash) {
  const OwnedBatch owned({9, 4}, {100, 37});
  const OwnedBatch other({9, 4}, {100, 38});
  const ParallelConfig parallel{.shard = {3, 0, 16}};
  const PlanConfig config{.dims = kDims, .workspace_tokens = 64, .page_size = 16};
  std::set<uint64_t> hashes;
  const auto add = [&](const ParallelConfig& p, const PlanConfig& c, const OwnedBatch& batch,
                       KvCacheFormat format = KvCacheFormat::kBf16) {
    hashes.insert(plan_ranks(p, c, batch.batch(), format)[0].hash);
  };
  add(parallel, config, owned);
  add(parallel, config, owned);
  EXPECT_EQ(hashes.size(), 1u);
  add(parallel, config, other);
  ParallelConfig p = parallel;
  p.shard.interleave = 8;
  add(p, config, owned);
  p = parallel;
  p.shard.world = 4;
  add(p, config, owned);
  p = parallel;
  p.placement = CachePlacement::kReplicated;
  add(p, config, owned);
  p = parallel;
  p.queries = QueryPlacement::kSplit;
  add(p, config, owned);
  p = parallel;
  p.strategy = StrategyPolicy::kMergePartials;
  p.small_exchange_bytes = 0;
  add(p, config, owned);
  p.small_exchange_bytes = 1 << 30;
  add(p, config, owned);
  PlanConfig c = config;
  c.workspace_tokens = 65;
  add(parallel, c, owned);
  c = config;
  c.schedule = Schedule::kUniform;
  add(parallel, c, owned);
  add(parallel, config, owned, KvCacheFormat::kFp8E4M3);
  EXPECT_EQ(hashes.size(), 11u);
}

TEST_F(PartitionTest, AnotherPlanIsAnErrorOnAllRanks) {
  InProcessGroup group(4);
  const auto outcomes = run_ranks(4, [&](int32_t rank) {
    const auto communicator = group.join(rank);
    compare_plan_hash(*communicator, 7);
    compare_plan_hash(*communicator, rank == 2 ? 8 : 7);
  });
  for (const RankOutcome& outcome : outcomes) {
    EXPECT_TRUE(outcome.communication_error);
    EXPECT_NE(outcome.message.find("rank 2 has plan 0000000000000008"), std::string::npos)
        << outcome.message;
  }
}

TEST_F(PartitionTest, RefusesByName) {
  const OwnedBatch owned({9}, {100});
  const auto expect = [&](ErrorCode code, const ParallelConfig& parallel, const PlanConfig& config,
                          KvCacheFormat format = KvCacheFormat::kBf16) {
    try {
      plan_ranks(parallel, config, owned.batch(), format);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
    }
  };
  const ParallelConfig parallel{.shard = {2, 0, 16}};
  const PlanConfig config{.dims = kDims, .workspace_tokens = 64, .page_size = 16};
  PlanConfig absorb = config;
  absorb.path = PathPolicy::kAbsorb;
  expect(ErrorCode::kUnsupported, parallel, absorb);
  ParallelConfig p = parallel;
  p.strategy = StrategyPolicy::kGatherKv;
  expect(ErrorCode::kUnsupported, p, config, KvCacheFormat::kFp8E4M3);  // rows of 56 bytes
  p = parallel;
  p.rates.gemm_flops = 0.0;
  expect(ErrorCode::kInvalidArgument, p, config);
  p = parallel;
  p.small_exchange_bytes = -1;
  expect(ErrorCode::kInvalidArgument, p, config);
  p = parallel;
  p.shard.interleave = 0;
  expect(ErrorCode::kInvalidArgument, p, config);
  EXPECT_THROW(find_strategy_policy("best"), Error);
  EXPECT_THROW(find_cache_placement(""), Error);
  EXPECT_THROW(find_query_placement("zigzag"), Error);
}

}  // namespace
}  // namespace mla::test
