#include "tests/metadata/plan_checker.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace mla {
namespace {

/// How many of the tokens [begin, end) live on the shard's rank, counted one by one.
int32_t count_local(int32_t begin, int32_t end, const ContextShard& shard) {
  int32_t count = 0;
  for (int32_t t = begin; t < end; ++t) count += t / shard.interleave % shard.world == shard.rank;
  return count;
}

Path expected_path(const PlanConfig& config, const Batch& batch, int32_t r) {
  if (config.path == PathPolicy::kExpand) return Path::kExpand;
  if (config.path == PathPolicy::kAbsorb) return Path::kAbsorb;
  return cheaper_path(config.dims, batch.query_len(r), batch.context_lens[r]);
}

/// Arrays of the block, to see that they are aligned, inside and apart.
class BlockMap {
 public:
  explicit BlockMap(const StepPlan& plan) : plan_(plan) {}

  template <typename T>
  void add(BlockArray<T> array) {
    EXPECT_EQ(array.offset % 16, 0u);
    EXPECT_GE(array.size, 0);
    const size_t end = array.offset + static_cast<size_t>(array.size) * sizeof(T);
    EXPECT_LE(end, plan_.block().size());
    if (array.size > 0) ranges_.push_back({array.offset, end});
  }
  void check_apart() {
    std::sort(ranges_.begin(), ranges_.end());
    for (size_t i = 1; i < ranges_.size(); ++i) {
      EXPECT_LE(ranges_[i - 1].second, ranges_[i].first) << "arrays " << i - 1 << " and " << i;
    }
  }

