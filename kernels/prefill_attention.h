// Prefill attention over items, with the log-sum-exp, optionally merged into earlier partials.
#ifndef KERNELS_PREFILL_ATTENTION_H_
#define KERNELS_PREFILL_ATTENTION_H_

#include <cstdint>

#include "kernels/tensor.h"
#include "metadata/attention_item.h"

namespace mla {

/// For every item, query i and head h, with s[k] = softmax_scale * (q . [k_nope, k_pe])[k] over
/// the keys that the item shows it: lse = ln sum_k exp(s[k]) and out = sum_k exp(s[k] - lse) v[k].
///
/// - A row that sees no key gets out = 0 and lse = -inf (with a prefix: the prefix).
/// - With a prefix, the result is merged with it by merge_attn_states' algebra; `out` and `lse`
///   may be the prefix itself. A prefix row whose lse is -inf is not read, so it may hold NaN.
/// - Rows that belong to no item are neither read nor written. K and V rows outside every item's
///   key range, NaN included, reach no result. Rows inside it that causal_offset hides from a query
///   must be finite: tensor cores multiply them by 0.
/// - The same items give the same bits in every run; a row's bits depend only on its own item.
struct PrefillAttentionParams {
  int32_t num_heads = 0;         // H
  int32_t qk_nope_head_dim = 0;  // P
  int32_t qk_rope_head_dim = 0;  // Rr
  int32_t v_head_dim = 0;        // V
  float softmax_scale = 0.0f;

  // bf16 or fp16, one dtype for all four; q may be float32 too, as absorb_query leaves it, where
  // the backend has absorbed attention. Data 16-byte aligned, strides multiples of 8.
  ConstHeadRows q;       // [q_rows, H, P + Rr]
  ConstHeadRows k_nope;  // [k_rows, H, P]; may be a view of the expansion
  ConstRows k_pe;        // [k_rows, Rr], shared by the heads; null where Rr = 0
  ConstHeadRows v;       // [k_rows, H, V]; may be a view of the expansion
  int64_t q_rows = 0;    // extents of the memory behind the views
  int64_t k_rows = 0;

  const AttentionItem* items = nullptr;  // backend memory
  Count num_items;
  int32_t max_q_len = 0;  // upper bounds over the items: they size the launch
  int32_t max_k_len = 0;

  ConstHeadRows prefix_out;  // [rows, H, V] float32, or null: no prefix
  ConstLse prefix_lse;
  HeadRows out;  // [rows, H, V] float32, or the dtype of q
  Lse lse;       // null: not wanted
};

}  // namespace mla

#endif  // KERNELS_PREFILL_ATTENTION_H_
