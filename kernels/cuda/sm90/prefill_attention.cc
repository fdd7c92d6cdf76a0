#include "kernels/cuda/sm90/prefill_attention.h"

#include <algorithm>
#include <limits>

#include "kernels/cuda/check.h"
#include "kernels/cuda/sm90/kernel_args.h"
#include "kernels/cuda/sm90/tensor_maps.h"
#include "kernels/cuda/sm90/tile_config.h"
#include "metadata/error.h"

namespace mla::sm90 {
namespace {

using Launch = cudaError_t (*)(const PrefillKernelArgs&, int, cudaStream_t);

struct Variant {
  int32_t nope_dim, rope_dim, v_dim, key_rows;
  DType dtype;
  Launch launch;
};

template <typename Config>
constexpr Variant variant(DType dtype, Launch launch) {
  return {Config::kNopeDim, Config::kRopeDim, Config::kValueDim, Config::kKeyRows, dtype, launch};
}

constexpr Variant kVariants[] = {
    variant<DeepSeekTiles>(DType::kBFloat16, launch_deepseek_bf16),
    variant<DeepSeekTiles>(DType::kFloat16, launch_deepseek_fp16),
    variant<GlmTiles>(DType::kBFloat16, launch_glm_bf16),
    variant<GlmTiles>(DType::kFloat16, launch_glm_fp16),
};

const Variant* find_variant(int32_t nope_dim, int32_t rope_dim, int32_t v_dim, DType dtype) {
  const auto* found =
      std::find_if(std::begin(kVariants), std::end(kVariants), [&](const Variant& v) {
        return v.nope_dim == nope_dim && v.rope_dim == rope_dim && v.v_dim == v_dim &&
               v.dtype == dtype;
      });
  return found == std::end(kVariants) ? nullptr : found;
}

constexpr size_t kScratchAlignment = 256;
constexpr size_t align_up(size_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

/// Scratch, region by region; each starts at 256 bytes.
struct ScratchLayout {
  ScratchLayout(int64_t items, int64_t partials, int32_t v_dim) {
    const size_t n = static_cast<size_t>(items);
    const size_t p = static_cast<size_t>(partials);
    first_tile = kScratchAlignment;  // after the two counters
    scheduled_items = first_tile + align_up((n + 1) * sizeof(int32_t));
    arrivals = scheduled_items + align_up(n * sizeof(ScheduledItem));
    partial_lse = arrivals + align_up(p * kConsumerWarps * sizeof(uint32_t));
    partial_out = partial_lse + align_up(p * kQueryRows * sizeof(float));
    bytes = partial_out + p * kQueryRows * static_cast<size_t>(v_dim) * sizeof(float);
  }

  size_t first_tile, scheduled_items, arrivals, partial_lse, partial_out, bytes;
};

/// The most partial tiles that fit.
int32_t partials_in(size_t scratch_bytes, int64_t items, int32_t v_dim) {
  const size_t partial_bytes = ScratchLayout(0, 1 << 10, v_dim).bytes >> 10;
  int64_t partials = static_cast<int64_t>(scratch_bytes / partial_bytes);
  while (partials > 0 && ScratchLayout(items, partials, v_dim).bytes > scratch_bytes) --partials;
  return static_cast<int32_t>(
      std::min<int64_t>(partials, std::numeric_limits<int32_t>::max() / kQueryRows));
}

TileList tile_list(std::span<std::byte> scratch, int64_t items, int32_t v_dim) {
  TileList list;
  list.max_partials = partials_in(scratch.size(), items, v_dim);
  const ScratchLayout layout(items, list.max_partials, v_dim);
  std::byte* const base = scratch.data();
  list.next_tile = reinterpret_cast<int32_t*>(base);
  list.num_items = list.next_tile + 1;
  list.first_tile = reinterpret_cast<int32_t*>(base + layout.first_tile);
  list.items = reinterpret_cast<ScheduledItem*>(base + layout.scheduled_items);
  list.arrivals = reinterpret_cast<uint32_t*>(base + layout.arrivals);
  list.partial_lse = reinterpret_cast<float*>(base + layout.partial_lse);
  list.partial_out = reinterpret_cast<float*>(base + layout.partial_out);
  return list;
}

/// What the copy engine asks of a tensor: rows apart in memory, 16-byte aligned, below its limits.
template <typename View>
bool copyable(const View& view, int64_t head_stride) {
  constexpr int64_t kMaxStride = (int64_t{1} << 40) / 2;  // 2-byte elements
  const auto fits = [](int64_t stride) { return stride % 8 == 0 && stride < kMaxStride; };
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.row_stride > 0 &&
         fits(view.row_stride) && fits(head_stride);
}

/// Rows are read and written 16 bytes at a time.
bool vector_aligned(const ConstHeadRows& view) {
  const int64_t unit = 16 / dtype_bytes(view.dtype);
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.row_stride % unit == 0 &&
         view.head_stride % unit == 0;
}

}  // namespace

bool supports_prefill_attention(int32_t nope_dim, int32_t rope_dim, int32_t v_dim, DType dtype) {
  return find_variant(nope_dim, rope_dim, v_dim, dtype) != nullptr;
}

bool supports_prefill_attention(const PrefillAttentionParams& p) {
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
  const bool keys = p.k_rows == 0 || (copyable(p.k_nope, p.k_nope.head_stride) &&
                                      copyable(p.k_pe, 0) && copyable(p.v, p.v.head_stride));
  return find_variant(p.qk_nope_head_dim, p.qk_rope_head_dim, p.v_head_dim, p.q.dtype) != nullptr &&
         p.q_rows <= kMaxRows && p.k_rows <= kMaxRows && p.num_items.capacity <= kMaxRows &&
         (p.q_rows == 0 || copyable(p.q, p.q.head_stride)) && keys &&
         vector_aligned(as_const(p.out)) && vector_aligned(p.prefix_out);
}

size_t prefill_attention_scratch_bytes(int32_t num_heads, int32_t v_dim, int64_t max_items,
                                       int64_t max_rows) {
  return ScratchLayout(max_items, max_partial_tiles(num_heads, max_rows), v_dim).bytes;
}

void prefill_attention(const PrefillAttentionParams& p, std::span<std::byte> scratch,
                       int max_blocks, cudaStream_t stream) {
  if (!supports_prefill_attention(p)) {
    throw_error(ErrorCode::kUnsupported,
                "the Hopper attention serves no {} with dims {}, {}, {}, or not these strides",
                dtype_name(p.q.dtype), p.qk_nope_head_dim, p.qk_rope_head_dim, p.v_head_dim);
  }
  if (p.num_items.capacity <= 0 || p.max_q_len <= 0 || p.num_heads <= 0 || p.q_rows <= 0) return;
  const size_t needed = ScratchLayout(p.num_items.capacity, 0, p.v_head_dim).bytes;
  if (scratch.size() < needed) {
    throw_error(ErrorCode::kInvalidArgument, "{} bytes of scratch, {} items need {}",
                scratch.size(), p.num_items.capacity, needed);
  }
  const Variant* const variant =
      find_variant(p.qk_nope_head_dim, p.qk_rope_head_dim, p.v_head_dim, p.q.dtype);

  PrefillKernelArgs args;
  args.q = encode(head_rows_spec(p.q, p.qk_nope_head_dim + p.qk_rope_head_dim, p.num_heads,
                                 p.q_rows, kWarpgroupRows));
  if (p.k_rows > 0) {  // else no item has keys, and the maps are never used
    args.k_nope = encode(
        head_rows_spec(p.k_nope, p.qk_nope_head_dim, p.num_heads, p.k_rows, variant->key_rows));
    args.k_pe = encode(rows_spec(p.k_pe, p.qk_rope_head_dim, p.k_rows, variant->key_rows));
    args.v = encode(head_rows_spec(p.v, p.v_head_dim, p.num_heads, p.k_rows, variant->key_rows));
  }
  args.q_head_step = head_step(p.q, p.num_heads);
  args.k_head_step = head_step(p.k_nope, p.num_heads);
  args.v_head_step = head_step(p.v, p.num_heads);
  args.num_heads = p.num_heads;
  args.softmax_scale = p.softmax_scale;
  args.tiles = tile_list(scratch, p.num_items.capacity, p.v_head_dim);
  args.prefix_out = p.prefix_out;
  args.prefix_lse = p.prefix_lse;
  args.out = p.out;
  args.lse = p.lse;

  const int64_t item_tiles = int64_t{(p.max_q_len + kQueryRows - 1) / kQueryRows} * p.num_heads;
  const int64_t splits = item_tiles <= kMaxSplitTiles ? kMaxSplits : 1;
  const int blocks =
      static_cast<int>(std::min<int64_t>(max_blocks, p.num_items.capacity * item_tiles * splits));
  PrepareTilesArgs prepare;
  prepare.items = p.items;
  prepare.num_items = p.num_items;
  prepare.num_heads = p.num_heads;
  prepare.num_blocks = blocks;
  prepare.tiles = args.tiles;
  check_cuda(launch_prepare_tiles(prepare, stream), "launching prepare_tiles");
  check_cuda(variant->launch(args, blocks, stream), "launching prefill_attention");
}

}  // namespace mla::sm90
