#include "metadata/batch.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "metadata/error.h"

namespace mla {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

}  // namespace

void validate_batch(const Batch& batch) {
  const std::span<const int32_t> starts = batch.query_start_loc;
  const std::span<const int32_t> contexts = batch.context_lens;
  if (starts.size() != contexts.size() + 1 && !(starts.empty() && contexts.empty())) {
    throw_error(ErrorCode::kInvalidArgument,
                "query_start_loc has {} entries and context_lens {}; R + 1 and R are needed",
                starts.size(), contexts.size());
  }
  if (contexts.size() >= static_cast<size_t>(kMaxInt32)) {
    throw_error(ErrorCode::kInvalidArgument, "the batch has {} requests, at most {} are counted",
                contexts.size(), kMaxInt32 - 1);
  }
  if (!starts.empty() && starts[0] != 0) {
    throw_error(ErrorCode::kInvalidArgument, "query_start_loc[0] is {}, it must be 0", starts[0]);
  }
  int64_t total = 0;
  for (size_t r = 0; r < contexts.size(); ++r) {
    if (starts[r + 1] < starts[r]) {
      throw_error(ErrorCode::kInvalidArgument,
                  "request {}: query_start_loc decreases from {} to {}", r, starts[r],
                  starts[r + 1]);
    }
    if (contexts[r] < 0) {
      throw_error(ErrorCode::kInvalidArgument, "request {}: context length {} is below 0", r,
                  contexts[r]);
    }
    total += int64_t{contexts[r]} + (starts[r + 1] - starts[r]);
    if (total > kMaxInt32) {
      throw_error(
          ErrorCode::kInvalidArgument,
          "request {}: context and new tokens of the batch come to {} here, the limit is {}", r,
          total, kMaxInt32);
    }
  }
}

void validate_block_table(const HostBlockTable& table, std::span<const int32_t> context_lens,
                          int32_t page_size, int32_t num_pages, bool reject_duplicates) {
  if (page_size < 1) {
    throw_error(ErrorCode::kInvalidArgument, "page_size is {}, at least 1 is needed", page_size);
  }
  if (table.num_requests < static_cast<int64_t>(context_lens.size())) {
    throw_error(ErrorCode::kInvalidArgument, "the block table has {} rows for {} requests",
                table.num_requests, context_lens.size());
  }
  if (table.row_stride < table.max_pages) {
    throw_error(ErrorCode::kInvalidArgument,
                "the block table's row stride {} is below its {} pages", table.row_stride,
                table.max_pages);
  }
  std::vector<int32_t> seen;  // sorted ids of one row
  for (size_t r = 0; r < context_lens.size(); ++r) {
    if (context_lens[r] < 0) {
      throw_error(ErrorCode::kInvalidArgument, "request {}: context length {} is below 0", r,
                  context_lens[r]);
    }
    const int64_t used = (int64_t{context_lens[r]} + page_size - 1) / page_size;
    if (used == 0) continue;
    if (used > table.max_pages) {
      throw_error(ErrorCode::kInvalidArgument,
                  "request {}: {} cached tokens need {} pages of {}, its block table row has {}", r,
                  context_lens[r], used, page_size, table.max_pages);
    }
    if (table.data == nullptr) {
      throw_error(ErrorCode::kInvalidArgument, "request {}: {} cached tokens and no block table", r,
                  context_lens[r]);
    }
    const int32_t* row = table.data + static_cast<int64_t>(r) * table.row_stride;
    for (int64_t page = 0; page < used; ++page) {
      if (row[page] < 0 || row[page] >= num_pages) {
        throw_error(ErrorCode::kInvalidArgument,
                    "request {}: page id {} at entry {} is outside the cache's [0, {})", r,
                    row[page], page, num_pages);
      }
    }
    if (!reject_duplicates) continue;
    seen.assign(row, row + used);
    std::sort(seen.begin(), seen.end());
    const auto twice = std::adjacent_find(seen.begin(), seen.end());
    if (twice != seen.end()) {
      throw_error(ErrorCode::kInvalidArgument,
                  "request {}: page id {} stands twice in its block table row", r, *twice);
    }
  }
}

void validate_slot_mapping(std::span<const int64_t> slot_mapping, int64_t num_slots) {
  for (size_t t = 0; t < slot_mapping.size(); ++t) {
    if (slot_mapping[t] >= num_slots) {
      throw_error(ErrorCode::kInvalidArgument, "token {}: slot {} is outside the cache's [0, {})",
                  t, slot_mapping[t], num_slots);
    }
  }
}

}  // namespace mla
