// The unit of attention work, shared by the plan (which makes items) and the kernels (which run
// them).
#ifndef METADATA_ATTENTION_ITEM_H_
#define METADATA_ATTENTION_ITEM_H_

#include <cstdint>
#include <limits>

namespace mla {

/// `causal_offset` of an item whose queries see every key.
inline constexpr int32_t kUnmasked = std::numeric_limits<int32_t>::max();

/// Query i of the item (0 <= i < q_len) sees key k of the item (0 <= k < k_len) if and only if
/// k <= i + causal_offset; the sum is formed in 64 bits. A negative offset leaves the first rows
/// without keys. Key ranges of items may overlap; output rows of one launch may not.
///
/// This one form serves plain causal prefill (offset 0), prefill against a cache (offset =
/// context length), context chunks (kUnmasked), zigzag pieces and KV splits.
struct AttentionItem {
  int32_t q_begin = 0;  // first row of q
  int32_t q_len = 0;
  int32_t k_begin = 0;  // first row of k_nope, k_pe and v
  int32_t k_len = 0;
  int32_t causal_offset = kUnmasked;
  int32_t out_row = 0;  // row of out, lse and prefix that query 0 belongs to

  bool operator==(const AttentionItem&) const = default;
};

}  // namespace mla

#endif  // METADATA_ATTENTION_ITEM_H_