 private:
  const StepPlan& plan_;
  std::vector<std::pair<size_t, size_t>> ranges_;
};

void check_block(const StepPlan& plan) {
  EXPECT_EQ(reinterpret_cast<uintptr_t>(plan.block().data()) % 16, 0u);
  BlockMap map(plan);
  map.add(plan.query_start_loc());
  map.add(plan.context_start_loc());
  map.add(plan.block_table());
  for (const Chunk& chunk : plan.chunk_slots()) {
    map.add(chunk.starts);
    map.add(chunk.seq_lens);
    map.add(chunk.cu_seq_lens);
    map.add(chunk.items);
    map.add(chunk.counts);
  }
  for (const NewTokenPiece& piece : plan.new_token_slots()) {
    map.add(piece.carried_items);
    map.add(piece.final_items);
    map.add(piece.counts);
  }
  map.check_apart();
}

void check_step(const StepPlan& plan, const Batch& batch) {
  EXPECT_EQ(plan.num_requests(), batch.num_requests());
  EXPECT_EQ(plan.num_query_tokens(), batch.num_query_tokens());
  const auto query_start_loc = plan.host(plan.query_start_loc());
  const auto context_start_loc = plan.host(plan.context_start_loc());
  ASSERT_EQ(query_start_loc.size(), batch.context_lens.size() + 1);
  ASSERT_EQ(context_start_loc.size(), batch.context_lens.size() + 1);
  EXPECT_EQ(query_start_loc[0], 0);
  EXPECT_EQ(context_start_loc[0], 0);
  int32_t longest = 0;
  for (int32_t r = 0; r < batch.num_requests(); ++r) {
    EXPECT_EQ(query_start_loc[r + 1] - query_start_loc[r], batch.query_len(r));
    EXPECT_EQ(context_start_loc[r + 1] - context_start_loc[r],
              count_local(0, batch.context_lens[r], plan.config().shard));
    longest = std::max(longest, batch.query_len(r));
  }
  EXPECT_EQ(plan.num_context_tokens(), context_start_loc.back());
  EXPECT_EQ(plan.max_query_len(), longest);
}

/// One rank's arrays of a chunk, against the chunk's global spans.
void check_chunk(const StepPlan& plan, const Chunk& chunk, const std::vector<GlobalSpan>& spans,
                 const Batch& batch) {
  const PlanConfig& config = plan.config();
  const int32_t n = chunk.request_end - chunk.request_begin;
  const auto starts = plan.host(chunk.starts);
  const auto seq_lens = plan.host(chunk.seq_lens);
  const auto cu_seq_lens = plan.host(chunk.cu_seq_lens);
  ASSERT_EQ(starts.size(), static_cast<size_t>(n));
  ASSERT_EQ(seq_lens.size(), static_cast<size_t>(n));
  ASSERT_EQ(cu_seq_lens.size(), static_cast<size_t>(n) + 1);
  EXPECT_EQ(chunk.token_begin, batch.query_start_loc[chunk.request_begin]);
  EXPECT_EQ(chunk.token_end, batch.query_start_loc[chunk.request_end]);

  std::vector<AttentionItem> items;
  bool some_empty = false;
  int32_t rows = 0;
  int32_t longest = 0;
  int32_t longest_item = 0;
  for (int32_t j = 0; j < n; ++j) {
    const int32_t r = chunk.request_begin + j;
    const auto span = std::find_if(spans.begin(), spans.end(),
                                   [r](const GlobalSpan& s) { return s.request == r; });
    const bool has_span = span != spans.end();
    const int32_t length = has_span ? count_local(span->begin, span->end, config.shard) : 0;
    EXPECT_EQ(starts[j], has_span ? count_local(0, span->begin, config.shard) : 0);
    EXPECT_EQ(seq_lens[j], length);
    EXPECT_EQ(cu_seq_lens[j], rows);
    const int32_t item_rows =
        chunk.path == Path::kAbsorb ? kAbsorbRows : std::max(batch.query_len(r), 1);
    for (int32_t q = 0; length > 0 && q < batch.query_len(r); q += item_rows) {
      const int32_t begin = batch.query_start_loc[r] + q;
      const int32_t q_len = std::min(item_rows, batch.query_len(r) - q);
      items.push_back({begin, q_len, rows, length, kUnmasked, begin});
      longest_item = std::max(longest_item, q_len);
    }
    rows += length;
    longest = std::max(longest, length);
    some_empty |= length == 0;
  }
  EXPECT_EQ(cu_seq_lens.back(), rows);
  EXPECT_EQ(chunk.seq_tot, rows);
  EXPECT_LE(chunk.seq_tot, config.workspace_tokens);
  EXPECT_EQ(chunk.max_seq_len, longest);
  EXPECT_EQ(chunk.max_query_len, longest_item);
  EXPECT_EQ(chunk.has_empty_context, some_empty);

  std::vector<AttentionItem> planned(plan.host(chunk.items).begin(), plan.host(chunk.items).end());
  const ChunkCounts& counts = plan.host(chunk.counts)[0];
  EXPECT_EQ(counts.requests, n);
  EXPECT_EQ(counts.rows, rows);
  EXPECT_EQ(counts.items, static_cast<int32_t>(planned.size()));
  EXPECT_EQ(counts.final_items, 0);

  // Absorbed items count rows from their pass's first; passes share out the items in order.
  size_t next = 0;
  int32_t row_end = 0;
  for (int32_t p = chunk.pass_begin; p < chunk.pass_end; ++p) {
    const AbsorbPass& pass = plan.absorb_passes()[p];
    EXPECT_EQ(pass.items.offset, chunk.items.offset + next * sizeof(AttentionItem));
    EXPECT_LE(pass.row_end - pass.row_begin, kAbsorbRows);
    EXPECT_GE(pass.row_begin, row_end);
    row_end = pass.row_end;
    int32_t longest_of_pass = 0;
    ASSERT_GT(pass.items.size, 0);
    ASSERT_LE(next + pass.items.size, planned.size());
    for (int32_t i = 0; i < pass.items.size; ++i, ++next) {
      longest_of_pass = std::max(longest_of_pass, planned[next].q_len);
      planned[next].q_begin += pass.row_begin;
      planned[next].out_row += pass.row_begin;
      EXPECT_LE(planned[next].q_begin + planned[next].q_len, pass.row_end);
    }
    EXPECT_EQ(pass.max_query_len, longest_of_pass);
  }
  EXPECT_EQ(next, chunk.path == Path::kAbsorb ? planned.size() : 0);
  EXPECT_EQ(planned, items);
}

/// Which positions the schedule may cut at, and which requests stand at a range's ends.
void check_schedule(const StepPlan& plan, const std::vector<std::vector<GlobalSpan>>& chunks,
                    const Batch& batch) {
  const PlanConfig& config = plan.config();
  const int32_t w = config.workspace_tokens;
  const int32_t page = config.page_size;
  for (size_t c = 0; c < chunks.size(); ++c) {
    const Chunk& chunk = plan.chunks()[c];
    const std::vector<GlobalSpan>& spans = chunks[c];
    const bool trims_spans = config.schedule != Schedule::kUniform;
    if (!plan.shape_class().enabled()) {
      for (int32_t r : {chunk.request_begin, chunk.request_end - 1}) {
        EXPECT_GT(batch.context_lens[r], 0);
        EXPECT_EQ(expected_path(config, batch, r), chunk.path);
      }
      if (trims_spans) {
        EXPECT_EQ(chunk.request_begin, spans.front().request);
        EXPECT_EQ(chunk.request_end, spans.back().request + 1);
      }
    }
    int32_t requests_of_path = 0;
    for (int32_t r = 0; r < batch.num_requests(); ++r) {
      requests_of_path +=
          batch.context_lens[r] > 0 && expected_path(config, batch, r) == chunk.path;
    }
    for (const GlobalSpan& span : spans) {
      const int32_t length = batch.context_lens[span.request];
      int64_t step = page;
      if (config.schedule == Schedule::kPacked) {
        const int64_t cycle = int64_t{config.shard.world} * config.shard.interleave;
        const int64_t common = std::lcm(int64_t{page}, cycle);
        if (config.shard.world > 1 && common <= w) step = common;
      } else {
        step = config.schedule == Schedule::kFixed
                   ? effective_split_tokens(config)
                   : std::max(w / requests_of_path / page * page, page);
        EXPECT_EQ(span.end, std::min<int64_t>(span.begin + step, length));
      }
      EXPECT_EQ(span.begin % step, 0);
      EXPECT_TRUE(span.end == length || span.end % step == 0) << span.end << " by " << step;
    }
    // A packed chunk ends only where the next page, or what is left of its request, has no room.
    if (config.schedule == Schedule::kPacked && config.shard.world == 1 && c + 1 < chunks.size() &&
        plan.chunks()[c + 1].path == chunk.path) {
      const GlobalSpan& next = chunks[c + 1].front();
      const int32_t left = batch.context_lens[next.request] - next.begin;
      EXPECT_LT(w - chunk.seq_tot, std::min(page, left));
    }
  }
}

/// Every new row sees the new rows of its request up to itself, once, in order.
void check_pieces(const StepPlan& plan, const Batch& batch) {
  const int32_t w = plan.config().workspace_tokens;
  std::vector<int32_t> seen(static_cast<size_t>(batch.num_query_tokens()));  // keys a row has seen
  std::vector<int32_t> first(seen.size());                                   // of the row's request
  for (int32_t r = 0; r < batch.num_requests(); ++r) {
    std::fill(first.begin() + batch.query_start_loc[r],
              first.begin() + batch.query_start_loc[r + 1], batch.query_start_loc[r]);
  }
  int32_t row = 0;
  for (const NewTokenPiece& piece : plan.new_token_pieces()) {
    EXPECT_EQ(piece.row_begin, row);
    EXPECT_GT(piece.row_end, piece.row_begin);
    EXPECT_LE(piece.row_end - piece.row_begin, w);
    const auto carried = plan.host(piece.carried_items);
    const auto final = plan.host(piece.final_items);
    const ChunkCounts& counts = plan.host(piece.counts)[0];
    EXPECT_EQ(counts.rows, piece.row_end - piece.row_begin);
    EXPECT_EQ(counts.requests, static_cast<int32_t>(final.size()));
    EXPECT_EQ(counts.items, static_cast<int32_t>(carried.size()));
    EXPECT_EQ(counts.final_items, static_cast<int32_t>(final.size()));

    int32_t longest_query = 0;
    int32_t longest_keys = 0;
    const auto attend = [&](const AttentionItem& item) {
      EXPECT_EQ(item.out_row, item.q_begin);
      EXPECT_GE(item.k_begin, 0);
      EXPECT_LE(item.k_begin + item.k_len, piece.row_end - piece.row_begin);
      for (int32_t i = 0; i < item.q_len; ++i) {
        const int32_t q = item.q_begin + i;
        EXPECT_EQ(piece.row_begin + item.k_begin, first[q] + seen[q]) << "row " << q;
        seen[q] += item.causal_offset == kUnmasked ? item.k_len : i + item.causal_offset + 1;
      }
      longest_query = std::max(longest_query, item.q_len);
      longest_keys = std::max(longest_keys, item.k_len);
    };
    for (const AttentionItem& item : final) {
      EXPECT_EQ(item.q_begin, row);
      EXPECT_EQ(item.q_len, item.k_len);
      EXPECT_EQ(item.causal_offset, 0);
      row += item.q_len;
      attend(item);
    }
    EXPECT_EQ(row, piece.row_end);
    for (const AttentionItem& item : carried) {
      EXPECT_EQ(item.causal_offset, kUnmasked);
      EXPECT_EQ(item.q_begin, piece.row_end);
      attend(item);
    }
    EXPECT_EQ(piece.max_query_len, longest_query);
    EXPECT_EQ(piece.max_seq_len, longest_keys);
    if (plan.config().schedule == Schedule::kFixed) {
      for (const AttentionItem& item : final) {
        EXPECT_EQ((item.q_begin - first[item.q_begin]) % effective_split_tokens(plan.config()), 0);
      }
    } else {
      EXPECT_TRUE(piece.row_end - piece.row_begin == w || row == batch.num_query_tokens());
    }
  }
  EXPECT_EQ(row, batch.num_query_tokens());
  for (size_t q = 0; q < seen.size(); ++q) {
    EXPECT_EQ(seen[q], static_cast<int32_t>(q) - first[q] + 1) << "row " << q;
  }
}

}  // namespace

