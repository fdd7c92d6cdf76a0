// A block moves a tile of rows, kUnroll of them in each thread, which keeps to its eight columns;
// neighbouring threads have neighbouring columns.
#include <algorithm>

#include "kernels/cuda/latent_cache.h"
#include "kernels/cuda/latent_row.cuh"
#include "kernels/cuda/launch.cuh"

namespace mla::cuda {
namespace {

constexpr int kMaxThreads = 320;
constexpr int kUnroll = 4;  // rows that a thread has in flight

/// How a block's threads lie over its tile.
struct TileLayout {
  int row_threads = 0;  // of one row: one for each eight columns, and perhaps idle ones
  int pass_rows = 0;    // rows side by side
  __host__ __device__ int tile_rows() const { return pass_rows * kUnroll; }
  int threads() const { return static_cast<int>(divide_up(row_threads * pass_rows, 32)) * 32; }
};

TileLayout tile_layout(int latent_dim, int rope_dim, KvCacheFormat format) {
  const int units = (latent_dim + rope_dim) / 8;  // at most 256
  TileLayout layout;
  // 16 lanes find the scale of 128 values: those of a row must not straddle warps.
  layout.row_threads = format == KvCacheFormat::kFp8DsMla ? (units + 15) / 16 * 16 : units;
  layout.pass_rows = std::min(kMaxThreads / layout.row_threads, 32 / kUnroll);
  return layout;
}

/// This thread's place: rows first, first + pass_rows, ... of the tile.
struct ThreadPlace {
  int first_row = 0;
  int unit = 0;
  bool active = false;

  __device__ ThreadPlace(const TileLayout& layout, int units) {
    first_row = static_cast<int>(threadIdx.x) / layout.row_threads;
    unit = static_cast<int>(threadIdx.x) - first_row * layout.row_threads;
    active = first_row < layout.pass_rows && unit < units;
  }
};

/// A position's page, and its place there. Positions are small as a rule, and 32-bit division much
/// faster.
struct PagePlace {
  int64_t page = 0;
  int64_t offset = 0;

  __device__ PagePlace(int64_t position, int32_t page_size) {
    page = position >> 32 == 0 ? static_cast<uint32_t>(position) / static_cast<uint32_t>(page_size)
                               : position / page_size;
    offset = position - page * page_size;
  }
};

template <KvCacheFormat kFormat, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads, 3)
    write_kernel(const __grid_constant__ WriteLatentCacheParams p, TileLayout layout) {
  __shared__ std::byte* targets[32];  // null: skipped
  const int64_t tokens = length(p.num_tokens);
  const int64_t first_token = int64_t{blockIdx.x} * layout.tile_rows();
  if (first_token >= tokens) return;
  const int rows = static_cast<int>(min(int64_t{layout.tile_rows()}, tokens - first_token));
  const int latent_units = p.kv_lora_rank / 8;
  const ThreadPlace place(layout, latent_units + p.qk_rope_head_dim / 8);

  // The slot is loaded before the values, and waited for after them.
  int64_t slot = -1;
  if (threadIdx.x < rows) slot = p.slot_mapping[first_token + threadIdx.x];
  const bool in_latent = place.unit < latent_units;
  const int column = (in_latent ? place.unit : place.unit - latent_units) * 8;
  const ConstRows source = in_latent ? p.kv_c : p.k_pe;
  const auto* const values_at =
      static_cast<const __nv_bfloat16*>(source.data) + first_token * source.row_stride + column;
  Bf16x8 values[kUnroll] = {};
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const int row = place.first_row + j * layout.pass_rows;
    if (place.active && row < rows) {
      values[j] = load8<kAligned>(values_at + row * source.row_stride);
    }
  }
  if (threadIdx.x < 32) {
    std::byte* target = nullptr;
    if (slot >= 0 && slot < int64_t{p.kv_cache.num_pages} * p.kv_cache.page_size) {
      const PagePlace slot_place(slot, p.kv_cache.page_size);
      target = static_cast<std::byte*>(p.kv_cache.data) + slot_place.page * p.kv_cache.page_stride +
               slot_place.offset * row_bytes<kFormat>(p.kv_lora_rank, p.qk_rope_head_dim);
    }
    targets[threadIdx.x] = target;
  }
  __syncthreads();

  const Divider cache_scale(p.kv_cache.scale);
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const int row = place.first_row + j * layout.pass_rows;
    float tile_scale = 0.0f;
    if constexpr (kFormat == KvCacheFormat::kFp8DsMla) tile_scale = ds_mla_scale(values[j]);
    if (!place.active || row >= rows || targets[row] == nullptr) continue;
    if constexpr (kFormat == KvCacheFormat::kBf16) {
      reinterpret_cast<Bf16x8*>(targets[row])[place.unit] = values[j];
    } else if constexpr (kFormat == KvCacheFormat::kFp8E4M3) {
      reinterpret_cast<E4m3x8*>(targets[row])[place.unit] = quantise(values[j], cache_scale);
    } else if (in_latent) {
      write_ds_mla_unit(targets[row], place.unit, values[j], tile_scale);
    } else {
      reinterpret_cast<Bf16x8*>(targets[row] + kDsMlaRope)[place.unit - latent_units] = values[j];
    }
  }
}

