#include "tools/cli/op_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>

#include "tests/oracle/oracle.h"
#include "tools/cli/measure.h"

namespace mla::cli {
namespace {

constexpr int kSets = 3;

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

/// FLOPs of the products of one layer's context by each path, and of its new tokens.
double floor_flops(const ModelDims& dims, double q, double context) {
  const double projection = double(dims.kv_lora_rank) * dims.kv_head_dim();
  const double score = dims.qk_head_dim() + dims.v_head_dim;
  const double expand = context * projection + q * context * score;
  const double absorb = q * projection + q * context * (dims.latent_dim() + dims.kv_lora_rank);
  const double new_tokens = q * projection + q * (q + 1) / 2 * score;
  return 2.0 * dims.num_heads * (std::min(expand, absorb) + new_tokens);
}

bool close(double found, double expected, double tolerance) {
  return std::fabs(found - expected) <= tolerance;
}

}  // namespace

LayerCost layer_cost(const EngineConfig& config, const Step& step) {
  const ModelDims& dims = config.dims;
  const double heads = dims.num_heads;
  LayerCost cost;
  cost.bytes = heads * dims.kv_head_dim() * dims.kv_lora_rank * 2;
  for (const ScheduledRequest& request : step) {
    const double q = request.query_len;
    const double context = request.context_len;
    cost.flops +=
        2 * heads * (dims.qk_head_dim() + dims.v_head_dim) * (q * context + q * (q + 1) / 2);
    cost.all_flops += floor_flops(dims, q, context);
    // Cache rows read and written, new rows, q, out and LSE.
    cost.bytes +=
        (context + q) * kv_cache_row_bytes(config.kv_cache_format, dims) +
        q * (dims.latent_dim() * 2 + heads * (dims.qk_head_dim() * 2 + dims.v_head_dim * 2 + 4));
  }
  return cost;
}

void set_rates(const LayerCost& cost, const Backend& backend, BenchResult& result) {
  const double seconds = result.ms / 1e3;
  result.tflops = cost.flops / seconds / 1e12;
  result.gbps = cost.bytes / seconds / 1e9;
  if (backend.name() == "cuda" && backend.device_description().find("H200") != std::string::npos) {
    result.floor_fraction = std::max(cost.all_flops / 790e12, cost.bytes / 4.25e12) / seconds;
  }
}

/// One set of tensors. Rows of the "cache" are the latent rows, page by page in reverse order.
struct OpBench::Set {
  DeviceBuffer cache, latent, expanded, q, absorbed_q, weights, ints, items;
  DeviceBuffer out, lse, suffix_out, suffix_lse, merged;
};

struct OpBench::State {
  State(const Options& options, Device& device, int32_t query_tokens, int32_t key_rows)
      : backend(*device.backend),
        executor(*device.executor),
        config(options.config),
        dims(options.config.dims),
        t(query_tokens),
        k(key_rows),
        cache_scale(options.kv_cache_scale),
        values(options.seed, options.config.dims),
        scratch(backend, backend.scratch_bytes({.dims = dims,
                                                .max_query_tokens = query_tokens,
                                                .max_rows = std::max(key_rows, query_tokens),
                                                .max_requests = 1})) {}

  int64_t num_pages() const { return (k + config.page_size - 1) / config.page_size; }
  int64_t page_stride() const {
    return round_up(int64_t{config.page_size} * kv_cache_row_bytes(config.kv_cache_format, dims),
                    16);
  }
  OpContext context() { return {{}, scratch.span()}; }

