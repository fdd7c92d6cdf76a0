// The batch of one step, as the serving stack gives it, and its checks.
#ifndef METADATA_BATCH_H_
#define METADATA_BATCH_H_

#include <cstdint>
#include <span>

namespace mla {

/// R requests with T new tokens. Views of the caller's memory, read only while a plan is built.
struct Batch {
  std::span<const int32_t> query_start_loc;  // [R+1], cumulative new tokens, first 0, last T
  std::span<const int32_t> context_lens;     // [R], tokens already in the cache (global lengths)

  int32_t num_requests() const { return static_cast<int32_t>(context_lens.size()); }
  int32_t num_query_tokens() const { return query_start_loc.empty() ? 0 : query_start_loc.back(); }
  int32_t query_len(int32_t r) const { return query_start_loc[r + 1] - query_start_loc[r]; }
};

/// A block table in host memory: row r holds the page ids of request r, in position order.
struct HostBlockTable {
  const int32_t* data = nullptr;
  int32_t num_requests = 0;
  int32_t max_pages = 0;   // entries a row
  int64_t row_stride = 0;  // elements between rows, >= max_pages
};

/// Checks lengths, offsets and sums. Legal: no requests; a request without new tokens; a request
/// without context. Throws kInvalidArgument naming the request, the value and the limit for: sizes
/// that disagree, a first offset that is not 0, decreasing offsets, negative context lengths, a
/// context + query length or a sum over the batch above 2^31 - 1.
void validate_batch(const Batch& batch);

/// Checks the part of `table` that `context_lens` uses (rows of ceil(len / page_size) ids): the
/// row is long enough, every id is in [0, num_pages) and, where `reject_duplicates`, no id stands
/// twice in one request's row. `context_lens` are the lengths stored in this table's cache (local
/// ones under context parallelism). Throws kInvalidArgument.
void validate_block_table(const HostBlockTable& table, std::span<const int32_t> context_lens,
                          int32_t page_size, int32_t num_pages, bool reject_duplicates);

/// Checks that every slot is negative (skip) or below num_pages * page_size. Throws
/// kInvalidArgument naming the token, the slot and the limit.
void validate_slot_mapping(std::span<const int64_t> slot_mapping, int64_t num_slots);

}  // namespace mla

#endif  // METADATA_BATCH_H_
