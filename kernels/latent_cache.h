// The paged latent cache: its view, and the two ops that write and read it.
#ifndef KERNELS_LATENT_CACHE_H_
#define KERNELS_LATENT_CACHE_H_

#include <cstdint>

#include "kernels/tensor.h"

namespace mla {

/// kv_cache [num_pages, page_size, row], one row being kv_cache_row_bytes(format, dims) bytes:
/// L latent values, then Rr RoPE values. Rows of a page are contiguous; pages are `page_stride`
/// bytes apart (a multiple of 16; one layer of an interleaved multi-layer cache is such a view).
template <typename Pointer>
struct BasicLatentCache {
  Pointer data = nullptr;  // 16-byte aligned
  KvCacheFormat format = KvCacheFormat::kBf16;
  float scale = 1.0f;  // kFp8E4M3: value = stored * scale
  int32_t num_pages = 0;
  int32_t page_size = 0;
  int64_t page_stride = 0;
};
using LatentCache = BasicLatentCache<void*>;
using ConstLatentCache = BasicLatentCache<const void*>;

inline ConstLatentCache as_const(const LatentCache& c) {
  return {c.data, c.format, c.scale, c.num_pages, c.page_size, c.page_stride};
}

/// Writes new latent rows into the cache, quantising to its format. e4m3 rounds to nearest even
/// and saturates at +-448; NaN stays NaN. kFp8DsMla: the scale of 128 values is max|x| / 448, and
/// 1 where that is 0.
struct WriteLatentCacheParams {
  int32_t kv_lora_rank = 0;
  int32_t qk_rope_head_dim = 0;
  ConstRows kv_c;                         // [T, L] bf16, strided
  ConstRows k_pe;                         // [T, Rr] bf16, strided
  const int64_t* slot_mapping = nullptr;  // [T] page * page_size + offset; negative: skip
  Count num_tokens;
  LatentCache kv_cache;
};

/// Copies spans of requests from the cache to consecutive rows, dequantised to bf16 (value in
/// float32, rounded once). Row j of span i comes from position starts[i] + j of request
/// request_begin + i. Pages past starts[i] + seq_lens[i] are never read.
struct GatherLatentParams {
  int32_t kv_lora_rank = 0;
  int32_t qk_rope_head_dim = 0;
  ConstLatentCache kv_cache;
  const int32_t* block_table = nullptr;  // row 0 belongs to the first span's request
  int64_t block_table_stride = 0;
  const int32_t* starts = nullptr;       // [n]
  const int32_t* cu_seq_lens = nullptr;  // [n+1], first 0
  Count num_spans;                       // n
  Count num_rows;                        // cu_seq_lens[n]
  Rows latent;                           // [rows, L + Rr] bf16
};

}  // namespace mla

#endif  // KERNELS_LATENT_CACHE_H_
