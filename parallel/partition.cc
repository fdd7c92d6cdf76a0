#include "parallel/partition.h"

#include <algorithm>
#include <numeric>

#include "metadata/error.h"

namespace mla {
/// Fills a RankPlan; the steps of build() are its methods, top to bottom.
class RankPlanBuilder {
 public:
  RankPlanBuilder(const ParallelConfig& parallel, const PlanConfig& config, KvCacheFormat format,
                  const Batch& batch, RankPlan& plan)
      : parallel_(parallel),
        config_(config),
        batch_(batch),
        plan_(plan),
        world_(parallel.shard.world),
        rank_(parallel.shard.rank),
        format_(format) {
    config_.shard = sharded() ? parallel.shard : ContextShard{};
  }

  void build(const HostBlockTable* table) {
    plan_.config = parallel_;
    if (config_.path == PathPolicy::kAbsorb) {
      throw_error(ErrorCode::kUnsupported,
                  "the absorb path is not served under context parallelism: use expand or auto");
    }
    config_.path = PathPolicy::kExpand;
    validate_plan_config(config_);
    validate_batch(batch_);
    kv_row_bytes_ = kv_cache_row_bytes(format_, config_.dims);
    sum_contexts();
    choose_strategy();
    choose_blocks();
    cut();
    share_rows();
    build_step_plan(table);
    estimate_ranks();
    set_hash();
  }

 private:
  bool sharded() const { return parallel_.placement == CachePlacement::kSharded; }
  bool split() const { return parallel_.queries == QueryPlacement::kSplit; }
  bool merges() const { return plan_.strategy == Strategy::kMergePartials; }
  bool assembles() const { return sharded() && !merges(); }
  int32_t num_requests() const { return batch_.num_requests(); }
  int32_t num_tokens() const { return batch_.num_query_tokens(); }
  /// Bytes of a row's partial result, of its result as bf16, and of its queries.
  double partial_bytes() const {
    return 4.0 * config_.dims.num_heads * (config_.dims.v_head_dim + 1);
  }
  double result_bytes() const {
    return config_.dims.num_heads * (2.0 * config_.dims.v_head_dim + 4.0);
  }
  double query_bytes() const { return 2.0 * config_.dims.num_heads * config_.dims.qk_head_dim(); }

  /// Context that no new token sees is attended by nobody.
  int32_t seen_context(int32_t r) const {
    return batch_.query_len(r) > 0 ? batch_.context_lens[r] : 0;
  }

  void sum_contexts() {
    for (int32_t r = 0; r < num_requests(); ++r) {
      context_tokens_ += seen_context(r);
      scores_ += double(batch_.query_len(r)) * seen_context(r);
    }
  }

  bool rows_can_travel() const { return !sharded() || kv_row_bytes_ % 16 == 0; }

  void choose_strategy() {
    const Cost gather = gather_cost();
    const Cost merge = merge_cost();
    plan_.reasons.clear();
    plan_.reasons.push_back("gather_kv " + gather.describe(parallel_.rates));
    plan_.reasons.push_back("merge_partials " + merge.describe(parallel_.rates));
    switch (parallel_.strategy) {
      case StrategyPolicy::kGatherKv:
        if (!rows_can_travel()) {
          throw_error(ErrorCode::kUnsupported,
                      "gather_kv is not served for cache rows of {} bytes: they must be a multiple "
                      "of 16",
                      kv_row_bytes_);
        }
        plan_.strategy = Strategy::kGatherKv;
        plan_.reasons.push_back("gather_kv was asked for");
        return;
      case StrategyPolicy::kMergePartials:
        plan_.strategy = Strategy::kMergePartials;
        plan_.reasons.push_back("merge_partials was asked for");
        return;
      case StrategyPolicy::kAuto:
        break;
    }
    if (!rows_can_travel()) {
      plan_.strategy = Strategy::kMergePartials;
      plan_.reasons.push_back(fmt::format(
          "cache rows of {} bytes can't be gathered: they are no multiple of 16", kv_row_bytes_));
      return;
    }
    if (config_.schedule == Schedule::kFixed) {
      plan_.strategy = Strategy::kMergePartials;
      plan_.reasons.push_back(
          "merge_partials goes with the fixed schedule: the batch may not decide how a row is "
          "formed");
      return;
    }
    const bool merge_wins = merge.seconds(parallel_.rates) < gather.seconds(parallel_.rates);
    plan_.strategy = merge_wins ? Strategy::kMergePartials : Strategy::kGatherKv;
    plan_.reasons.push_back(std::string(strategy_name(plan_.strategy)) + " has the lower estimate");
  }

