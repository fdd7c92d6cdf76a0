// The Hopper prefill attention behind a C function, for compare_cudnn.py. One item a request, all
// requests alike; strides in elements.
#include <cstdint>
#include <cstdio>
#include <exception>

#include "kernels/cuda/sm90/prefill_attention.h"

extern "C" {

struct MlaBenchAttention {
  int32_t num_heads, nope_dim, rope_dim, v_dim;
  int32_t fp16;  // else bf16
  float softmax_scale;
  const void *q, *k_nope, *k_pe, *v;
  int64_t q_row, q_head, k_row, k_head, k_pe_row, v_row, v_head;
  int64_t q_rows, k_rows;
  const void* items;  // AttentionItem in device memory
  int64_t num_items;
  int32_t max_q_len, max_k_len;
  void* out;  // dtype of q
  int64_t out_row, out_head;
  float* lse;
  int64_t lse_row, lse_head;
  void* scratch;
  int64_t scratch_bytes;
  int32_t max_blocks;
  void* stream;
};

int64_t mla_bench_attention_scratch_bytes(int32_t num_heads, int32_t v_dim, int64_t max_items,
                                          int64_t max_rows) {
  return static_cast<int64_t>(
      mla::sm90::prefill_attention_scratch_bytes(num_heads, v_dim, max_items, max_rows));
}

/// 0, or 1 after a line on stderr.
int mla_bench_attention(const MlaBenchAttention* a) {
  const mla::DType dtype = a->fp16 ? mla::DType::kFloat16 : mla::DType::kBFloat16;
  mla::PrefillAttentionParams p;
  p.num_heads = a->num_heads;
  p.qk_nope_head_dim = a->nope_dim;
  p.qk_rope_head_dim = a->rope_dim;
  p.v_head_dim = a->v_dim;
  p.softmax_scale = a->softmax_scale;
  p.q = {a->q, dtype, a->q_row, a->q_head};
  p.k_nope = {a->k_nope, dtype, a->k_row, a->k_head};
  p.k_pe = {a->k_pe, dtype, a->k_pe_row};
  p.v = {a->v, dtype, a->v_row, a->v_head};
  p.q_rows = a->q_rows;
  p.k_rows = a->k_rows;
  p.items = static_cast<const mla::AttentionItem*>(a->items);
  p.num_items.capacity = a->num_items;
  p.max_q_len = a->max_q_len;
  p.max_k_len = a->max_k_len;
  p.out = {a->out, dtype, a->out_row, a->out_head};
  p.lse = {a->lse, a->lse_head, a->lse_row};
  try {
    mla::sm90::prefill_attention(
        p, {static_cast<std::byte*>(a->scratch), static_cast<size_t>(a->scratch_bytes)},
        a->max_blocks, static_cast<cudaStream_t>(a->stream));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mla_bench_attention: %s\n", error.what());
    return 1;
  }
}

}  // extern "C"
