// Merging, masking and clearing partial attention results.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/convert.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/vector_ops.h"
#include "kernels/lse.h"
#include "metadata/error.h"

namespace mla::cpu {
namespace {

constexpr int64_t kTokensPerTask = 32;

template <typename Pointer>
auto head_row(const BasicHeadRows<Pointer>& view, int64_t row, int64_t head) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte,
                                  std::byte>;
  return static_cast<Byte*>(view.data) +
         (row * view.row_stride + head * view.head_stride) * dtype_bytes(view.dtype);
}

template <typename Pointer>
auto& lse_at(const BasicLse<Pointer>& view, int64_t row, int64_t head) {
  return view.data[head * view.head_stride + row * view.row_stride];
}

/// One side's row in float32; zeros where its weight is 0, since it may not even be there.
void load_side(const ConstHeadRows& side, float weight, int64_t row, int64_t head, int64_t dim,
               float* values) {
  if (weight == 0.0f) {
    std::fill_n(values, dim, 0.0f);
  } else {
    to_float(head_row(side, row, head), side.dtype, dim, 1.0f, values);
  }
}

void merge_row(const MergeAttnStatesParams& p, int64_t row, int64_t head) {
  const bool has_prefix = p.prefix_tokens < 0 || row < p.prefix_tokens;
  const float prefix_lse = has_prefix ? lse_at(p.prefix_lse, row, head) : -INFINITY;
  const MergeWeights weights = merge_weights(prefix_lse, lse_at(p.suffix_lse, row, head));

  constexpr int kMaxDim = 1024;
  float prefix[kMaxDim];
  float suffix[kMaxDim];
  const int64_t dim = p.head_dim;
  load_side(p.prefix_out, weights.prefix, row, head, dim, prefix);
  load_side(p.suffix_out, weights.suffix, row, head, dim, suffix);
  for (int64_t d = 0; d < dim; ++d) prefix[d] = merge_values(weights, prefix[d], suffix[d]);

  std::byte* const output = head_row(p.output, row, head);
  if (p.output.dtype == DType::kFloat8E4M3) {
    for (int64_t d = 0; d < dim; ++d) {
      output[d] = static_cast<std::byte>(float_to_e4m3(prefix[d] / *p.output_scale));
    }
  } else {
    from_float(prefix, dim, p.output.dtype, output);
  }
  if (p.output_lse.data != nullptr) lse_at(p.output_lse, row, head) = weights.lse;
}

void check_requests(const MaskEmptyContextParams& p, int64_t requests) {
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t begin = p.query_start_loc[r];
    const int64_t end = p.query_start_loc[r + 1];
    if (begin < p.first_token || end < begin || end - begin > p.max_query_len) {
      throw_error(ErrorCode::kInvalidArgument,
                  "request {} has tokens {} to {}, must lie from first_token {} on and number at "
                  "most {}",
                  r, begin, end, p.first_token, p.max_query_len);
    }
  }
}

}  // namespace

void merge_attn_states(const MergeAttnStatesParams& p, Executor& executor) {
  const int64_t tokens = length(p.num_tokens);
  const int64_t blocks = (tokens + kTokensPerTask - 1) / kTokensPerTask;
  parallel_for(executor, blocks, [&](int64_t block, int) {
    const int64_t end = std::min(tokens, (block + 1) * kTokensPerTask);
    for (int64_t row = block * kTokensPerTask; row < end; ++row) {
      for (int64_t head = 0; head < p.num_heads; ++head) merge_row(p, row, head);
    }
  });
}

void mask_empty_context(const MaskEmptyContextParams& p, Executor& executor) {
  const int64_t requests = length(p.num_requests);
  if (p.max_query_len == 0) return;
  check_requests(p, requests);
  const int64_t row_bytes = int64_t{p.head_dim} * dtype_bytes(p.output.dtype);
  const int64_t blocks = (p.max_query_len + kTokensPerTask - 1) / kTokensPerTask;
  parallel_for(executor, requests * blocks, [&](int64_t task, int) {
    const int64_t r = task / blocks;
    if (p.context_start_loc[r + 1] != p.context_start_loc[r]) return;
    const int64_t begin = p.query_start_loc[r] + task % blocks * kTokensPerTask;
    const int64_t end = std::min<int64_t>(p.query_start_loc[r + 1], begin + kTokensPerTask);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t row = token - p.first_token;
      for (int64_t head = 0; head < p.num_heads; ++head) {
        std::memset(head_row(p.output, row, head), 0, row_bytes);
        lse_at(p.lse, row, head) = -INFINITY;
      }
    }
  });
}

void clear_partial(const ClearPartialParams& p, Executor& executor) {
  const int64_t tokens = length(p.num_tokens);
  if (tokens == 0) return;
  parallel_for(executor, p.num_heads, [&](int64_t head, int) {
    for (int64_t row = 0; row < tokens; ++row) lse_at(p.lse, row, head) = -INFINITY;
  });
}

}  // namespace mla::cpu