  /// Every rank expands the whole context and attends the queries it was given to it.
  Cost gather_cost() const {
    Cost cost;
    cost.expansion_flops = expansion_flops(config_.dims, double(context_tokens_));
    cost.attention_flops = attention_flops(config_.dims, split() ? scores_ / world_ : scores_);
    if (sharded()) {
      cost.bytes_received = double(context_tokens_) * kv_row_bytes_ * (world_ - 1) / world_;
      cost.collectives = static_cast<int32_t>((context_tokens_ + config_.workspace_tokens - 1) /
                                              config_.workspace_tokens);
    }
    return cost;
  }

  /// A rank expands its rows of the context and attends all queries to them; replicated chunks are
  /// taken to be shared out evenly.
  Cost merge_work(int32_t rank) const {
    Cost cost;
    for (int32_t r = 0; r < num_requests(); ++r) {
      const double rows = sharded() ? local_length(seen_context(r), shard_of(rank))
                                    : double(seen_context(r)) / world_;
      cost.expansion_flops += expansion_flops(config_.dims, rows);
      cost.attention_flops += attention_flops(config_.dims, rows * batch_.query_len(r));
    }
    return cost;
  }

  Cost merge_cost() const {
    Cost busiest = merge_work(0);  // no rank has more rows of any request
    if (context_tokens_ == 0) return busiest;
    // The partials go to who finishes the rows, the results to who was not given them alone.
    const double rows = double(num_tokens()) * (world_ - 1) / world_;
    busiest.bytes_received = rows * (partial_bytes() + (split() ? query_bytes() : result_bytes()));
    busiest.collectives = split() ? 3 : 4;
    return busiest;
  }

  ContextShard shard_of(int32_t rank) const { return {world_, rank, parallel_.shard.interleave}; }

  void choose_blocks() {
    plan_.exchanges_partials = merges() && context_tokens_ > 0;
    // A gather leaves every rank with all keys: without split queries there is nothing to share.
    // The fixed schedule shares nothing either, since blocks would cut requests where the batch
    // says.
    const double all_partials = world_ * double(num_tokens()) * partial_bytes();
    const bool small = all_partials <= static_cast<double>(parallel_.small_exchange_bytes);
    plan_.every_rank_finishes =
        !split() && (!plan_.exchanges_partials || small || config_.schedule == Schedule::kFixed);
    plan_.stored_row_bytes = kv_row_bytes_;
    if (plan_.every_rank_finishes) {
      plan_.block_rows = num_tokens();
    } else if (!split()) {
      plan_.block_rows = static_cast<int32_t>((int64_t{num_tokens()} + world_ - 1) / world_);
    } else {
      plan_.block_rows = 0;
      std::vector<int32_t> rows(static_cast<size_t>(world_), 0);
      ZigzagSplit zigzag(world_);
      for (int32_t r = 0; r < num_requests(); ++r) {
        zigzag.next_request(batch_.query_len(r));
        for (int32_t piece = 0; piece < 2 * world_; ++piece) {
          rows[std::min(piece, 2 * world_ - 1 - piece)] +=
              zigzag.begin(piece + 1) - zigzag.begin(piece);
        }
      }
      plan_.block_rows = *std::ranges::max_element(rows);
    }
  }

