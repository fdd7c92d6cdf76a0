// The tensors that single ops are timed on.
#ifndef TOOLS_CLI_OP_TENSORS_H_
#define TOOLS_CLI_OP_TENSORS_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/config.h"
#include "kernels/backend.h"
#include "kernels/executor.h"
#include "tools/cli/device.h"
#include "tools/cli/options.h"
#include "tools/cli/workload.h"

namespace mla::cli {

/// Calls take sets in turn, so that one call does not find the last one's data in a cache.
inline constexpr int kOpTensorSets = 3;

// Places in a set's `ints`.
inline constexpr int64_t kStarts = 0;          // {0}
inline constexpr int64_t kKeyLocations = 1;    // {0, k}
inline constexpr int64_t kQueryLocations = 3;  // {0, t}
inline constexpr int64_t kNoKeys = 5;          // {0, 0}
inline constexpr int64_t kTable = 8;           // page ids, last to first

// Items of a set.
inline constexpr int64_t kUnmaskedItem = 0;
inline constexpr int64_t kCausalItem = 1;

/// One set of tensors. Rows of the "cache" are the latent rows, page by page in reverse order.
struct OpTensorSet {
  DeviceBuffer cache, latent, expanded, q, absorbed_q, weights, ints, items;
  DeviceBuffer out, lse, suffix_out, suffix_lse, merged;
};

/// Sets of tensors for `t` new tokens over `k` rows of keys, and views of them.
struct OpTensors {
  /// Throws kInvalidArgument where memory does not suffice, as check_memory does.
  OpTensors(const Options& options, Device& device, int32_t query_tokens, int32_t key_rows)
      : backend(*device.backend),
        executor(*device.executor),
        config(options.config),
        dims(options.config.dims),
        t(query_tokens),
        k(key_rows),
        cache_scale(options.kv_cache_scale),
        values(options.seed, options.config.dims) {
    const ScratchLimits limits{.dims = dims,
                               .max_query_tokens = query_tokens,
                               .max_rows = std::max(key_rows, query_tokens),
                               .max_requests = 1};
    check_memory(backend, double(backend.scratch_bytes(limits)) + all_sets_bytes());
    scratch = DeviceBuffer(backend, backend.scratch_bytes(limits));
    for (auto& set : sets) set = make_set();
  }

  int64_t num_pages() const { return (k + config.page_size - 1) / config.page_size; }
  int64_t page_stride() const {
    const int64_t bytes =
        int64_t{config.page_size} * kv_cache_row_bytes(config.kv_cache_format, dims);
    return (bytes + 15) / 16 * 16;
  }
  OpContext context() { return {{}, scratch.span()}; }

  LatentCache cache(const OpTensorSet& set) const {
    return {.data = set.cache.data(),
            .format = config.kv_cache_format,
            .scale = cache_scale,
            .num_pages = static_cast<int32_t>(num_pages()),
            .page_size = config.page_size,
            .page_stride = page_stride()};
  }
  Rows latent(const OpTensorSet& set) const {
    return {set.latent.data(), DType::kBFloat16, dims.latent_dim()};
  }
  ConstHeadRows expanded(const OpTensorSet& set, int64_t column) const {
    return {static_cast<const uint16_t*>(set.expanded.data()) + column, DType::kBFloat16,
            int64_t{dims.num_heads} * dims.kv_head_dim(), dims.kv_head_dim()};
  }
  HeadRows heads(const DeviceBuffer& buffer, DType dtype, int64_t dim) const {
    return {buffer.data(), dtype, dims.num_heads * dim, dim};
  }
  Lse lse(const DeviceBuffer& buffer) const { return {static_cast<float*>(buffer.data()), t, 1}; }
  const int32_t* ints(const OpTensorSet& set, int64_t offset) const {
    return static_cast<const int32_t*>(set.ints.data()) + offset;
  }
  /// A launch of one item, number `index` of the set's.
  PrefillAttentionParams attention_params(const OpTensorSet& set, int64_t index,
                                          int32_t k_len) const {
    PrefillAttentionParams params;
    params.num_heads = dims.num_heads;
    params.qk_nope_head_dim = dims.qk_nope_head_dim;
    params.qk_rope_head_dim = dims.qk_rope_head_dim;
    params.v_head_dim = dims.v_head_dim;
    params.softmax_scale = config.softmax_scale;
    params.q = as_const(heads(set.q, DType::kBFloat16, dims.qk_head_dim()));
    params.k_nope = expanded(set, 0);
    params.k_pe = as_const(latent(set));
    params.k_pe.data = static_cast<const uint16_t*>(set.latent.data()) + dims.kv_lora_rank;
    params.v = expanded(set, dims.qk_nope_head_dim);
    params.q_rows = t;
    params.k_rows = k;
    params.items = static_cast<const AttentionItem*>(set.items.data()) + index;
    params.num_items = {1};
    params.max_q_len = t;
    params.max_k_len = k_len;
    params.out = heads(set.out, DType::kFloat32, dims.v_head_dim);
    params.lse = lse(set.lse);
    return params;
  }

  template <typename T>
  std::vector<T> fetch(const void* device, int64_t count) {
    std::vector<T> host(static_cast<size_t>(count));
    backend.copy_to_host(host.data(), device, host.size() * sizeof(T), {});
    backend.synchronize({});
    return host;
  }
  template <typename T>
  DeviceBuffer upload(const std::vector<T>& host) {
    DeviceBuffer buffer(backend, host.size() * sizeof(T));
    backend.copy_to_device(buffer.data(), host.data(), buffer.bytes(), {});
    backend.synchronize({});
    return buffer;
  }
  std::vector<float> fetch_floats(const void* bf16, int64_t count) {
    const std::vector<uint16_t> bits = fetch<uint16_t>(bf16, count);
    std::vector<float> floats(bits.size());
    std::transform(bits.begin(), bits.end(), floats.begin(), bf16_value);
    return floats;
  }

  double all_sets_bytes() const;
  std::unique_ptr<OpTensorSet> make_set();
  /// First and last row of the first and the last head of set 0's `out` and `lse`, against the
  /// expansion as it is.
  bool check_attention(int32_t k_len, bool causal);

  Backend& backend;
  Executor& executor;
  EngineConfig config;
  ModelDims dims;
  int32_t t;
  int32_t k;
  float cache_scale;
  SyntheticValues values;
  DeviceBuffer scratch;
  std::array<std::unique_ptr<OpTensorSet>, kOpTensorSets> sets;
};

}  // namespace mla::cli

#endif  // TOOLS_CLI_OP_TENSORS_H_
