// A block moves 32 rows: first where each of them lies in the cache, then the values, eight at a
// time, with consecutive threads on consecutive values.
#include "kernels/cuda/latent_cache.h"
#include "kernels/cuda/latent_row.cuh"
#include "kernels/cuda/launch.cuh"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 32;
constexpr int kUnroll = 3;  // loads a thread has in flight

template <typename Pointer>
__device__ Pointer* cache_row(Pointer* data, int64_t page, int64_t offset, int64_t page_stride,
                              int64_t bytes) {
  return data + page * page_stride + offset * bytes;
}

/// Calls move(row, unit, j) for the units of `rows` rows, kUnroll (j) at a time; `load` comes for
/// all of them before `store`.
template <typename Load, typename Store>
__device__ void for_each_unit(int rows, int row_units, const Load& load, const Store& store) {
  for (int first = threadIdx.x; first < rows * row_units; first += kThreads * kUnroll) {
    Bf16x8 values[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int row = (first + j * kThreads) / row_units;
      if (row < rows) values[j] = load(row, first + j * kThreads - row * row_units);
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int row = (first + j * kThreads) / row_units;
      if (row < rows) store(row, first + j * kThreads - row * row_units, values[j]);
    }
  }
}

template <KvCacheFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    write_kernel(const __grid_constant__ WriteLatentCacheParams p, bool latent_aligned,
                 bool rope_aligned) {
  __shared__ std::byte* targets[kTileRows];  // null: skipped
  const int64_t tokens = length(p.num_tokens);
  const int64_t first_token = int64_t{blockIdx.x} * kTileRows;
  if (first_token >= tokens) return;
  const int rows = static_cast<int>(min(int64_t{kTileRows}, tokens - first_token));

  if (threadIdx.x < kTileRows) {
    std::byte* target = nullptr;
    if (threadIdx.x < rows) {
      const int64_t slot = p.slot_mapping[first_token + threadIdx.x];
      const int64_t page_size = p.kv_cache.page_size;
      if (slot >= 0 && slot < p.kv_cache.num_pages * page_size) {
        target = cache_row(static_cast<std::byte*>(p.kv_cache.data), slot / page_size,
                           slot % page_size, p.kv_cache.page_stride,
                           row_bytes<kFormat>(p.kv_lora_rank, p.qk_rope_head_dim));
      }
    }
    targets[threadIdx.x] = target;
  }
  __syncthreads();

  const int latent_units = p.kv_lora_rank / 8;
  const auto load_latent = [&](int row, int unit) {
    return load8(static_cast<const __nv_bfloat16*>(p.kv_c.data) +
                     (first_token + row) * p.kv_c.row_stride + unit * 8,
                 latent_aligned);
  };
  const auto load_rope = [&](int row, int unit) {
    return load8(static_cast<const __nv_bfloat16*>(p.k_pe.data) +
                     (first_token + row) * p.k_pe.row_stride + unit * 8,
                 rope_aligned);
  };
  if constexpr (kFormat == KvCacheFormat::kFp8DsMla) {
    // All 32 rows take part, so that whole warps come to the shuffles.
    for_each_unit(
        kTileRows, latent_units,
        [&](int row, int unit) {
          return targets[row] == nullptr ? Bf16x8{} : load_latent(row, unit);
        },
        [&](int row, int unit, const Bf16x8& values) {
          write_ds_mla_unit(targets[row], unit, values);
        });
    for_each_unit(
        rows, p.qk_rope_head_dim / 8,
        [&](int row, int unit) {
          return targets[row] == nullptr ? Bf16x8{} : load_rope(row, unit);
        },
        [&](int row, int unit, const Bf16x8& values) {
          if (targets[row] == nullptr) return;
          write_unit<kFormat>(targets[row], latent_units + unit, values, 0.0f);
        });
  } else {
    for_each_unit(
        rows, latent_units + p.qk_rope_head_dim / 8,
        [&](int row, int unit) {
          if (targets[row] == nullptr) return Bf16x8{};
          return unit < latent_units ? load_latent(row, unit) : load_rope(row, unit - latent_units);
        },
        [&](int row, int unit, const Bf16x8& values) {
          if (targets[row] == nullptr) return;
          write_unit<kFormat>(targets[row], unit, values, p.kv_cache.scale);
        });
  }
}

