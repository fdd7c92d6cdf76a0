// What one rank of a context-parallel group does of a step, as the plan's builder takes it.
#ifndef METADATA_PLAN_SHARE_H_
#define METADATA_PLAN_SHARE_H_

#include <cstdint>
#include <span>

#include "metadata/schedule.h"

namespace mla {

/// Consecutive new tokens of one request: where their queries are, and where results go.
struct QueryRows {
  int32_t request = 0;
  int32_t position = 0;  // the first token, counted from the request's first new one
  int32_t length = 0;
  int32_t q_row = 0;
  int32_t out_row = 0;
};

/// Views of the caller's memory, read only while a plan is built.
struct PlanShare {
  int32_t rank = 0;
  const ScheduleCuts* cuts = nullptr;     // of all contexts, the same on every rank
  std::span<const int32_t> chunk_owners;  // the rank that attends a chunk; empty: every one does

  /// The queries that attend context here, by request. Their results are in row blocks, each with
  /// the rows of all requests in order: block b holds those of request r from entry
  /// b * (R + 1) + r of context_row_starts up to the next.
  std::span<const QueryRows> context_rows;
  int32_t row_blocks = 1;
  std::span<const int32_t> context_row_starts;  // [row_blocks, R + 1]

  /// The new tokens that are attended to the end here, by request and position; out rows count
  /// from 0 without a gap.
  std::span<const QueryRows> new_token_rows;

  /// Chunks hold the whole context's rows, which come together from the shards of all ranks.
  bool assemble_chunks = false;

  /// Where new token t stands in the blocks of `padded_new_tokens` rows that all ranks send;
  /// empty: every rank is given all of them.
  std::span<const int32_t> new_token_sources;  // [T]
  int32_t padded_new_tokens = 0;
};

}  // namespace mla

#endif  // METADATA_PLAN_SHARE_H_
