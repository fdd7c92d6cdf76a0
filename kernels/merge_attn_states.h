// Merging partial attention results, and emptying rows that had no keys.
#ifndef KERNELS_MERGE_ATTN_STATES_H_
#define KERNELS_MERGE_ATTN_STATES_H_

#include <cstdint>

#include "kernels/tensor.h"

namespace mla {

/// output = the attention over the union of the prefix's keys and the suffix's, by the algebra of
/// kernels/lse.h: an lse of +inf counts as -inf; a side of weight 0 is selected away, never
/// multiplied; both sides empty give (0, -inf); a NaN lse propagates. Each tensor has its own
/// strides. In place is safe: output may be prefix or suffix, exactly.
struct MergeAttnStatesParams {
  int32_t num_heads = 0;  // any
  int32_t head_dim = 0;   // multiple of 8
  Count num_tokens;
  /// Rows from this one on have no prefix: they take the suffix (vLLM's
  /// prefill_tokens_with_context). Negative: every row has one.
  int64_t prefix_tokens = -1;

  ConstHeadRows prefix_out;  // [T, H, D] float32, fp16 or bf16
  ConstLse prefix_lse;
  ConstHeadRows suffix_out;  // [T, H, D] float32, fp16 or bf16
  ConstLse suffix_lse;
  HeadRows output;  // [T, H, D] float32, fp16, bf16, or e4m3 with output_scale
  Lse output_lse;   // null: not wanted
  /// e4m3 output only: stored = round(value / output_scale), saturated at +-448. One float in
  /// backend memory.
  const float* output_scale = nullptr;
};

/// Sets output = 0 and lse = -inf in the rows of requests that have no context here, that is
/// context_start_loc[r + 1] == context_start_loc[r]; touches nothing else. Rows are those of
/// query_start_loc, minus `first_token` (so that a chunk's partial can start at row 0).
struct MaskEmptyContextParams {
  int32_t num_heads = 0;
  int32_t head_dim = 0;                        // multiple of 8
  const int32_t* query_start_loc = nullptr;    // [n+1], of the first masked request on
  const int32_t* context_start_loc = nullptr;  // [n+1], a chunk's cu_seq_lens
  Count num_requests;                          // n
  int32_t first_token = 0;
  int32_t max_query_len = 0;  // upper bound over the requests: sizes the launch
  HeadRows output;            // [T, H, D] float32, fp16 or bf16
  Lse lse;
};

/// Sets lse[h, 0..num_tokens) to -inf: the empty running partial. Outputs need no preparation,
/// since a side whose lse is -inf is never read.
struct ClearPartialParams {
  int32_t num_heads = 0;
  Count num_tokens;
  Lse lse;
};

}  // namespace mla

#endif  // KERNELS_MERGE_ATTN_STATES_H_
