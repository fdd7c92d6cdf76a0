#include "tests/metadata/plan_checker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

namespace mla {
namespace {

/// Tokens of [0, length) on the shard's rank, one by one.
int32_t count_local(int32_t begin, int32_t end, const ContextShard& shard) {
  int32_t count = 0;
  for (int32_t t = begin; t < end; ++t) count += t / shard.interleave % shard.world == shard.rank;
  return count;
}

template <typename T>
void check_array(const StepPlan& plan, BlockArray<T> array) {
  EXPECT_EQ(array.offset % 16, 0u);
  EXPECT_LE(array.offset + array.size * sizeof(T), plan.block().size());
}

void check_context(const StepPlan& plan, const OwnedBatch& batch) {
  const PlanConfig& config = plan.config();
  std::vector<int32_t> covered(batch.context_lens.size(), 0);  // local rows seen so far
  for (const Chunk& chunk : plan.chunks()) {
    check_array(plan, chunk.starts);
    check_array(plan, chunk.seq_lens);
    check_array(plan, chunk.cu_seq_lens);
    const auto starts = plan.host(chunk.starts);
    const auto lens = plan.host(chunk.seq_lens);
    const auto cu = plan.host(chunk.cu_seq_lens);
    const int32_t n = chunk.request_end - chunk.request_begin;
    ASSERT_EQ(static_cast<int32_t>(starts.size()), n);
    ASSERT_EQ(static_cast<int32_t>(lens.size()), n);
    ASSERT_EQ(static_cast<int32_t>(cu.size()), n + 1);
    EXPECT_EQ(chunk.token_begin, batch.query_start_loc[chunk.request_begin]);
    EXPECT_EQ(chunk.token_end, batch.query_start_loc[chunk.request_end]);

    std::vector<AttentionItem> items;
    bool has_empty = false;
    int32_t longest = 0;
    EXPECT_EQ(cu[0], 0);
    for (int32_t j = 0; j < n; ++j) {
      const int32_t r = chunk.request_begin + j;
      EXPECT_EQ(cu[j + 1], cu[j] + lens[j]);
      has_empty |= lens[j] == 0;
      longest = std::max(longest, lens[j]);
      if (lens[j] > 0) {
        EXPECT_EQ(starts[j], covered[r]) << "request " << r;
        covered[r] += lens[j];
        const int32_t q = batch.query_start_loc[r];
        if (batch.query_start_loc[r + 1] > q && chunk.path == Path::kExpand) {
          items.push_back({q, batch.query_start_loc[r + 1] - q, cu[j], lens[j], kUnmasked, q});
        }
      }
    }
    EXPECT_EQ(chunk.seq_tot, cu[n]);
    EXPECT_LE(chunk.seq_tot, config.workspace_tokens);
    EXPECT_EQ(chunk.max_seq_len, longest);
    EXPECT_EQ(chunk.has_empty_context, has_empty);
    if (chunk.path == Path::kExpand) {
      EXPECT_TRUE(std::ranges::equal(plan.host(chunk.items), items));
    }
    const ChunkCounts& counts = plan.host(chunk.counts)[0];
    EXPECT_EQ(counts.requests, n);
    EXPECT_EQ(counts.rows, chunk.seq_tot);
    EXPECT_EQ(counts.items, chunk.items.size);
  }
  int64_t total = 0;
  for (size_t r = 0; r < covered.size(); ++r) {
    EXPECT_EQ(covered[r], count_local(0, batch.context_lens[r], config.shard)) << "request " << r;
    total += covered[r];
  }
  EXPECT_EQ(plan.num_context_tokens(), total);
}

void check_new_tokens(const StepPlan& plan, const OwnedBatch& batch) {
  const int32_t num_tokens = batch.query_start_loc.back();
  std::vector<int32_t> seen(static_cast<size_t>(num_tokens), 0);  // keys that a row has attended
  std::vector<bool> final(static_cast<size_t>(num_tokens), false);
  std::vector<int32_t> request_begin(static_cast<size_t>(num_tokens), 0);
  for (size_t r = 0; r + 1 < batch.query_start_loc.size(); ++r) {
    for (int32_t t = batch.query_start_loc[r]; t < batch.query_start_loc[r + 1]; ++t) {
      request_begin[t] = batch.query_start_loc[r];
    }
  }
  const auto attend = [&](const NewTokenPiece& piece, const AttentionItem& item) {
    EXPECT_EQ(item.out_row, item.q_begin);
    EXPECT_LE(item.k_begin + item.k_len, piece.row_end - piece.row_begin);
    for (int32_t i = 0; i < item.q_len; ++i) {
      const int32_t row = item.q_begin + i;
      const int64_t visible = std::min<int64_t>(item.k_len, int64_t{i} + item.causal_offset + 1);
      // Keys come in order, so the next one is the first not seen yet.
      EXPECT_EQ(piece.row_begin + item.k_begin, request_begin[row] + seen[row]);
      EXPECT_FALSE(final[row]);
      seen[row] += static_cast<int32_t>(visible);
    }
  };
  int32_t next_row = 0;
  for (const NewTokenPiece& piece : plan.new_token_pieces()) {
    EXPECT_EQ(piece.row_begin, next_row);
    EXPECT_LE(piece.row_end - piece.row_begin, plan.config().workspace_tokens);
    next_row = piece.row_end;
    for (const AttentionItem& item : plan.host(piece.carried_items)) {
      EXPECT_EQ(item.causal_offset, kUnmasked);
      EXPECT_GE(item.q_begin, piece.row_end);
      attend(piece, item);
    }
    for (const AttentionItem& item : plan.host(piece.final_items)) {
      attend(piece, item);
      for (int32_t i = 0; i < item.q_len; ++i) final[item.q_begin + i] = true;
    }
  }
  EXPECT_EQ(next_row, num_tokens);
  for (int32_t t = 0; t < num_tokens; ++t) {
    EXPECT_TRUE(final[t]) << "row " << t;
    EXPECT_EQ(seen[t], t - request_begin[t] + 1) << "row " << t;
  }
}

}  // namespace

OwnedBatch::OwnedBatch(const std::vector<int32_t>& query_lens, std::vector<int32_t> contexts)
    : context_lens(std::move(contexts)) {
  for (int32_t length : query_lens) query_start_loc.push_back(query_start_loc.back() + length);
}

void check_plan(const StepPlan& plan, const OwnedBatch& batch) {
  EXPECT_EQ(plan.num_requests(), static_cast<int32_t>(batch.context_lens.size()));
  EXPECT_EQ(plan.num_query_tokens(), batch.query_start_loc.back());
  check_context(plan, batch);
  check_new_tokens(plan, batch);
}

}  // namespace mla
