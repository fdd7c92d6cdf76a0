#include "kernels/cuda/sm90/prefill_attention.h"

#include <algorithm>
#include <limits>
#include <string_view>

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
  const auto* found = std::find_if(std::begin(kVariants), std::end(kVariants), [&](const Variant& v) {
    return v.nope_dim == nope_dim && v.rope_dim == rope_dim && v.v_dim == v_dim && v.dtype == dtype;
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

void check_view(std::string_view name, const void* data, DType dtype, DType expected,
                int64_t row_stride, int64_t head_stride) {
  if (data == nullptr) throw_error(ErrorCode::kInvalidArgument, "{} is null", name);
  if (dtype != expected) {
    throw_error(ErrorCode::kInvalidArgument, "{} is {}, not {}", name, dtype_name(dtype),
                dtype_name(expected));
  }
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    throw_error(ErrorCode::kInvalidArgument, "{} is at {}, not 16-byte aligned", name, data);
  }
  const int64_t unit = expected == DType::kFloat32 ? 4 : 8;
  if (row_stride % unit != 0 || head_stride % unit != 0) {
    throw_error(ErrorCode::kInvalidArgument, "{} has strides {} and {}, not multiples of {}", name,
                row_stride, head_stride, unit);
  }
}

void check_params(const PrefillAttentionParams& p, std::span<std::byte> scratch) {
  const DType dtype = p.q.dtype;
  check_view("q", p.q.data, dtype, dtype, p.q.row_stride, p.q.head_stride);
  if (p.k_rows > 0) {
    check_view("k_nope", p.k_nope.data, p.k_nope.dtype, dtype, p.k_nope.row_stride,
               p.k_nope.head_stride);
    check_view("k_pe", p.k_pe.data, p.k_pe.dtype, dtype, p.k_pe.row_stride, 0);
    check_view("v", p.v.data, p.v.dtype, dtype, p.v.row_stride, p.v.head_stride);
  }
  const DType out = p.out.dtype == DType::kFloat32 ? DType::kFloat32 : dtype;
  check_view("out", p.out.data, p.out.dtype, out, p.out.row_stride, p.out.head_stride);
  if (p.prefix_out.data != nullptr) {
    check_view("prefix_out", p.prefix_out.data, p.prefix_out.dtype, DType::kFloat32,
               p.prefix_out.row_stride, p.prefix_out.head_stride);
    if (p.prefix_lse.data == nullptr) {
      throw_error(ErrorCode::kInvalidArgument, "prefix_out is given without prefix_lse");
    }
  }
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
  if (p.q_rows > kMaxRows || p.k_rows > kMaxRows || p.num_items.capacity > kMaxRows) {
    throw_error(ErrorCode::kInvalidArgument, "{} query rows, {} key rows, {} items: at most {}",
                p.q_rows, p.k_rows, p.num_items.capacity, kMaxRows);
  }
  const size_t needed = ScratchLayout(p.num_items.capacity, 0, p.v_head_dim).bytes;
  if (scratch.size() < needed) {
    throw_error(ErrorCode::kInvalidArgument, "{} bytes of scratch, {} items need {}",
                scratch.size(), p.num_items.capacity, needed);
  }
}

}  // namespace

bool supports_prefill_attention(int32_t nope_dim, int32_t rope_dim, int32_t v_dim, DType dtype) {
  return find_variant(nope_dim, rope_dim, v_dim, dtype) != nullptr;
}

size_t prefill_attention_scratch_bytes(int32_t num_heads, int32_t v_dim, int64_t max_items,
                                       int64_t max_rows) {
  return ScratchLayout(max_items, max_partial_tiles(num_heads, max_rows), v_dim).bytes;
}

void prefill_attention(const PrefillAttentionParams& p, std::span<std::byte> scratch,
                       int max_blocks, cudaStream_t stream) {
  const Variant* const variant =
      find_variant(p.qk_nope_head_dim, p.qk_rope_head_dim, p.v_head_dim, p.q.dtype);
  if (variant == nullptr) {
    throw_error(ErrorCode::kUnsupported, "no Hopper attention for dims {}, {}, {} in {}",
                p.qk_nope_head_dim, p.qk_rope_head_dim, p.v_head_dim, dtype_name(p.q.dtype));
  }
  if (p.num_items.capacity <= 0 || p.max_q_len <= 0 || p.num_heads <= 0 || p.q_rows <= 0) return;
  check_params(p, scratch);

  PrefillKernelArgs args;
  args.q = encode(head_rows_spec(p.q, p.qk_nope_head_dim + p.qk_rope_head_dim, p.num_heads,
                                 p.q_rows, kWarpgroupRows));
  if (p.k_rows > 0) {  // else no item has keys, and the maps are never used
    args.k_nope = encode(head_rows_spec(p.k_nope, p.qk_nope_head_dim, p.num_heads, p.k_rows,
                                        variant->key_rows));
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
  const int blocks = static_cast<int>(
      std::min<int64_t>(max_blocks, p.num_items.capacity * item_tiles * splits));
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
