// What each rank of a context-parallel group does of a step: every rank derives the same schedule,
// owners, sizes and collectives from the same global batch.
//
//   RankPlan plan;  // reused from step to step
//   build_rank_plan(parallel, config, format, batch, /*table=*/nullptr, plan);
//   for (const CollectiveCall& call : plan.collectives(DType::kBFloat16)) print(call);
#ifndef PARALLEL_PARTITION_H_
#define PARALLEL_PARTITION_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metadata/batch.h"
#include "metadata/context_parallel.h"
#include "metadata/model.h"
#include "metadata/plan.h"
#include "parallel/communicator.h"
#include "parallel/cost_model.h"
#include "parallel/query_split.h"

namespace mla {

enum class CachePlacement {
  kSharded,     // token t lives on rank (t / interleave) mod world
  kReplicated,  // every rank has the whole cache
};
std::string_view cache_placement_name(CachePlacement placement);  // "sharded", "replicated"
CachePlacement find_cache_placement(std::string_view name);       // throws kInvalidArgument

enum class QueryPlacement {
  kReplicated,  // every rank is given all new tokens, and gets all results
  kSplit,       // a rank is given its zigzag share alone, and gets the results of it
};
std::string_view query_placement_name(QueryPlacement placement);  // "replicated", "split"
QueryPlacement find_query_placement(std::string_view name);

enum class Strategy {
  kGatherKv,       // latent rows travel; every rank attends its own queries to all of them
  kMergePartials,  // partial results travel; every rank attends all queries to its own rows
};
std::string_view strategy_name(Strategy strategy);  // "gather_kv", "merge_partials"

enum class StrategyPolicy { kAuto, kGatherKv, kMergePartials };
StrategyPolicy find_strategy_policy(std::string_view name);  // and "auto"

struct ParallelConfig {
  ContextShard shard = {};  // interleave: kSharded only
  CachePlacement placement = CachePlacement::kSharded;
  QueryPlacement queries = QueryPlacement::kReplicated;
  StrategyPolicy strategy = StrategyPolicy::kAuto;
  CostRates rates = {};
  /// With replicated queries, partials of all ranks that take no more bytes than this together are
  /// simply gathered: every rank then merges all rows and attends all new tokens itself.
  int64_t small_exchange_bytes = 1 << 20;
};
void validate_parallel_config(const ParallelConfig& config);

/// A rank's plan of a step. Everything but the parts of `plan` that say so is the same on all
/// ranks.
struct RankPlan {
  StepPlan plan;  // of this rank
  Strategy strategy = Strategy::kGatherKv;
  bool exchanges_partials = false;  // kMergePartials, and some new token has context
  bool every_rank_finishes = true;  // replicated queries: each attends all new tokens itself
  int32_t block_rows =
      0;  // rows that a rank finishes at most: blocks of exchanges are padded to it
  int32_t stored_row_bytes = 0;       // bytes between rows of assembled chunks
  std::vector<int32_t> chunk_owners;  // [chunks]; empty: every rank attends every chunk
  std::vector<double> rank_seconds;   // [N] estimated context work of a layer
  std::vector<std::string> reasons;   // of the strategy, for people
  uint64_t hash = 0;                  // of all that ranks must agree on

  /// Longest over mean of rank_seconds; 1 where there is no context.
  double load() const;
  /// What every rank calls in one layer, in order. `out_dtype`: of the caller's `out`.
  std::vector<CollectiveCall> collectives(DType out_dtype) const;

  ParallelConfig config;

  // Working memory of build_rank_plan.
  ScheduleCuts cuts;
  std::vector<QueryRows> context_rows;
  std::vector<QueryRows> new_token_rows;
  std::vector<int32_t> context_row_starts;
  std::vector<int32_t> new_token_sources;
};

/// With Schedule::kFixed, replicated queries and a given strategy, a row's bits are a function of
/// its own request, as without ranks; every rank then finishes all rows, and kAuto is
/// kMergePartials. With split queries they are not: where a request is cut depends on the requests
/// before it.
///
/// `config.shard` and `config.path` are the partition's own business: the path is kExpand, which
/// `config` must allow. Throws kInvalidArgument, or kUnsupported for the absorb path and for
/// gather_kv over a sharded cache whose rows are no multiple of 16 bytes.
void build_rank_plan(const ParallelConfig& parallel, const PlanConfig& config, KvCacheFormat format,
                     const Batch& batch, const HostBlockTable* table, RankPlan& plan);

/// Compares the plan's hash over the group's connection, before any stream work. Throws
/// kCommunication on every rank where one is of another opinion.
void compare_plan_hash(Communicator& communicator, uint64_t hash);

}  // namespace mla

#endif  // PARALLEL_PARTITION_H_
