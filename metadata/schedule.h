// Where contexts are cut: lengths in, spans out. No tensors, no ranks' views; plan.cc makes chunks
// of the result.
#ifndef METADATA_SCHEDULE_H_
#define METADATA_SCHEDULE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "metadata/context_parallel.h"

namespace mla {

struct PlanConfig;  // metadata/plan.h

/// Global positions [begin, end) of one request, never empty.
struct Span {
  int32_t request = 0;
  int32_t begin = 0;
  int32_t end = 0;
};

/// Spans [span_begin, span_end) go through the workspace together; at most one of each request, in
/// request order, all within requests [request_begin, request_end).
struct ChunkCut {
  int32_t span_begin = 0;
  int32_t span_end = 0;
  int32_t request_begin = 0;
  int32_t request_end = 0;
};

/// Reused from step to step; no allocation once it has seen the largest.
struct ScheduleCuts {
  std::vector<Span> spans;
  std::vector<ChunkCut> chunks;
  std::vector<int32_t> unfinished;  // working memory: requests with rows still to cut

  void clear() {
    spans.clear();
    chunks.clear();
  }
};

/// Rows that a span of so many tokens takes on any rank at most: what a chunk is measured by, so
/// that every rank makes the same cuts and none exceeds its workspace. Exact for spans that begin
/// at a multiple of world * interleave.
int32_t most_local_rows(int32_t tokens, const ContextShard& shard);

/// Appends the cuts of all contexts (`lengths` [R], 0: nothing to attend) by the config's schedule.
/// Throws kInvalidArgument where they make more than 2^22 spans or 2^20 chunks, as cut_new_tokens
/// does.
void cut_contexts(const PlanConfig& config, std::span<const int32_t> lengths, ScheduleCuts& cuts);

/// Appends the cuts of the new tokens (`query_start_loc` [R+1]): contiguous rows, at most W a
/// piece. kFixed cuts inside a request at multiples of split_tokens only.
void cut_new_tokens(const PlanConfig& config, std::span<const int32_t> query_start_loc,
                    ScheduleCuts& cuts);

}  // namespace mla

#endif  // METADATA_SCHEDULE_H_
