// Split queries: which new tokens a rank is given, such that each has its share of every request's
// causal triangle.
#ifndef PARALLEL_QUERY_SPLIT_H_
#define PARALLEL_QUERY_SPLIT_H_

#include <cstdint>
#include <vector>

#include "metadata/batch.h"
#include "metadata/plan_share.h"

namespace mla {

/// The new tokens of rank `rank` with split queries, in the order of the rows it is given. Each
/// request is cut in 2N consecutive pieces; the rank has pieces `rank` and 2N - 1 - rank. Piece
/// lengths differ by one at most, and the longer ones go around over the requests, so that no rank
/// gets more than max_split_rows() in all. q_row and out_row are the rank's own rows.
std::vector<QueryRows> split_queries(const Batch& batch, int32_t world, int32_t rank);
/// 2 ceil(T / 2N)
int32_t max_split_rows(int32_t num_query_tokens, int32_t world);

/// Cuts every request in 2N pieces. Request by request, since where the longer pieces go depends on
/// the requests before.
class ZigzagSplit {
 public:
  explicit ZigzagSplit(int32_t world) : pieces_(2 * int64_t{world}) {}

  void next_request(int32_t query_len) {
    base_ = query_len / pieces_;
    first_long_ = (first_long_ + num_long_) % pieces_;
    num_long_ = query_len % pieces_;
  }

  /// The first token of a piece; of piece 2N: the request's length.
  int32_t begin(int64_t piece) const;

  /// Appends the request's two pieces of a rank at row `row`; returns the row after them.
  int32_t append_pieces(int32_t request, int32_t rank, int32_t row,
                        std::vector<QueryRows>& rows) const;

 private:
  int64_t pieces_;
  int64_t base_ = 0;
  int64_t first_long_ = 0;  // the longer pieces go on from here, around
  int64_t num_long_ = 0;
};

}  // namespace mla

#endif  // PARALLEL_QUERY_SPLIT_H_