/// The span that holds `row`: the last i in [0, spans) with starts[i] <= row. By one warp, which
/// looks at 32 places a step.
__device__ int32_t find_span(const int32_t* starts, int32_t spans, int64_t row) {
  const int32_t lane = threadIdx.x % 32;
  int32_t low = 0;
  int32_t high = spans;
  while (high - low > 1) {
    const int32_t step = (high - low - 1) / 32 + 1;
    const int64_t at = int64_t{low} + int64_t{lane} * step;
    const uint32_t before = __ballot_sync(~0u, at < high && starts[at] <= row);
    low += (31 - __clz(before)) * step;  // bit 0 is set
    high = static_cast<int32_t>(min(int64_t{high}, int64_t{low} + step));
  }
  return low;
}

template <KvCacheFormat kFormat, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads, 4)
    gather_kernel(const __grid_constant__ GatherLatentParams p, TileLayout layout) {
  __shared__ int32_t tile_spans[2];  // those of the tile's first and last row
  __shared__ const std::byte* sources[32];
  const int32_t spans = static_cast<int32_t>(length(p.num_spans));
  const int64_t first_row = int64_t{blockIdx.x} * layout.tile_rows();
  if (spans == 0 || first_row >= length(p.num_rows)) return;
  const int64_t gathered = min(length(p.num_rows), int64_t{p.cu_seq_lens[spans]});
  if (first_row >= gathered) return;
  const int rows = static_cast<int>(min(int64_t{layout.tile_rows()}, gathered - first_row));

  const int warp = threadIdx.x / 32;
  if (warp < 2) {
    const int32_t span = find_span(p.cu_seq_lens, spans, first_row + (warp == 0 ? 0 : rows - 1));
    if (threadIdx.x % 32 == 0) tile_spans[warp] = span;
  }
  __syncthreads();
  if (threadIdx.x < rows) {
    const int64_t row = first_row + threadIdx.x;
    int32_t span = tile_spans[0];
    int32_t end = tile_spans[1] + 1;
    while (end - span > 1) {  // most tiles lie in one span
      const int32_t middle = span + (end - span) / 2;
      (p.cu_seq_lens[middle] <= row ? span : end) = middle;
    }
    const PagePlace position(int64_t{p.starts[span]} + row - p.cu_seq_lens[span],
                             p.kv_cache.page_size);
    const int64_t page = p.block_table[span * p.block_table_stride + position.page];
    sources[threadIdx.x] = static_cast<const std::byte*>(p.kv_cache.data) +
                           page * p.kv_cache.page_stride +
                           position.offset * row_bytes<kFormat>(p.kv_lora_rank, p.qk_rope_head_dim);
  }
  __syncthreads();

  const ThreadPlace place(layout, (p.kv_lora_rank + p.qk_rope_head_dim) / 8);
  if (!place.active) return;
  Bf16x8 values[kUnroll];
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const int row = place.first_row + j * layout.pass_rows;
    if (row < rows) values[j] = read_unit<kFormat>(sources[row], place.unit, p.kv_cache.scale);
  }
  auto* const latent =
      static_cast<__nv_bfloat16*>(p.latent.data) + first_row * p.latent.row_stride + place.unit * 8;
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const int row = place.first_row + j * layout.pass_rows;
    if (row < rows) store8<kAligned>(latent + row * p.latent.row_stride, values[j]);
  }
}

/// Calls body with the format and the alignment as constants.
template <typename Body>
void with_format(KvCacheFormat format, bool aligned, const Body& body) {
  const auto with_alignment = [&]<KvCacheFormat kFormat>() {
    aligned ? body.template operator()<kFormat, true>()
            : body.template operator()<kFormat, false>();
  };
  switch (format) {
    case KvCacheFormat::kBf16:
      return with_alignment.template operator()<KvCacheFormat::kBf16>();
    case KvCacheFormat::kFp8E4M3:
      return with_alignment.template operator()<KvCacheFormat::kFp8E4M3>();
    case KvCacheFormat::kFp8DsMla:
      return with_alignment.template operator()<KvCacheFormat::kFp8DsMla>();
  }
}

}  // namespace

void write_latent_cache(const WriteLatentCacheParams& p, cudaStream_t stream) {
  const TileLayout layout = tile_layout(p.kv_lora_rank, p.qk_rope_head_dim, p.kv_cache.format);
  const bool aligned = vector_aligned(p.kv_c.data, p.kv_c.dtype, p.kv_c.row_stride) &&
                       vector_aligned(p.k_pe.data, p.k_pe.dtype, p.k_pe.row_stride);
  with_format(p.kv_cache.format, aligned, [&]<KvCacheFormat kFormat, bool kAligned>() {
    launch("launching write_latent_cache", write_kernel<kFormat, kAligned>,
           divide_up(p.num_tokens.capacity, layout.tile_rows()), layout.threads(), 0, stream, p,
           layout);
  });
}

void gather_latent(const GatherLatentParams& p, cudaStream_t stream) {
  if (p.num_spans.capacity == 0) return;
  const TileLayout layout = tile_layout(p.kv_lora_rank, p.qk_rope_head_dim, p.kv_cache.format);
  const bool aligned = vector_aligned(p.latent.data, p.latent.dtype, p.latent.row_stride);
  with_format(p.kv_cache.format, aligned, [&]<KvCacheFormat kFormat, bool kAligned>() {
    // Two warps search.
    launch("launching gather_latent", gather_kernel<kFormat, kAligned>,
           divide_up(p.num_rows.capacity, layout.tile_rows()), std::max(layout.threads(), 64), 0,
           stream, p, layout);
  });
}

}  // namespace mla::cuda