/// The span that holds `row`: the last i in [0, spans) with starts[i] <= row. By one warp, which
/// looks at 32 places a step.
__device__ int64_t find_span(const int32_t* starts, int64_t spans, int64_t row) {
  const int lane = threadIdx.x % 32;
  int64_t low = 0;
  int64_t high = spans;
  while (high - low > 1) {
    const int64_t step = (high - low + 31) / 32;
    const int64_t place = low + lane * step;
    const uint32_t before = __ballot_sync(~0u, place < high && starts[place] <= row);
    low += (31 - __clz(before)) * step;  // bit 0 is set
    high = min(high, low + step);
  }
  return low;
}

template <KvCacheFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ GatherLatentParams p, bool latent_aligned) {
  __shared__ int64_t tile_spans[2];  // those of the tile's first and last row
  __shared__ const std::byte* sources[kTileRows];
  const int64_t spans = length(p.num_spans);
  const int64_t first_row = int64_t{blockIdx.x} * kTileRows;
  if (spans == 0 || first_row >= length(p.num_rows)) return;
  const int64_t gathered = min(length(p.num_rows), int64_t{p.cu_seq_lens[spans]});
  if (first_row >= gathered) return;
  const int rows = static_cast<int>(min(int64_t{kTileRows}, gathered - first_row));

  const int warp = threadIdx.x / 32;
  if (warp < 2) {
    const int64_t span = find_span(p.cu_seq_lens, spans, first_row + (warp == 0 ? 0 : rows - 1));
    if (threadIdx.x % 32 == 0) tile_spans[warp] = span;
  }
  __syncthreads();
  if (threadIdx.x < rows) {
    const int64_t row = first_row + threadIdx.x;
    int64_t span = tile_spans[0];
    int64_t end = tile_spans[1] + 1;
    while (end - span > 1) {  // most tiles lie in one span
      const int64_t middle = (span + end) / 2;
      (p.cu_seq_lens[middle] <= row ? span : end) = middle;
    }
    const int64_t position = int64_t{p.starts[span]} + row - p.cu_seq_lens[span];
    const int64_t page_size = p.kv_cache.page_size;
    const int64_t page = p.block_table[span * p.block_table_stride + position / page_size];
    sources[threadIdx.x] =
        cache_row(static_cast<const std::byte*>(p.kv_cache.data), page, position % page_size,
                  p.kv_cache.page_stride, row_bytes<kFormat>(p.kv_lora_rank, p.qk_rope_head_dim));
  }
  __syncthreads();

  for_each_unit(
      rows, (p.kv_lora_rank + p.qk_rope_head_dim) / 8,
      [&](int row, int unit) { return read_unit<kFormat>(sources[row], unit, p.kv_cache.scale); },
      [&](int row, int unit, const Bf16x8& values) {
        store8(static_cast<__nv_bfloat16*>(p.latent.data) +
                   (first_row + row) * p.latent.row_stride + unit * 8,
               values, latent_aligned);
      });
}

/// Calls body with the format as a constant.
template <typename Body>
void with_format(KvCacheFormat format, const Body& body) {
  switch (format) {
    case KvCacheFormat::kBf16:
      return body.template operator()<KvCacheFormat::kBf16>();
    case KvCacheFormat::kFp8E4M3:
      return body.template operator()<KvCacheFormat::kFp8E4M3>();
    case KvCacheFormat::kFp8DsMla:
      return body.template operator()<KvCacheFormat::kFp8DsMla>();
  }
}

}  // namespace

void write_latent_cache(const WriteLatentCacheParams& p, cudaStream_t stream) {
  const bool latent_aligned = vector_aligned(p.kv_c.data, p.kv_c.dtype, p.kv_c.row_stride);
  const bool rope_aligned = vector_aligned(p.k_pe.data, p.k_pe.dtype, p.k_pe.row_stride);
  with_format(p.kv_cache.format, [&]<KvCacheFormat kFormat>() {
    launch("launching write_latent_cache", write_kernel<kFormat>,
           divide_up(p.num_tokens.capacity, kTileRows), kThreads, 0, stream, p, latent_aligned,
           rope_aligned);
  });
}

void gather_latent(const GatherLatentParams& p, cudaStream_t stream) {
  if (p.num_spans.capacity == 0) return;
  const bool aligned = vector_aligned(p.latent.data, p.latent.dtype, p.latent.row_stride);
  with_format(p.kv_cache.format, [&]<KvCacheFormat kFormat>() {
    launch("launching gather_latent", gather_kernel<kFormat>,
           divide_up(p.num_rows.capacity, kTileRows), kThreads, 0, stream, p, aligned);
  });
}

}  // namespace mla::cuda