  /// Sharded, merged: chunks of what a rank holds. Sharded, gathered: chunks of the whole context,
  /// cut where every rank's share is even. Replicated, merged: whole chunks go to ranks.
  void cut() {
    PlanConfig cut_config = config_;
    plan_.chunk_owners.clear();
    if (assembles()) {
      const int64_t cycle = int64_t{world_} * parallel_.shard.interleave;
      const int64_t aligned = std::lcm(int64_t{config_.page_size}, cycle);
      if (aligned <= config_.workspace_tokens) {
        cut_config.page_size = static_cast<int32_t>(aligned);
      }
      cut_config.shard = {};
    }
    if (sharded() || !merges()) {
      cut_with(cut_config);
      return;
    }
    if (cut_config.schedule == Schedule::kFixed) {
      cut_with(cut_config);
      assign_owners_by_position();
      return;
    }
    // Smaller chunks than ranks need are taken only where they balance better.
    constexpr double kBalanced = 1.05;
    double best_load = 0.0;
    int64_t best_parts = 0;
    for (const int64_t parts : {1, 2, 3, 4}) {
      cut_replicated(cut_config, parts);
      const double load = assign_owners();
      if (best_parts == 0 || load < best_load) {
        best_load = load;
        best_parts = parts;
      }
      if (load <= kBalanced) return;
    }
    cut_replicated(cut_config, best_parts);
    assign_owners();
  }

  void cut_with(const PlanConfig& cut_config) {
    plan_.cuts.clear();
    cut_contexts(cut_config, batch_.context_lens, plan_.cuts);
  }

  /// Chunks of at most ceil(total / (N * parts)) rows, rounded up to a page. `fixed` goes on
  /// cutting where it does for a request alone, and only takes fewer requests together.
  void cut_replicated(PlanConfig cut_config, int64_t parts) {
    const int64_t total =
        std::accumulate(batch_.context_lens.begin(), batch_.context_lens.end(), int64_t{0});
    const int64_t page = cut_config.page_size;
    const int64_t shares = world_ * parts;
    int64_t cap = ((total + shares - 1) / shares + page - 1) / page * page;
    cap = std::clamp(cap, page, int64_t{cut_config.workspace_tokens});
    cut_config.workspace_tokens = static_cast<int32_t>(cap);
    cut_with(cut_config);
  }

  double chunk_seconds(const ChunkCut& cut) const {
    Cost cost;
    for (int32_t i = cut.span_begin; i < cut.span_end; ++i) {
      const Span& span = plan_.cuts.spans[i];
      const double rows = span.end - span.begin;
      cost.expansion_flops += expansion_flops(config_.dims, rows);
      cost.attention_flops += attention_flops(config_.dims, rows * batch_.query_len(span.request));
    }
    // Where no new token sees the chunk, nobody touches it.
    return cost.attention_flops == 0.0 ? 0.0 : cost.compute_seconds(parallel_.rates);
  }

  /// Longest chunks first, each to the rank with the least so far. Returns the load.
  double assign_owners() {
    const std::span<const ChunkCut> cuts = plan_.cuts.chunks;
    std::vector<double> seconds(cuts.size());
    for (size_t i = 0; i < cuts.size(); ++i) seconds[i] = chunk_seconds(cuts[i]);
    std::vector<int32_t> order(cuts.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int32_t a, int32_t b) { return seconds[a] > seconds[b]; });
    plan_.rank_seconds.assign(static_cast<size_t>(world_), 0.0);
    plan_.chunk_owners.resize(cuts.size());
    for (const int32_t i : order) {
      const auto least = std::ranges::min_element(plan_.rank_seconds);
      plan_.chunk_owners[i] = static_cast<int32_t>(least - plan_.rank_seconds.begin());
      *least += seconds[i];
    }
    return plan_.load();
  }

  /// The fixed schedule's chunks hold one range of positions each; the owner follows from that, so
  /// that a request's partials are merged alike in any batch.
  void assign_owners_by_position() {
    plan_.rank_seconds.assign(static_cast<size_t>(world_), 0.0);
    plan_.chunk_owners.clear();
    for (const ChunkCut& cut : plan_.cuts.chunks) {
      const int32_t position = plan_.cuts.spans[cut.span_begin].begin;
      const int32_t owner = position / effective_split_tokens(config_) % world_;
      plan_.chunk_owners.push_back(owner);
      plan_.rank_seconds[owner] += chunk_seconds(cut);
    }
  }