  LatentCache cache(const Set& set) const {
    return {.data = set.cache.data(),
            .format = config.kv_cache_format,
            .scale = cache_scale,
            .num_pages = static_cast<int32_t>(num_pages()),
            .page_size = config.page_size,
            .page_stride = page_stride()};
  }
  Rows latent(const Set& set) const {
    return {set.latent.data(), DType::kBFloat16, dims.latent_dim()};
  }
  ConstHeadRows expanded(const Set& set, int64_t column) const {
    return {static_cast<const uint16_t*>(set.expanded.data()) + column, DType::kBFloat16,
            int64_t{dims.num_heads} * dims.kv_head_dim(), dims.kv_head_dim()};
  }
  HeadRows heads(const DeviceBuffer& buffer, DType dtype, int64_t dim) const {
    return {buffer.data(), dtype, dims.num_heads * dim, dim};
  }
  Lse lse(const DeviceBuffer& buffer) const { return {static_cast<float*>(buffer.data()), t, 1}; }
  const int32_t* ints(const Set& set, int64_t offset) const {
    return static_cast<const int32_t*>(set.ints.data()) + offset;
  }
  /// A launch of one item, number `index` of the set's.
  PrefillAttentionParams attention_params(const Set& set, int64_t index, int32_t k_len) const {
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

  std::unique_ptr<Set> make_set();
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
  std::array<std::unique_ptr<Set>, kSets> sets;
};

// Places in a set's `ints`.
constexpr int64_t kStarts = 0;          // {0}
constexpr int64_t kKeyLocations = 1;    // {0, k}
constexpr int64_t kQueryLocations = 3;  // {0, t}
constexpr int64_t kNoKeys = 5;          // {0, 0}
constexpr int64_t kTable = 8;           // page ids, last to first

// Items of a set.
constexpr int64_t kUnmaskedItem = 0;
constexpr int64_t kCausalItem = 1;

std::unique_ptr<OpBench::Set> OpBench::State::make_set() {
  auto set = std::make_unique<Set>();
  const int64_t heads = dims.num_heads;
  const auto rows = [&](int64_t count, int64_t columns, const auto& fill_row) {
    std::vector<uint16_t> host(count * columns);
    executor.parallel_for(
        count, [&](int64_t i, int) { fill_row(i, std::span(host).subspan(i * columns, columns)); });
    return upload(host);
  };
  set->latent = rows(k, dims.latent_dim(),
                     [&](int64_t i, std::span<uint16_t> row) { values.latent_row(0, 0, i, row); });
  set->q = rows(t, heads * dims.qk_head_dim(),
                [&](int64_t i, std::span<uint16_t> row) { values.query_row(0, 0, i, row); });
  set->weights = rows(heads * dims.kv_head_dim(), dims.kv_lora_rank,
                      [&](int64_t i, std::span<uint16_t> row) { values.weight_row(0, i, row); });

  std::vector<int32_t> ints{0, 0, k, 0, t, 0, 0, 0};
  for (int64_t page = num_pages() - 1; page >= 0; --page) {
    ints.push_back(static_cast<int32_t>(page));
  }
  set->ints = upload(ints);
  set->items = upload(std::vector<AttentionItem>{{.q_begin = 0,
                                                  .q_len = t,
                                                  .k_begin = 0,
                                                  .k_len = k,
                                                  .causal_offset = kUnmasked,
                                                  .out_row = 0},
                                                 {.q_begin = 0,
                                                  .q_len = t,
                                                  .k_begin = 0,
                                                  .k_len = std::min(t, k),
                                                  .causal_offset = 0,
                                                  .out_row = 0}});

  set->cache = DeviceBuffer(backend, num_pages() * page_stride());
  set->expanded = DeviceBuffer(backend, int64_t{k} * heads * dims.kv_head_dim() * 2);
  set->absorbed_q = DeviceBuffer(backend, int64_t{t} * heads * dims.latent_dim() * 2);
  const int64_t widest = std::max(dims.v_head_dim, dims.kv_lora_rank);
  for (DeviceBuffer* out : {&set->out, &set->suffix_out}) {
    *out = DeviceBuffer(backend, t * heads * widest * 4);
  }
  set->merged = DeviceBuffer(backend, t * heads * dims.v_head_dim * 2);
  for (DeviceBuffer* buffer : {&set->lse, &set->suffix_lse}) {
    *buffer = DeviceBuffer(backend, t * heads * 4);
  }
  for (DeviceBuffer* buffer : {&set->expanded, &set->absorbed_q, &set->out, &set->suffix_out,
                               &set->merged, &set->lse, &set->suffix_lse}) {
    backend.fill_bytes(buffer->data(), 0xff, buffer->bytes(), {});
  }

  std::vector<int64_t> slots(k);
  for (int64_t i = 0; i < k; ++i) {
    slots[i] = (num_pages() - 1 - i / config.page_size) * config.page_size + i % config.page_size;
  }
  const DeviceBuffer device_slots = upload(slots);
  const Rows source = latent(*set);
  backend.write_latent_cache(
      {.kv_lora_rank = dims.kv_lora_rank,
       .qk_rope_head_dim = dims.qk_rope_head_dim,
       .kv_c = as_const(source),
       .k_pe = {static_cast<const uint16_t*>(source.data) + dims.kv_lora_rank, DType::kBFloat16,
                source.row_stride},
       .slot_mapping = static_cast<const int64_t*>(device_slots.data()),
       .num_tokens = {k},
       .kv_cache = cache(*set)},
      context());
  backend.expand({.dims = dims,
                  .latent = as_const(source),
                  .kv_b_proj = set->weights.data(),
                  .expanded = {set->expanded.data(), DType::kBFloat16, heads * dims.kv_head_dim()},
                  .num_rows = {k}},
                 context());
  backend.absorb_query(
      {.dims = dims,
       .q = as_const(this->heads(set->q, DType::kBFloat16, dims.qk_head_dim())),
       .kv_b_proj = set->weights.data(),
       .absorbed = this->heads(set->absorbed_q, DType::kBFloat16, dims.latent_dim()),
       .num_rows = {t}},
      context());
  backend.synchronize({});
  return set;
}

OpBench::OpBench(const Options& options, Device& device, int32_t query_tokens, int32_t key_rows)
    : state_(std::make_unique<State>(options, device, query_tokens, key_rows)) {
  for (auto& set : state_->sets) set = state_->make_set();
}

OpBench::~OpBench() = default;

OpCase OpBench::gather() {
  State& s = *state_;
  OpCase op;
  op.name = "gather_latent";
  op.shape = fmt::format("{} rows {}", s.k, kv_cache_format_name(s.config.kv_cache_format));
  op.cost.bytes = double(s.k) *
                  (kv_cache_row_bytes(s.config.kv_cache_format, s.dims) + 2 * s.dims.latent_dim());
  op.enqueue = [&s](int64_t call) {
    const Set& set = *s.sets[call % kSets];
    s.backend.gather_latent({.kv_lora_rank = s.dims.kv_lora_rank,
                             .qk_rope_head_dim = s.dims.qk_rope_head_dim,
                             .kv_cache = as_const(s.cache(set)),
                             .block_table = s.ints(set, kTable),
                             .block_table_stride = s.num_pages(),
                             .starts = s.ints(set, kStarts),
                             .cu_seq_lens = s.ints(set, kKeyLocations),
                             .num_spans = {1},
                             .num_rows = {s.k},
                             .latent = s.latent(set)},
                            s.context());
  };
  op.check = [&s] {
    const int64_t columns = s.dims.latent_dim();
    const std::vector<uint16_t> found = s.fetch<uint16_t>(s.sets[0]->latent.data(), s.k * columns);
    for (const int64_t row : {int64_t{0}, int64_t{s.k} / 2, int64_t{s.k} - 1}) {
      std::vector<uint16_t> bits(columns);
      s.values.latent_row(0, 0, row, bits);
      std::vector<float> expected(columns);
      std::transform(bits.begin(), bits.end(), expected.begin(), bf16_value);
      if (s.config.kv_cache_format == KvCacheFormat::kFp8E4M3) {
        expected = oracle::through_fp8_e4m3(expected, s.cache_scale);
      } else if (s.config.kv_cache_format == KvCacheFormat::kFp8DsMla) {
        expected = oracle::through_fp8_ds_mla(expected);
      }
      for (int64_t c = 0; c < columns; ++c) {
        if (bf16_value(found[row * columns + c]) != expected[c]) return false;
      }
    }
    return true;
  };
  return op;
}

OpCase OpBench::expand() {
  State& s = *state_;
  const double heads = s.dims.num_heads;
  OpCase op;
  op.name = "expand";
  op.shape = fmt::format("H{} {} rows", s.dims.num_heads, s.k);
  op.cost.flops = 2 * heads * s.dims.kv_head_dim() * s.dims.kv_lora_rank * s.k;
  op.cost.bytes = 2 * (double(s.k) * s.dims.kv_lora_rank + heads * s.dims.kv_head_dim() * s.k +
                       heads * s.dims.kv_head_dim() * s.dims.kv_lora_rank);
  op.enqueue = [&s](int64_t call) {
    const Set& set = *s.sets[call % kSets];
    s.backend.expand({.dims = s.dims,
                      .latent = as_const(s.latent(set)),
                      .kv_b_proj = set.weights.data(),
                      .expanded = {set.expanded.data(), DType::kBFloat16,
                                   int64_t{s.dims.num_heads} * s.dims.kv_head_dim()},
                      .num_rows = {s.k}},
                     s.context());
  };
  op.check = [&s] {
    const int64_t l = s.dims.kv_lora_rank;
    const int64_t columns = s.dims.kv_head_dim();
    const int64_t all_columns = s.dims.num_heads * columns;
    const std::vector<float> weight = s.fetch_floats(s.sets[0]->weights.data(), columns * l);
    for (const int64_t row : {int64_t{0}, int64_t{s.k} - 1}) {
      const std::vector<float> latent = s.fetch_floats(
          static_cast<const uint16_t*>(s.sets[0]->latent.data()) + row * s.dims.latent_dim(), l);
      const std::vector<float> found = s.fetch_floats(
          static_cast<const uint16_t*>(s.sets[0]->expanded.data()) + row * all_columns, columns);
      const oracle::HeadKeys keys = oracle::expand_head(latent, weight, s.dims.qk_nope_head_dim,
                                                        s.dims.v_head_dim, l, /*round=*/false);
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t p = s.dims.qk_nope_head_dim;
        const double expected = c < p ? keys.k_nope[c] : keys.v[c - p];
        if (!close(found[c], expected, std::fabs(expected) / 256 + 1e-4)) return false;
      }
    }
    return true;
  };
  return op;
}

/// First and last row of the first and the last head, against the expansion as it is.
bool OpBench::State::check_attention(int32_t k_len, bool causal) {
  const int64_t p = dims.qk_nope_head_dim, rr = dims.qk_rope_head_dim, v = dims.v_head_dim;
  const int64_t heads = dims.num_heads, columns = dims.kv_head_dim(), qk = dims.qk_head_dim();
  const Set& set = *sets[0];
  const std::vector<float> rows =
      fetch_floats(set.latent.data(), int64_t{k_len} * dims.latent_dim());
  std::vector<float> k_pe(k_len * rr);
  for (int64_t i = 0; i < k_len; ++i) {
    std::copy_n(rows.begin() + i * dims.latent_dim() + dims.kv_lora_rank, rr,
                k_pe.begin() + i * rr);
  }
  const std::vector<uint16_t> keys_bits =
      fetch<uint16_t>(set.expanded.data(), k_len * heads * columns);
  const std::vector<float> out = fetch<float>(set.out.data(), t * heads * v);
  const std::vector<float> lse = fetch<float>(set.lse.data(), t * heads);
  for (const int64_t head : {int64_t{0}, heads - 1}) {
    oracle::HeadKeys keys{std::vector<float>(k_len * p), std::vector<float>(k_len * v)};
    for (int64_t i = 0; i < k_len; ++i) {
      const uint16_t* const row = &keys_bits[(i * heads + head) * columns];
      std::transform(row, row + p, keys.k_nope.begin() + i * p, bf16_value);
      std::transform(row + p, row + columns, keys.v.begin() + i * v, bf16_value);
    }
    for (const int64_t row : {int64_t{0}, int64_t{t} - 1}) {
      const std::vector<float> q =
          fetch_floats(static_cast<const uint16_t*>(set.q.data()) + (row * heads + head) * qk, qk);
      const std::array<int64_t, 1> visible{causal ? std::min<int64_t>(row + 1, k_len) : k_len};
      const oracle::HeadResult expected =
          oracle::attend_head(q, keys, k_pe, visible, p, rr, v, config.softmax_scale);
      double error = 0.0;
      double reference = 0.0;
      for (int64_t d = 0; d < v; ++d) {
        const double difference = out[(row * heads + head) * v + d] - expected.out[d];
        error += difference * difference;
        reference += expected.out[d] * expected.out[d];
      }
      if (!(error <= 25e-6 * reference)) return false;
      if (!close(lse[head * t + row], expected.lse[0],
                 1e-3 * std::max(1.0, std::fabs(expected.lse[0])))) {
        return false;
      }
    }
  }
  return true;
}

OpCase OpBench::attention() {
  State& s = *state_;
  const double heads = s.dims.num_heads;
  OpCase op;
  op.name = "prefill_attention";
  op.shape = fmt::format("H{} q{} k{}", s.dims.num_heads, s.t, s.k);
  op.cost.flops = 2 * heads * (s.dims.qk_head_dim() + s.dims.v_head_dim) * s.t * s.k;
  op.cost.bytes = heads * (2.0 * s.t * s.dims.qk_head_dim() + 4.0 * s.t * s.dims.v_head_dim +
                           2.0 * s.k * s.dims.kv_head_dim()) +
                  2.0 * s.k * s.dims.qk_rope_head_dim;
  op.enqueue = [&s](int64_t call) {
    s.backend.prefill_attention(s.attention_params(*s.sets[call % kSets], kUnmaskedItem, s.k),
                                s.context());
  };
  op.check = [&s] { return s.check_attention(s.k, /*causal=*/false); };
  return op;
}

OpCase OpBench::causal_attention() {
  State& s = *state_;
  const double heads = s.dims.num_heads;
  const int32_t n = std::min(s.t, s.k);
  OpCase op;
  op.name = "prefill_attention";
  op.shape = fmt::format("H{} q{} causal", s.dims.num_heads, n);
  op.cost.flops = heads * (s.dims.qk_head_dim() + s.dims.v_head_dim) * n * (n + 1.0);
  op.cost.bytes =
      n * heads *
      (2.0 * s.dims.qk_head_dim() + 4.0 * s.dims.v_head_dim + 2.0 * s.dims.kv_head_dim());
  op.enqueue = [&s, n](int64_t call) {
    s.backend.prefill_attention(s.attention_params(*s.sets[call % kSets], kCausalItem, n),
                                s.context());
  };
  op.check = [&s, n] { return s.check_attention(n, /*causal=*/true); };
  return op;
}

OpCase OpBench::absorbed_attention() {
  State& s = *state_;
  const double heads = s.dims.num_heads;
  OpCase op;
  op.name = "absorbed_attention";
  op.shape = fmt::format("H{} q{} k{}", s.dims.num_heads, s.t, s.k);
  op.cost.flops = 2 * heads * (s.dims.latent_dim() + s.dims.kv_lora_rank) * s.t * s.k;
  op.cost.bytes = heads * s.t * (2.0 * s.dims.latent_dim() + 4.0 * s.dims.kv_lora_rank) +
                  2.0 * s.k * s.dims.latent_dim();
  op.enqueue = [&s](int64_t call) {
    const Set& set = *s.sets[call % kSets];
    PrefillAttentionParams params = s.attention_params(set, kUnmaskedItem, s.k);
    const ConstHeadRows shared{set.latent.data(), DType::kBFloat16, s.dims.latent_dim(), 0};
    params.qk_nope_head_dim = s.dims.kv_lora_rank;
    params.v_head_dim = s.dims.kv_lora_rank;
    params.q = as_const(s.heads(set.absorbed_q, DType::kBFloat16, s.dims.latent_dim()));
    params.k_nope = shared;
    params.v = shared;
    params.out = s.heads(set.suffix_out, DType::kFloat32, s.dims.kv_lora_rank);
    params.lse = s.lse(set.suffix_lse);
    s.backend.prefill_attention(params, s.context());
  };
  // The LSE is that of attention over the expanded keys: within bf16's rounding of the absorbed
  // query, which is one part in 2^9 of scores that are a few units.
  op.check = [&s] {
    s.backend.prefill_attention(s.attention_params(*s.sets[0], kUnmaskedItem, s.k), s.context());
    const int64_t count = int64_t{s.t} * s.dims.num_heads;
    const std::vector<float> expected = s.fetch<float>(s.sets[0]->lse.data(), count);
    const std::vector<float> found = s.fetch<float>(s.sets[0]->suffix_lse.data(), count);
    for (int64_t i = 0; i < count; ++i) {
      if (!close(found[i], expected[i], 1e-2)) return false;
    }
    return true;
  };
  return op;
}

OpCase OpBench::mask() {
  State& s = *state_;
  const double elements = double(s.t) * s.dims.num_heads * s.dims.v_head_dim;
  OpCase op;
  op.name = "mask_empty_context";
  op.shape = fmt::format("H{} {} rows", s.dims.num_heads, s.t);
  op.cost.bytes = elements * 4 + 4.0 * s.t * s.dims.num_heads;
  op.enqueue = [&s](int64_t call) {
    const Set& set = *s.sets[call % kSets];
    s.backend.mask_empty_context(
        {.num_heads = s.dims.num_heads,
         .head_dim = s.dims.v_head_dim,
         .query_start_loc = s.ints(set, kQueryLocations),
         .context_start_loc = s.ints(set, kNoKeys),
         .num_requests = {1},
         .first_token = 0,
         .max_query_len = s.t,
         .output = s.heads(set.suffix_out, DType::kFloat32, s.dims.v_head_dim),
         .lse = s.lse(set.suffix_lse)},
        s.context());
  };
  op.check = [&s] {
    const int64_t rows = int64_t{s.t} * s.dims.num_heads;
    const std::vector<float> out =
        s.fetch<float>(s.sets[0]->suffix_out.data(), rows * s.dims.v_head_dim);
    const std::vector<float> lse = s.fetch<float>(s.sets[0]->suffix_lse.data(), rows);
    constexpr float kEmpty = -std::numeric_limits<float>::infinity();
    return std::all_of(out.begin(), out.end(), [](float x) { return x == 0.0f; }) &&
           std::all_of(lse.begin(), lse.end(), [](float x) { return x == kEmpty; });
  };
  return op;
}

/// A partial result merged with itself: the same output, and ln 2 more in the LSE.
OpCase OpBench::merge() {
  State& s = *state_;
  for (const auto& set : s.sets) {
    s.backend.prefill_attention(s.attention_params(*set, kUnmaskedItem, s.k), s.context());
  }
  const double elements = double(s.t) * s.dims.num_heads * s.dims.v_head_dim;
  OpCase op;
  op.name = "merge_attn_states";
  op.shape = fmt::format("H{} {} rows", s.dims.num_heads, s.t);
  op.cost.bytes = elements * (4 + 4 + 2) + 12.0 * s.t * s.dims.num_heads;
  op.enqueue = [&s](int64_t call) {
    const Set& set = *s.sets[call % kSets];
    const ConstHeadRows partial = as_const(s.heads(set.out, DType::kFloat32, s.dims.v_head_dim));
    const ConstLse partial_lse = as_const(s.lse(set.lse));
    s.backend.merge_attn_states({.num_heads = s.dims.num_heads,
                                 .head_dim = s.dims.v_head_dim,
                                 .num_tokens = {s.t},
                                 .prefix_tokens = -1,
                                 .prefix_out = partial,
                                 .prefix_lse = partial_lse,
                                 .suffix_out = partial,
                                 .suffix_lse = partial_lse,
                                 .output = s.heads(set.merged, DType::kBFloat16, s.dims.v_head_dim),
                                 .output_lse = s.lse(set.suffix_lse)},
                                s.context());
  };
  op.check = [&s] {
    const int64_t rows = int64_t{s.t} * s.dims.num_heads;
    const std::vector<float> lse = s.fetch<float>(s.sets[0]->lse.data(), rows);
    const std::vector<float> merged_lse = s.fetch<float>(s.sets[0]->suffix_lse.data(), rows);
    for (int64_t i = 0; i < rows; ++i) {
      if (!close(merged_lse[i], lse[i] + std::log(2.0), 1e-5)) return false;
    }
    const int64_t count = rows * s.dims.v_head_dim;
    const std::vector<float> out = s.fetch<float>(s.sets[0]->out.data(), count);
    const std::vector<float> merged = s.fetch_floats(s.sets[0]->merged.data(), count);
    for (int64_t i = 0; i < count; ++i) {
      if (!close(merged[i], out[i], std::fabs(out[i]) / 256 + 1e-7)) return false;
    }
    return true;
  };
  return op;
}

void run_op_bench(const Options& options, Device& device, Progress& progress, BenchReport& report) {
  Backend& backend = *device.backend;
  const bool cuda = backend.name() == "cuda";
  const auto run = [&](OpCase op) {
    progress.show(fmt::format("{} {}", op.name, op.shape));
    op.enqueue(0);
    report.ok = op.check() && report.ok;
    BenchResult result;
    result.name = op.name;
    result.shape = op.shape;
    result.ms = measure_ms(backend, {}, options.bench_seconds, op.enqueue);
    op.cost.all_flops = op.cost.flops;
    set_rates(op.cost, backend, result);
    report.results.push_back(std::move(result));
  };
  {
    OpBench bench(options, device, cuda ? 4096 : 512, cuda ? 65536 : 8192);
    run(bench.gather());
    run(bench.expand());
    run(bench.attention());
    run(bench.causal_attention());
    run(bench.merge());
    run(bench.mask());
  }
  if (backend.supports_path(options.config.dims, Path::kAbsorb)) {
    OpBench bench(options, device, cuda ? 128 : 16, cuda ? 65536 : 8192);
    run(bench.absorbed_attention());
  }
}

}  // namespace mla::cli
