// Writing and gathering latent rows of the paged cache.
#include <cmath>
#include <cstring>

#include "kernels/convert.h"
#include "kernels/cpu/ops.h"
#include "metadata/error.h"

namespace mla::cpu {
namespace {

constexpr int64_t kRowsPerTask = 64;

// Layout of a kFp8DsMla row.
constexpr int kDsMlaLatent = 512;
constexpr int kDsMlaTile = 128;
constexpr int kDsMlaScales = 512;  // byte offsets
constexpr int kDsMlaRope = 528;

/// Calls body(row) for every row, in blocks.
template <typename Body>
void for_each_row(Executor& executor, int64_t rows, const Body& body) {
  parallel_for(executor, (rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t block, int) {
    const int64_t end = std::min(rows, (block + 1) * kRowsPerTask);
    for (int64_t row = block * kRowsPerTask; row < end; ++row) body(row);
  });
}

template <typename Pointer>
int64_t row_bytes(const BasicLatentCache<Pointer>& cache, int32_t l, int32_t rr) {
  return kv_cache_row_bytes(cache.format, {.qk_rope_head_dim = rr, .kv_lora_rank = l});
}

void quantise(const uint16_t* values, int64_t n, float scale, uint8_t* stored) {
  for (int64_t i = 0; i < n; ++i) stored[i] = float_to_e4m3(bf16_to_float(values[i]) / scale);
}

void dequantise(const uint8_t* stored, int64_t n, float scale, uint16_t* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = float_to_bf16(e4m3_to_float(stored[i]) * scale);
}

float ds_mla_scale(const uint16_t* tile) {
  float largest = 0.0f;
  for (int i = 0; i < kDsMlaTile; ++i) {
    largest = std::fmax(largest, std::fabs(bf16_to_float(tile[i])));
  }
  return largest == 0.0f ? 1.0f : largest / kE4M3Max;
}

void write_row(const LatentCache& cache, const uint16_t* kv_c, int64_t l, const uint16_t* k_pe,
               int64_t rr, std::byte* row) {
  auto* bytes = reinterpret_cast<uint8_t*>(row);
  switch (cache.format) {
    case KvCacheFormat::kBf16:
      std::memcpy(row, kv_c, l * 2);
      std::memcpy(row + l * 2, k_pe, rr * 2);
      break;
    case KvCacheFormat::kFp8E4M3:
      quantise(kv_c, l, cache.scale, bytes);
      quantise(k_pe, rr, cache.scale, bytes + l);
      break;
    case KvCacheFormat::kFp8DsMla:
      for (int tile = 0; tile < kDsMlaLatent / kDsMlaTile; ++tile) {
        const float scale = ds_mla_scale(kv_c + tile * kDsMlaTile);
        quantise(kv_c + tile * kDsMlaTile, kDsMlaTile, scale, bytes + tile * kDsMlaTile);
        std::memcpy(row + kDsMlaScales + tile * sizeof(float), &scale, sizeof(float));
      }
      std::memcpy(row + kDsMlaRope, k_pe, rr * 2);
      break;
  }
}

void read_row(const ConstLatentCache& cache, const std::byte* row, int64_t l, int64_t rr,
              uint16_t* latent) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(row);
  switch (cache.format) {
    case KvCacheFormat::kBf16:
      std::memcpy(latent, row, (l + rr) * 2);
      break;
    case KvCacheFormat::kFp8E4M3:
      dequantise(bytes, l + rr, cache.scale, latent);
      break;
    case KvCacheFormat::kFp8DsMla:
      for (int tile = 0; tile < kDsMlaLatent / kDsMlaTile; ++tile) {
        float scale;
        std::memcpy(&scale, row + kDsMlaScales + tile * sizeof(float), sizeof(float));
        dequantise(bytes + tile * kDsMlaTile, kDsMlaTile, scale, latent + tile * kDsMlaTile);
      }
      std::memcpy(latent + l, row + kDsMlaRope, rr * 2);
      break;
  }
}

void check_slots(const WriteLatentCacheParams& p, int64_t tokens) {
  const int64_t num_slots = int64_t{p.kv_cache.num_pages} * p.kv_cache.page_size;
  for (int64_t t = 0; t < tokens; ++t) {
    if (p.slot_mapping[t] >= num_slots) {
      throw_error(ErrorCode::kInvalidArgument, "token {} has slot {}, the cache has {} slots", t,
                  p.slot_mapping[t], num_slots);
    }
  }
}

void check_spans(const GatherLatentParams& p, int64_t spans, int64_t rows) {
  for (int64_t i = 0; i < spans; ++i) {
    const int64_t begin = p.cu_seq_lens[i];
    const int64_t end = p.cu_seq_lens[i + 1];
    if ((i == 0 && begin != 0) || end < begin || end > rows) {
      throw_error(ErrorCode::kInvalidArgument,
                  "span {} covers rows {} to {}, must start where the last one ended and end "
                  "within {} rows",
                  i, begin, end, rows);
    }
    if (end == begin) continue;
    const int64_t start = p.starts[i];
    if (start < 0) {
      throw_error(ErrorCode::kInvalidArgument, "span {} starts at {}, at least 0", i, start);
    }
    const int64_t first_page = start / p.kv_cache.page_size;
    const int64_t last_page = (start + end - begin - 1) / p.kv_cache.page_size;
    for (int64_t page = first_page; page <= last_page; ++page) {
      const int32_t id = p.block_table[i * p.block_table_stride + page];
      if (id < 0 || id >= p.kv_cache.num_pages) {
        throw_error(ErrorCode::kInvalidArgument, "span {} has page id {} at {}, the cache has {}",
                    i, id, page, p.kv_cache.num_pages);
      }
    }
  }
}

}  // namespace