  /// Rows that attend the context, where their results stand, and rows that are finished here.
  void share_rows() {
    plan_.context_rows.clear();
    plan_.new_token_rows.clear();
    plan_.new_token_sources.clear();
    const int32_t n = num_requests();
    row_blocks_ = 1;
    if (split()) {
      share_split_rows();
      return;
    }
    if (plan_.every_rank_finishes) {
      append_window(plan_.new_token_rows, 0, num_tokens());
    } else {
      const int64_t begin = int64_t{rank_} * plan_.block_rows;
      append_window(plan_.new_token_rows, std::min<int64_t>(begin, num_tokens()),
                    std::min<int64_t>(begin + plan_.block_rows, num_tokens()));
    }
    append_window(plan_.context_rows, 0, num_tokens());
    plan_.context_row_starts.assign(batch_.query_start_loc.begin(), batch_.query_start_loc.end());
    plan_.context_row_starts.resize(static_cast<size_t>(n) + 1, 0);
  }

  /// The given rows [begin, end), whose results count from `begin`.
  void append_window(std::vector<QueryRows>& rows, int64_t begin, int64_t end) const {
    for (int32_t r = 0; r < num_requests(); ++r) {
      const auto first = std::max<int64_t>(batch_.query_start_loc[r], begin);
      const auto last = std::min<int64_t>(batch_.query_start_loc[r + 1], end);
      if (first >= last) continue;
      rows.push_back({r, static_cast<int32_t>(first - batch_.query_start_loc[r]),
                      static_cast<int32_t>(last - first), static_cast<int32_t>(first),
                      static_cast<int32_t>(first - begin)});
    }
  }

  /// Merged: all ranks' queries, in the blocks they arrive in. Gathered: this rank's.
  void share_split_rows() {
    const int32_t n = num_requests();
    row_blocks_ = plan_.exchanges_partials ? world_ : 1;
    plan_.context_row_starts.resize(static_cast<size_t>(row_blocks_) * (n + 1));
    for (int32_t block = 0; block < row_blocks_; ++block) {
      plan_.context_row_starts[block * (n + 1)] = block * plan_.block_rows;
    }
    plan_.new_token_sources.resize(static_cast<size_t>(num_tokens()));
    std::vector<int32_t> next(static_cast<size_t>(world_), 0);
    ZigzagSplit zigzag(world_);
    for (int32_t r = 0; r < n; ++r) {
      zigzag.next_request(batch_.query_len(r));
      for (int32_t rank = 0; rank < world_; ++rank) {
        pieces_.clear();
        const int32_t first = next[rank];
        next[rank] = zigzag.append_pieces(r, rank, first, pieces_);
        for (const QueryRows& piece : pieces_) {
          std::iota(plan_.new_token_sources.begin() + batch_.query_start_loc[r] + piece.position,
                    plan_.new_token_sources.begin() + batch_.query_start_loc[r] + piece.position +
                        piece.length,
                    rank * plan_.block_rows + piece.q_row);
        }
        if (rank == rank_) {
          plan_.new_token_rows.insert(plan_.new_token_rows.end(), pieces_.begin(), pieces_.end());
        }
        if (row_blocks_ == 1 && rank != rank_) continue;
        const int32_t block = row_blocks_ == 1 ? 0 : rank;
        const int32_t row = block * plan_.block_rows + first;
        plan_.context_row_starts[block * (n + 1) + r + 1] = row + next[rank] - first;
        // Without a mask the two pieces, which are neighbours here, are one.
        if (next[rank] > first) {
          plan_.context_rows.push_back({r, 0, next[rank] - first, row, row});
        }
      }
    }
  }

  void build_step_plan(const HostBlockTable* table) {
    PlanShare share;
    share.rank = rank_;
    share.cuts = &plan_.cuts;
    share.chunk_owners = plan_.chunk_owners;
    share.context_rows = plan_.context_rows;
    share.row_blocks = row_blocks_;
    share.context_row_starts = plan_.context_row_starts;
    share.new_token_rows = plan_.new_token_rows;
    share.assemble_chunks = assembles();
    share.new_token_sources = plan_.new_token_sources;
    share.padded_new_tokens = split() ? plan_.block_rows : 0;
    build_plan(config_, batch_, table, plan_.plan, {}, &share);
  }

  void estimate_ranks() {
    if (!plan_.chunk_owners.empty()) return;  // assign_owners has
    plan_.rank_seconds.assign(static_cast<size_t>(world_), 0.0);
    if (!merges()) {  // split queries are even to one row
      std::ranges::fill(plan_.rank_seconds, gather_cost().compute_seconds(parallel_.rates));
      return;
    }
    for (int32_t rank = 0; rank < world_; ++rank) {
      plan_.rank_seconds[rank] = merge_work(rank).compute_seconds(parallel_.rates);
    }
  }