OwnedBatch::OwnedBatch(const std::vector<int32_t>& query_lens, std::vector<int32_t> contexts)
    : context_lens(std::move(contexts)) {
  for (int32_t length : query_lens) query_start_loc.push_back(query_start_loc.back() + length);
}

OwnedBatch one_token_each(const std::vector<int32_t>& context_lens) {
  return {std::vector<int32_t>(context_lens.size(), 1), context_lens};
}

PlanConfig make_config(int32_t workspace_tokens, int32_t page_size, Schedule schedule) {
  PlanConfig config;
  config.dims = find_preset("deepseek-v3");
  config.workspace_tokens = workspace_tokens;
  config.page_size = page_size;
  config.schedule = schedule;
  return config;
}

std::vector<StepPlan> build_all_ranks(PlanConfig config, const OwnedBatch& batch) {
  std::vector<StepPlan> plans(static_cast<size_t>(config.shard.world));
  for (int32_t rank = 0; rank < config.shard.world; ++rank) {
    config.shard.rank = rank;
    build_plan(config, batch.view(), nullptr, plans[rank]);
  }
  return plans;
}

std::vector<std::vector<GlobalSpan>> spans_of(std::span<const StepPlan> plans) {
  const std::span<const Chunk> first = plans[0].chunks();
  std::vector<std::vector<GlobalSpan>> result(first.size());
  std::vector<int32_t> done(static_cast<size_t>(plans[0].num_requests()));
  for (size_t c = 0; c < first.size(); ++c) {
    for (int32_t r = first[c].request_begin; r < first[c].request_end; ++r) {
      int32_t rows = 0;
      for (const StepPlan& plan : plans) {
        rows += plan.host(plan.chunks()[c].seq_lens)[r - first[c].request_begin];
      }
      if (rows > 0) result[c].push_back({r, done[r], done[r] + rows});
      done[r] += rows;
    }
  }
  return result;
}