void write_latent_cache(const WriteLatentCacheParams& p, Executor& executor) {
  const int64_t tokens = length(p.num_tokens);
  if (tokens == 0) return;
  check_slots(p, tokens);
  const int64_t l = p.kv_lora_rank;
  const int64_t rr = p.qk_rope_head_dim;
  const int64_t bytes = row_bytes(p.kv_cache, p.kv_lora_rank, p.qk_rope_head_dim);
  const int64_t page_size = p.kv_cache.page_size;
  for_each_row(executor, tokens, [&](int64_t t) {
    const int64_t slot = p.slot_mapping[t];
    if (slot < 0) return;
    write_row(p.kv_cache, static_cast<const uint16_t*>(p.kv_c.data) + t * p.kv_c.row_stride, l,
              static_cast<const uint16_t*>(p.k_pe.data) + t * p.k_pe.row_stride, rr,
              static_cast<std::byte*>(p.kv_cache.data) + slot / page_size * p.kv_cache.page_stride +
                  slot % page_size * bytes);
  });
}

void gather_latent(const GatherLatentParams& p, Executor& executor) {
  const int64_t spans = length(p.num_spans);
  const int64_t rows = length(p.num_rows);
  if (spans == 0 || rows == 0) return;
  check_spans(p, spans, rows);
  const int64_t l = p.kv_lora_rank;
  const int64_t rr = p.qk_rope_head_dim;
  const int64_t bytes = row_bytes(p.kv_cache, p.kv_lora_rank, p.qk_rope_head_dim);
  const int64_t page_size = p.kv_cache.page_size;
  const int64_t gathered = std::min<int64_t>(rows, p.cu_seq_lens[spans]);
  for_each_row(executor, gathered, [&](int64_t row) {
    const int64_t span =
        std::upper_bound(p.cu_seq_lens, p.cu_seq_lens + spans, row) - p.cu_seq_lens - 1;
    const int64_t position = int64_t{p.starts[span]} + row - p.cu_seq_lens[span];
    const int64_t page = p.block_table[span * p.block_table_stride + position / page_size];
    read_row(p.kv_cache,
             static_cast<const std::byte*>(p.kv_cache.data) + page * p.kv_cache.page_stride +
                 position % page_size * bytes,
             l, rr, static_cast<uint16_t*>(p.latent.data) + row * p.latent.row_stride);
  });
}

}  // namespace mla::cpu