  void set_hash() {
    uint64_t hash = plan_.plan.hash();
    const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3u; };
    for (const int64_t value :
         {int64_t{world_}, int64_t{parallel_.shard.interleave},
          static_cast<int64_t>(parallel_.placement), static_cast<int64_t>(parallel_.queries),
          static_cast<int64_t>(plan_.strategy), int64_t{plan_.every_rank_finishes},
          int64_t{plan_.block_rows}, int64_t{kv_row_bytes_}, static_cast<int64_t>(format_)}) {
      mix(static_cast<uint64_t>(value));
    }
    for (const Span& span : plan_.cuts.spans) {
      for (const int32_t value : {span.request, span.begin, span.end}) mix(uint64_t(value));
    }
    for (const int32_t owner : plan_.chunk_owners) mix(uint64_t(owner));
    for (const CollectiveCall& call : plan_.collectives(DType::kFloat32)) {
      mix(static_cast<uint64_t>(call.collective));
      mix(call.bytes);
    }
    plan_.hash = hash;
  }

  const ParallelConfig& parallel_;
  PlanConfig config_;
  const Batch& batch_;
  RankPlan& plan_;
  int32_t world_;
  int32_t rank_;
  KvCacheFormat format_;
  int32_t kv_row_bytes_ = 0;
  int64_t context_tokens_ = 0;  // that new tokens see
  double scores_ = 0.0;
  int32_t row_blocks_ = 1;
  std::vector<QueryRows> pieces_;
};

double RankPlan::load() const {
  const double sum = std::accumulate(rank_seconds.begin(), rank_seconds.end(), 0.0);
  if (sum == 0.0) return 1.0;
  return *std::ranges::max_element(rank_seconds) * static_cast<double>(rank_seconds.size()) / sum;
}

std::vector<CollectiveCall> RankPlan::collectives(DType out_dtype) const {
  std::vector<CollectiveCall> calls;
  if (plan.num_query_tokens() == 0) return calls;
  const ModelDims& dims = plan.config().dims;
  const size_t rows = static_cast<size_t>(block_rows);
  const size_t heads = static_cast<size_t>(dims.num_heads);
  const bool split = config.queries == QueryPlacement::kSplit;
  const auto add_results = [&](Collective collective, size_t value_bytes) {
    calls.push_back({collective, rows * heads * dims.v_head_dim * value_bytes});
    calls.push_back({collective, rows * heads * sizeof(float)});
  };
  if (split) calls.push_back({Collective::kAllGather, rows * dims.latent_dim() * 2});
  if (split && exchanges_partials) {
    calls.push_back({Collective::kAllGather, rows * heads * dims.qk_head_dim() * 2});
  }
  for (const Chunk& chunk : plan.chunks()) {
    if (chunk.assembly.padded_rows == 0) continue;
    calls.push_back({Collective::kAllGather, size_t{1} * static_cast<size_t>(stored_row_bytes) *
                                                 static_cast<size_t>(chunk.assembly.padded_rows)});
  }
  if (exchanges_partials) {
    add_results(every_rank_finishes ? Collective::kAllGather : Collective::kAllToAll,
                sizeof(float));
  }
  if (!split && !every_rank_finishes) {
    add_results(Collective::kAllGather, static_cast<size_t>(dtype_bytes(out_dtype)));
  }
  return calls;
}

void build_rank_plan(const ParallelConfig& parallel, const PlanConfig& config, KvCacheFormat format,
                     const Batch& batch, const HostBlockTable* table, RankPlan& plan) {
  validate_parallel_config(parallel);
  RankPlanBuilder(parallel, config, format, batch, plan).build(table);
}

void compare_plan_hash(Communicator& communicator, uint64_t hash) {
  std::vector<uint64_t> all(static_cast<size_t>(communicator.size()));
  communicator.exchange_host(std::as_bytes(std::span(&hash, 1)),
                             std::as_writable_bytes(std::span(all)));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw_error(ErrorCode::kCommunication,
                "rank {} has plan {:016x}, rank 0 plan {:016x}: their batches or configs differ",
                rank, all[rank], all[0]);
  }
}

}  // namespace mla
