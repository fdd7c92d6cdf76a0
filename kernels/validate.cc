#include "kernels/validate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "metadata/error.h"

namespace mla {
namespace {

constexpr int32_t kMaxDim = 1024;

[[noreturn]] void invalid(const std::string& message) {
  throw_error(ErrorCode::kInvalidArgument, "{}", message);
}

void check_count(const Count& count, std::string_view name) {
  if (count.capacity < 0) invalid(fmt::format("{} is {}, at least 0", name, count.capacity));
}

void check_heads(int32_t num_heads) {
  if (num_heads < 1) invalid(fmt::format("num_heads is {}, at least 1", num_heads));
}

/// A multiple of 8 in [least, 1024].
void check_dim(int32_t dim, std::string_view name, int32_t least = 8) {
  if (dim < least || dim > kMaxDim || dim % 8 != 0) {
    invalid(
        fmt::format("{} is {}, must be a multiple of 8 from {} to {}", name, dim, least, kMaxDim));
  }
}

void check_pointer(const void* data, size_t alignment, std::string_view name) {
  if (data == nullptr) invalid(fmt::format("{} is null", name));
  if (reinterpret_cast<uintptr_t>(data) % alignment != 0) {
    invalid(fmt::format("{} is at {}, must be aligned to {} bytes", name, data, alignment));
  }
}

void check_dtype(DType dtype, std::initializer_list<DType> allowed, std::string_view name) {
  if (std::ranges::find(allowed, dtype) != allowed.end()) return;
  std::string names;
  for (const DType a : allowed) names += (names.empty() ? "" : ", ") + std::string(dtype_name(a));
  throw_error(ErrorCode::kUnsupported, "{} is {}, must be one of: {}", name, dtype_name(dtype),
              names);
}

void check_stride(int64_t stride, int64_t least, std::string_view name, std::string_view which) {
  if (stride < least) {
    invalid(fmt::format("{} has {} stride {}, at least {}", name, which, stride, least));
  }
}

template <typename Pointer>
void check_rows(const BasicRows<Pointer>& view, int64_t rows, int64_t columns,
                std::string_view name) {
  if (rows == 0) return;
  check_pointer(view.data, dtype_bytes(view.dtype), name);
  if (rows > 1) check_stride(view.row_stride, columns, name, "row");
}

/// What is read may lie in any order; a head stride of 0 shares one row among the heads.
void check_input(const ConstHeadRows& view, int64_t rows, int32_t heads, int64_t dim,
                 std::string_view name) {
  if (rows == 0) return;
  check_pointer(view.data, dtype_bytes(view.dtype), name);
  if (rows > 1) check_stride(view.row_stride, dim, name, "row");
  if (heads > 1 && view.head_stride != 0) check_stride(view.head_stride, dim, name, "head");
}

/// Distinct (row, head) pairs may not share memory where the strides can tell.
void check_output_strides(int64_t row_stride, int64_t head_stride, int64_t rows, int32_t heads,
                          int64_t dim, std::string_view name) {
  if (heads > 1) check_stride(head_stride, dim, name, "head");
  if (rows > 1) {
    const bool head_major = heads > 1 && head_stride > row_stride;
    const int64_t row_extent = head_major ? dim : (heads - 1) * head_stride + dim;
    check_stride(row_stride, row_extent, name, "row");
  }
}

void check_output(const HeadRows& view, int64_t rows, int32_t heads, int64_t dim,
                  std::string_view name) {
  if (rows == 0) return;
  check_pointer(view.data, dtype_bytes(view.dtype), name);
  check_output_strides(view.row_stride, view.head_stride, rows, heads, dim, name);
}

void check_lse_input(const ConstLse& view, int64_t rows, int32_t heads, std::string_view name) {
  if (rows == 0) return;
  check_pointer(view.data, sizeof(float), name);
  if (rows > 1) check_stride(view.row_stride, 1, name, "row");
  if (heads > 1) check_stride(view.head_stride, 1, name, "head");
}

void check_lse_output(const Lse& view, int64_t rows, int32_t heads, std::string_view name) {
  if (rows == 0) return;
  check_pointer(view.data, sizeof(float), name);
  check_output_strides(view.row_stride, view.head_stride, rows, heads, 1, name);
}

/// In place means the same elements at the same addresses.
void check_in_place(const HeadRows& out, const ConstHeadRows& in, std::string_view out_name,
                    std::string_view in_name) {
  if (out.data != in.data || out.data == nullptr) return;
  if (out.dtype != in.dtype || out.row_stride != in.row_stride ||
      out.head_stride != in.head_stride) {
    invalid(
        fmt::format("{} shares memory with {}, but not dtype and strides: {} ({}, {}) against "
                    "{} ({}, {})",
                    out_name, in_name, dtype_name(out.dtype), out.row_stride, out.head_stride,
                    dtype_name(in.dtype), in.row_stride, in.head_stride));
  }
}

void check_in_place(const Lse& out, const ConstLse& in, std::string_view out_name,
                    std::string_view in_name) {
  if (out.data != in.data || out.data == nullptr) return;
  if (out.row_stride != in.row_stride || out.head_stride != in.head_stride) {
    invalid(fmt::format("{} shares memory with {}, but not strides: ({}, {}) against ({}, {})",
                        out_name, in_name, out.row_stride, out.head_stride, in.row_stride,
                        in.head_stride));
  }
}

template <typename Pointer>
void check_cache(const BasicLatentCache<Pointer>& cache, int32_t kv_lora_rank,
                 int32_t qk_rope_head_dim) {
  check_dim(kv_lora_rank, "kv_lora_rank");
  check_dim(qk_rope_head_dim, "qk_rope_head_dim");
  const ModelDims dims{.qk_rope_head_dim = qk_rope_head_dim, .kv_lora_rank = kv_lora_rank};
  const int64_t row_bytes = kv_cache_row_bytes(cache.format, dims);
  check_pointer(cache.data, 16, "kv_cache");
  if (cache.num_pages < 0) invalid(fmt::format("num_pages is {}, at least 0", cache.num_pages));
  if (cache.page_size < 1) invalid(fmt::format("page_size is {}, at least 1", cache.page_size));
  check_stride(cache.page_stride, cache.page_size * row_bytes, "kv_cache", "page");
  if (cache.page_stride % 16 != 0) {
    invalid(fmt::format("kv_cache has page stride {} bytes, must be a multiple of 16",
                        cache.page_stride));
  }
  if (cache.format == KvCacheFormat::kFp8E4M3 &&
      !(std::isfinite(cache.scale) && cache.scale > 0.0f)) {
    invalid(fmt::format("the cache's scale is {}, must be finite and positive", cache.scale));
  }
}

/// The rule for what attention kernels load in 16-byte units.
void check_vector_access(const void* data, int64_t row_stride, int64_t head_stride,
                         std::string_view name) {
  check_pointer(data, 16, name);
  for (const int64_t stride : {row_stride, head_stride}) {
    if (stride % 8 != 0) {
      invalid(fmt::format("{} has stride {}, must be a multiple of 8", name, stride));
    }
  }
}

}  // namespace

void validate(const WriteLatentCacheParams& p) {
  check_count(p.num_tokens, "num_tokens");
  check_dtype(p.kv_c.dtype, {DType::kBFloat16}, "kv_c");
  check_dtype(p.k_pe.dtype, {DType::kBFloat16}, "k_pe");
  const int64_t tokens = p.num_tokens.capacity;
  if (tokens == 0) return;
  check_cache(p.kv_cache, p.kv_lora_rank, p.qk_rope_head_dim);
  check_rows(p.kv_c, tokens, p.kv_lora_rank, "kv_c");
  check_rows(p.k_pe, tokens, p.qk_rope_head_dim, "k_pe");
  check_pointer(p.slot_mapping, alignof(int64_t), "slot_mapping");
}

void validate(const GatherLatentParams& p) {
  check_count(p.num_spans, "num_spans");
  check_count(p.num_rows, "num_rows");
  check_dtype(p.latent.dtype, {DType::kBFloat16}, "latent");
  if (p.num_spans.capacity == 0 || p.num_rows.capacity == 0) return;
  check_cache(p.kv_cache, p.kv_lora_rank, p.qk_rope_head_dim);
  check_pointer(p.block_table, alignof(int32_t), "block_table");
  if (p.num_spans.capacity > 1) check_stride(p.block_table_stride, 1, "block_table", "row");
  check_pointer(p.starts, alignof(int32_t), "starts");
  check_pointer(p.cu_seq_lens, alignof(int32_t), "cu_seq_lens");
  check_rows(p.latent, p.num_rows.capacity, p.kv_lora_rank + p.qk_rope_head_dim, "latent");
}

void validate(const ExpandParams& p) {
  validate_dims(p.dims);
  check_count(p.num_rows, "num_rows");
  check_dtype(p.latent.dtype, {DType::kBFloat16}, "latent");
  check_dtype(p.expanded.dtype, {DType::kBFloat16}, "expanded");
  const int64_t rows = p.num_rows.capacity;
  if (rows == 0) return;
  check_rows(p.latent, rows, p.dims.kv_lora_rank, "latent");
  check_pointer(p.kv_b_proj, sizeof(uint16_t), "kv_b_proj");
  check_rows(p.expanded, rows, int64_t{p.dims.num_heads} * p.dims.kv_head_dim(), "expanded");
}

void validate(const AbsorbQueryParams& p) {
  validate_dims(p.dims);
  check_count(p.num_rows, "num_rows");
  check_dtype(p.q.dtype, {DType::kBFloat16}, "q");
  check_dtype(p.absorbed.dtype, {DType::kBFloat16, DType::kFloat32}, "absorbed");
  const int64_t rows = p.num_rows.capacity;
  if (rows == 0) return;
  check_input(p.q, rows, p.dims.num_heads, p.dims.qk_head_dim(), "q");
  check_pointer(p.kv_b_proj, sizeof(uint16_t), "kv_b_proj");
  check_output(p.absorbed, rows, p.dims.num_heads, p.dims.latent_dim(), "absorbed");
}

void validate(const ProjectValueParams& p) {
  validate_dims(p.dims);
  check_count(p.num_rows, "num_rows");
  check_dtype(p.latent_out.dtype, {DType::kFloat32}, "latent_out");
  check_dtype(p.values.dtype, {DType::kFloat32}, "values");
  const int64_t rows = p.num_rows.capacity;
  if (rows == 0) return;
  check_input(p.latent_out, rows, p.dims.num_heads, p.dims.kv_lora_rank, "latent_out");
  check_pointer(p.kv_b_proj, sizeof(uint16_t), "kv_b_proj");
  check_output(p.values, rows, p.dims.num_heads, p.dims.v_head_dim, "values");
}

void validate(const PrefillAttentionParams& p) {
  check_heads(p.num_heads);
  check_dim(p.qk_nope_head_dim, "qk_nope_head_dim");
  check_dim(p.qk_rope_head_dim, "qk_rope_head_dim", 0);
  check_dim(p.v_head_dim, "v_head_dim");
  validate_softmax_scale(p.softmax_scale);
  check_dtype(p.k_nope.dtype, {DType::kBFloat16, DType::kFloat16}, "k_nope");
  check_dtype(p.q.dtype, {p.k_nope.dtype, DType::kFloat32}, "q");
  if (p.qk_rope_head_dim > 0) check_dtype(p.k_pe.dtype, {p.k_nope.dtype}, "k_pe");
  check_dtype(p.v.dtype, {p.k_nope.dtype}, "v");
  check_dtype(p.out.dtype, {DType::kFloat32, p.k_nope.dtype}, "out");
  check_count(p.num_items, "num_items");
  for (const auto& [value, name] : {std::pair<int64_t, const char*>{p.q_rows, "q_rows"},
                                    {p.k_rows, "k_rows"},
                                    {p.max_q_len, "max_q_len"},
                                    {p.max_k_len, "max_k_len"}}) {
    if (value < 0) invalid(fmt::format("{} is {}, at least 0", name, value));
  }
  const bool has_prefix = p.prefix_out.data != nullptr;
  if (has_prefix != (p.prefix_lse.data != nullptr)) {
    invalid(fmt::format("prefix_out is {} and prefix_lse is {}: give both or neither",
                        p.prefix_out.data, fmt::ptr(p.prefix_lse.data)));
  }
  if (has_prefix) check_dtype(p.prefix_out.dtype, {DType::kFloat32}, "prefix_out");
  if (p.num_items.capacity == 0 || p.q_rows == 0 || p.max_q_len == 0) return;

  check_pointer(p.items, alignof(AttentionItem), "items");
  check_vector_access(p.q.data, p.q.row_stride, p.q.head_stride, "q");
  check_input(p.q, p.q_rows, p.num_heads, p.qk_nope_head_dim + p.qk_rope_head_dim, "q");
  if (p.k_rows > 0) {
    check_vector_access(p.k_nope.data, p.k_nope.row_stride, p.k_nope.head_stride, "k_nope");
    check_input(p.k_nope, p.k_rows, p.num_heads, p.qk_nope_head_dim, "k_nope");
    check_vector_access(p.v.data, p.v.row_stride, p.v.head_stride, "v");
    check_input(p.v, p.k_rows, p.num_heads, p.v_head_dim, "v");
    if (p.qk_rope_head_dim > 0) {
      check_vector_access(p.k_pe.data, p.k_pe.row_stride, 0, "k_pe");
      check_rows(p.k_pe, p.k_rows, p.qk_rope_head_dim, "k_pe");
    }
  }
  // Output rows are those of the items: at most as many as there are queries, but any of them.
  check_output(p.out, p.q_rows, p.num_heads, p.v_head_dim, "out");
  if (p.lse.data != nullptr) check_lse_output(p.lse, p.q_rows, p.num_heads, "lse");
  if (has_prefix) {
    check_input(p.prefix_out, p.q_rows, p.num_heads, p.v_head_dim, "prefix_out");
    check_lse_input(p.prefix_lse, p.q_rows, p.num_heads, "prefix_lse");
    check_in_place(p.out, p.prefix_out, "out", "prefix_out");
    check_in_place(p.lse, p.prefix_lse, "lse", "prefix_lse");
  }
}

void validate(const MaskEmptyContextParams& p) {
  check_heads(p.num_heads);
  check_dim(p.head_dim, "head_dim");
  check_count(p.num_requests, "num_requests");
  check_dtype(p.output.dtype, {DType::kFloat32, DType::kFloat16, DType::kBFloat16}, "output");
  if (p.first_token < 0) invalid(fmt::format("first_token is {}, at least 0", p.first_token));
  if (p.max_query_len < 0) invalid(fmt::format("max_query_len is {}, at least 0", p.max_query_len));
  if (p.num_requests.capacity == 0 || p.max_query_len == 0) return;
  check_pointer(p.query_start_loc, alignof(int32_t), "query_start_loc");
  check_pointer(p.context_start_loc, alignof(int32_t), "context_start_loc");
  check_output(p.output, p.max_query_len, p.num_heads, p.head_dim, "output");
  check_lse_output(p.lse, p.max_query_len, p.num_heads, "lse");
}

void validate(const MergeAttnStatesParams& p) {
  check_heads(p.num_heads);
  check_dim(p.head_dim, "head_dim");
  check_count(p.num_tokens, "num_tokens");
  const std::initializer_list<DType> inputs = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  const bool has_prefix = p.prefix_tokens != 0;
  if (has_prefix) check_dtype(p.prefix_out.dtype, inputs, "prefix_out");
  check_dtype(p.suffix_out.dtype, inputs, "suffix_out");
  check_dtype(p.output.dtype,
              {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3}, "output");
  const int64_t tokens = p.num_tokens.capacity;
  if (tokens == 0) return;
  const int32_t heads = p.num_heads;
  if (has_prefix) {
    check_input(p.prefix_out, tokens, heads, p.head_dim, "prefix_out");
    check_lse_input(p.prefix_lse, tokens, heads, "prefix_lse");
    check_in_place(p.output, p.prefix_out, "output", "prefix_out");
    check_in_place(p.output_lse, p.prefix_lse, "output_lse", "prefix_lse");
  }
  check_input(p.suffix_out, tokens, heads, p.head_dim, "suffix_out");
  check_lse_input(p.suffix_lse, tokens, heads, "suffix_lse");
  check_in_place(p.output, p.suffix_out, "output", "suffix_out");
  check_in_place(p.output_lse, p.suffix_lse, "output_lse", "suffix_lse");
  check_output(p.output, tokens, heads, p.head_dim, "output");
  if (p.output_lse.data != nullptr) check_lse_output(p.output_lse, tokens, heads, "output_lse");
  if (p.output.dtype == DType::kFloat8E4M3) {
    check_pointer(p.output_scale, alignof(float), "output_scale");
  } else if (p.output_scale != nullptr) {
    invalid(fmt::format("output_scale is given for {} output, it belongs to fp8_e4m3 alone",
                        dtype_name(p.output.dtype)));
  }
}

void validate(const ClearPartialParams& p) {
  check_heads(p.num_heads);
  check_count(p.num_tokens, "num_tokens");
  check_lse_output(p.lse, p.num_tokens.capacity, p.num_heads, "lse");
}

}  // namespace mla
