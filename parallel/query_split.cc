#include "parallel/query_split.h"

#include <algorithm>

#include "metadata/context_parallel.h"

namespace mla {

int32_t ZigzagSplit::begin(int64_t piece) const {
  const int64_t wrapped = std::max<int64_t>(first_long_ + num_long_ - pieces_, 0);
  const int64_t long_before =
      std::min(piece, wrapped) + std::clamp<int64_t>(piece - first_long_, 0, num_long_ - wrapped);
  return static_cast<int32_t>(base_ * piece + long_before);
}

int32_t ZigzagSplit::append_pieces(int32_t request, int32_t rank, int32_t row,
                                   std::vector<QueryRows>& rows) const {
  for (const int64_t piece : {int64_t{rank}, pieces_ - 1 - rank}) {
    const int32_t first = begin(piece);
    const int32_t length = begin(piece + 1) - first;
    if (length == 0) continue;
    rows.push_back({request, first, length, row, row});
    row += length;
  }
  return row;
}

std::vector<QueryRows> split_queries(const Batch& batch, int32_t world, int32_t rank) {
  validate_batch(batch);
  validate_shard({world, rank, 1});
  std::vector<QueryRows> rows;
  ZigzagSplit split(world);
  int32_t row = 0;
  for (int32_t r = 0; r < batch.num_requests(); ++r) {
    split.next_request(batch.query_len(r));
    row = split.append_pieces(r, rank, row, rows);
  }
  return rows;
}

int32_t max_split_rows(int32_t num_query_tokens, int32_t world) {
  const int64_t pieces = 2 * int64_t{world};
  const int64_t rows = 2 * ((num_query_tokens + pieces - 1) / pieces);
  return static_cast<int32_t>(std::min<int64_t>(rows, num_query_tokens));
}

}  // namespace mla