void check_plans(std::span<const StepPlan> plans, const OwnedBatch& owned) {
  const Batch batch = owned.view();
  const StepPlan& first = plans[0];
  for (const StepPlan& plan : plans) {
    check_block(plan);
    check_step(plan, batch);
    check_pieces(plan, batch);
    EXPECT_EQ(plan.hash(), first.hash());
    ASSERT_EQ(plan.chunks().size(), first.chunks().size());
    for (size_t c = 0; c < plan.chunks().size(); ++c) {
      ASSERT_EQ(plan.chunks()[c].path, first.chunks()[c].path);
      ASSERT_EQ(plan.chunks()[c].request_begin, first.chunks()[c].request_begin);
      ASSERT_EQ(plan.chunks()[c].request_end, first.chunks()[c].request_end);
    }
  }

  // Spans tile each context in order: spans_of() lays them end to end, check_chunk() compares each
  // rank's starts and lengths with that.
  const std::vector<std::vector<GlobalSpan>> chunks = spans_of(plans);
  std::vector<int32_t> covered(owned.context_lens.size());
  bool absorbed = false;
  for (size_t c = 0; c < chunks.size(); ++c) {
    SCOPED_TRACE(testing::Message() << "chunk " << c);
    EXPECT_FALSE(chunks[c].empty());
    EXPECT_TRUE(!absorbed || first.chunks()[c].path == Path::kAbsorb);
    absorbed = first.chunks()[c].path == Path::kAbsorb;
    for (const GlobalSpan& span : chunks[c]) {
      EXPECT_EQ(expected_path(first.config(), batch, span.request), first.chunks()[c].path);
      covered[span.request] = span.end;
    }
    for (const StepPlan& plan : plans) check_chunk(plan, plan.chunks()[c], chunks[c], batch);
  }
  EXPECT_EQ(covered, owned.context_lens);
  check_schedule(first, chunks, batch);
}

}  // namespace mla
