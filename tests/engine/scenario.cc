#include "tests/engine/scenario.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "engine/paged_cache.h"
#include "tests/oracle/oracle.h"
#include "tests/support/compare.h"
#include "tests/support/device_tensor.h"

namespace mla::test {
namespace {

constexpr DType kBf16 = DType::kBFloat16;

std::vector<float> random_bf16(size_t count, double deviation, std::mt19937_64& random) {
  std::normal_distribution<float> normal(0.0f, static_cast<float>(deviation));
  std::vector<float> values(count);
  for (float& value : values) value = oracle::round_to_bf16(normal(random));
  return values;
}

std::vector<float> through_cache(std::span<const float> row, KvCacheFormat format, float scale) {
  switch (format) {
    case KvCacheFormat::kBf16:
      break;
    case KvCacheFormat::kFp8E4M3:
      return oracle::through_fp8_e4m3(row, scale);
    case KvCacheFormat::kFp8DsMla:
      return oracle::through_fp8_ds_mla(row);
  }
  return {row.begin(), row.end()};
}

std::span<const float> rows_of(const std::vector<float>& values, int64_t begin, int64_t end,
                               int64_t columns) {
  return std::span(values).subspan(begin * columns, (end - begin) * columns);
}

void append(std::vector<float>& to, std::span<const float> values) {
  to.insert(to.end(), values.begin(), values.end());
}

std::vector<float> columns_of(std::span<const float> rows, int64_t columns, int64_t begin,
                              int64_t end) {
  std::vector<float> values;
  values.reserve(rows.size() / columns * (end - begin));
  for (size_t row = 0; row < rows.size(); row += columns) {
    append(values, rows.subspan(row + begin, end - begin));
  }
  return values;
}

/// A step's inputs of one layer on the device, and its outputs.
class DeviceLayer {
 public:
  DeviceLayer(Backend& backend, const Scenario& scenario, const std::vector<ScheduledRequest>& step,
              int32_t layer, int64_t capacity, const RunOptions& options)
      : dims_(scenario.dims), rows_(capacity) {
    const int64_t latent = dims_.latent_dim();
    std::vector<float> q, rows;
    for (const ScheduledRequest& r : step) {
      const Scenario::Request& request = scenario.requests[r.id];
      const int32_t first = r.context_len - request.prefix_len;
      append(q, rows_of(request.q[layer], first, first + r.query_len,
                        int64_t{dims_.num_heads} * dims_.qk_head_dim()));
      append(rows,
             rows_of(request.rows[layer], r.context_len, r.context_len + r.query_len, latent));
    }
    // Rows past T are there in a shape class only, and never read into a result.
    q.resize(capacity * dims_.num_heads * dims_.qk_head_dim(), NAN);
    rows.resize(capacity * latent, NAN);

    const int64_t gap = options.strided ? 8 : 0;
    const auto heads_shape = [&](int64_t dim) {
      const int64_t head_stride = dim + gap;
      return DeviceTensor::Shape{.rows = capacity,
                                 .heads = dims_.num_heads,
                                 .dim = dim,
                                 .row_stride = dims_.num_heads * head_stride + 3 * gap,
                                 .head_stride = head_stride};
    };
    q_.emplace(backend, kBf16, heads_shape(dims_.qk_head_dim()), q);
    if (options.strided) {
      latent_.emplace(
          backend, kBf16,
          DeviceTensor::Shape{.rows = capacity, .dim = latent, .row_stride = latent + 24}, rows);
    } else {
      kv_c_.emplace(backend, kBf16,
                    DeviceTensor::Shape{.rows = capacity, .dim = dims_.kv_lora_rank},
                    columns_of(rows, latent, 0, dims_.kv_lora_rank));
      k_pe_.emplace(backend, kBf16,
                    DeviceTensor::Shape{.rows = capacity, .dim = dims_.qk_rope_head_dim},
                    columns_of(rows, latent, dims_.kv_lora_rank, latent));
    }
    out_.emplace(backend, options.out_dtype, heads_shape(dims_.v_head_dim));
    lse_.emplace(DeviceTensor::lse(backend, capacity, dims_.num_heads, options.lse_rows_first));
  }

  LayerParams params(const void* kv_b_proj, const LatentCache& cache,
                     const RunOptions& options) const {
    LayerParams params;
    params.q = q_->const_heads();
    params.kv_c = kv_c_ ? kv_c_->const_rows() : latent_->const_rows();
    params.k_pe = k_pe_ ? k_pe_->const_rows() : latent_->const_rows(dims_.kv_lora_rank);
    params.kv_b_proj = kv_b_proj;
    params.kv_cache = cache;
    params.out = out_->heads();
    if (!options.without_lse) params.lse = lse_->lse();
    return params;
  }

  LayerResult result() const {
    EXPECT_TRUE(out_->padding_is_poison()) << "written beside out";
    EXPECT_TRUE(lse_->padding_is_poison()) << "written beside lse";
    return {out_->download(), lse_->download()};
  }

 private:
  ModelDims dims_;
  int64_t rows_;
  std::optional<DeviceTensor> q_, latent_, kv_c_, k_pe_, out_, lse_;
};

/// What a step's plan is made of, with the storage behind it.
struct HostStep {
  std::vector<int32_t> query_start_loc = {0};
  std::vector<int32_t> context_lens;
  std::vector<int64_t> slots;
  std::vector<int32_t> table_storage;
  HostBlockTable table;
};

HostStep make_host_step(const std::vector<ScheduledRequest>& step, PagedRequests& paged) {
  HostStep host;
  std::vector<int32_t> ids;
  for (const ScheduledRequest& r : step) {
    host.query_start_loc.push_back(host.query_start_loc.back() + r.query_len);
    host.context_lens.push_back(r.context_len);
    ids.push_back(r.id);
    paged.grow(r.id, r.context_len + r.query_len);
    for (int32_t i = 0; i < r.query_len; ++i) {
      host.slots.push_back(paged.slot(r.id, r.context_len + i));
    }
  }
  host.table = paged.block_table(ids, host.table_storage);
  return host;
}

void write_prefixes(Backend& backend, const Scenario& scenario, PagedRequests& paged,
                    const LatentCacheStorage& storage) {
  const ModelDims& dims = scenario.dims;
  std::vector<int64_t> slots;
  for (size_t r = 0; r < scenario.requests.size(); ++r) {
    const auto id = static_cast<int32_t>(r);
    paged.grow(id, scenario.requests[r].prefix_len);
    for (int32_t i = 0; i < scenario.requests[r].prefix_len; ++i) {
      slots.push_back(paged.slot(id, i));
    }
  }
  if (slots.empty()) return;
  const DeviceArray<int64_t> device_slots(backend, slots);
  for (int32_t layer = 0; layer < scenario.num_layers; ++layer) {
    std::vector<float> rows;
    for (const Scenario::Request& request : scenario.requests) {
      append(rows, rows_of(request.rows[layer], 0, request.prefix_len, dims.latent_dim()));
    }
    const DeviceTensor tensor(
        backend, kBf16, {.rows = static_cast<int64_t>(slots.size()), .dim = dims.latent_dim()},
        rows);
    backend.write_latent_cache({.kv_lora_rank = dims.kv_lora_rank,
                                .qk_rope_head_dim = dims.qk_rope_head_dim,
                                .kv_c = tensor.const_rows(),
                                .k_pe = tensor.const_rows(dims.kv_lora_rank),
                                .slot_mapping = device_slots.data(),
                                .num_tokens = {static_cast<int64_t>(slots.size())},
                                .kv_cache = storage.layer(layer)},
                               {});
    backend.synchronize({});
  }
}

DeviceTensor upload_weight(Backend& backend, const Scenario& scenario, int32_t layer) {
  const ModelDims& dims = scenario.dims;
  return DeviceTensor(
      backend, kBf16,
      {.rows = int64_t{dims.num_heads} * dims.kv_head_dim(), .dim = dims.kv_lora_rank},
      scenario.kv_b_proj[layer]);
}

/// All rows of a request in one layer as steps read them, expanded through one head.
struct RequestKeys {
  oracle::HeadKeys cached, given;
  std::vector<float> cached_k_pe, given_k_pe;
};

/// The first `context` rows of what the cache gives back, then `count` rows as given.
template <typename T>
std::vector<T> splice(const std::vector<T>& cached, const std::vector<T>& given, int64_t context,
                      int64_t count, int64_t columns) {
  std::vector<T> spliced(cached.begin(), cached.begin() + context * columns);
  spliced.insert(spliced.end(), given.begin() + context * columns,
                 given.begin() + (context + count) * columns);
  return spliced;
}

}  // namespace

int64_t Scenario::num_tokens(size_t step) const {
  return std::accumulate(steps[step].begin(), steps[step].end(), int64_t{0},
                         [](int64_t sum, const ScheduledRequest& r) { return sum + r.query_len; });
}

Scenario make_scenario(const ModelDims& dims, const std::vector<Prompt>& prompts,
                       int32_t max_num_batched_tokens, std::mt19937_64& random,
                       int32_t num_layers) {
  Scenario scenario{.dims = dims,
                    .softmax_scale = 0.0f,
                    .num_layers = num_layers,
                    .kv_b_proj = {},
                    .requests = {},
                    .steps = {}};
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    scenario.kv_b_proj.push_back(
        random_bf16(size_t{1} * dims.num_heads * dims.kv_head_dim() * dims.kv_lora_rank,
                    1.0 / std::sqrt(dims.kv_lora_rank), random));
  }
  StepScheduler scheduler(max_num_batched_tokens, 1024);
  for (const Prompt& prompt : prompts) {
    Scenario::Request request{
        .prefix_len = prompt.prefix_len, .prompt_len = prompt.prompt_len, .rows = {}, .q = {}};
    for (int32_t layer = 0; layer < num_layers; ++layer) {
      request.rows.push_back(random_bf16(
          size_t{1} * (prompt.prefix_len + prompt.prompt_len) * dims.latent_dim(), 1.0, random));
      request.q.push_back(random_bf16(
          size_t{1} * prompt.prompt_len * dims.num_heads * dims.qk_head_dim(), 1.0, random));
    }
    scheduler.add(
        {static_cast<int32_t>(scenario.requests.size()), prompt.prefix_len, prompt.prompt_len});
    scenario.requests.push_back(std::move(request));
  }
  while (!scheduler.done()) scheduler.next_step(scenario.steps.emplace_back());
  return scenario;
}

Scenario select_requests(const Scenario& scenario, const std::vector<int32_t>& indices) {
  Scenario selected{.dims = scenario.dims,
                    .softmax_scale = scenario.softmax_scale,
                    .num_layers = scenario.num_layers,
                    .kv_b_proj = scenario.kv_b_proj,
                    .requests = {},
                    .steps = {}};
  std::vector<ScheduledRequest>& step = selected.steps.emplace_back();
  for (const int32_t index : indices) {
    const Scenario::Request& request = scenario.requests[index];
    step.push_back({static_cast<int32_t>(selected.requests.size()), request.prefix_len,
                    request.prompt_len, true});
    selected.requests.push_back(request);
  }
  return selected;
}

std::vector<PathPolicy> path_policies(const Backend& backend, const ModelDims& dims) {
  if (!backend.supports_path(dims, Path::kAbsorb)) return {PathPolicy::kExpand, PathPolicy::kAuto};
  return {PathPolicy::kExpand, PathPolicy::kAbsorb, PathPolicy::kAuto};
}

int32_t pages_needed(const Scenario& scenario, int32_t page_size) {
  int32_t pages = 0;
  for (const Scenario::Request& r : scenario.requests) {
    pages += (r.prefix_len + r.prompt_len + page_size - 1) / page_size;
  }
  return pages;
}

ScenarioResult run_scenario(Backend& backend, EngineConfig config, const Scenario& scenario,
                            const RunOptions& options) {
  const int32_t num_pages = pages_needed(scenario, config.page_size) + 5;
  PagedRequests paged(num_pages, config.page_size);
  for (size_t r = 0; r < scenario.requests.size(); ++r) paged.add();
  paged.grow(paged.add(), 3 * config.page_size);  // somebody else's pages

  const LatentCacheStorage storage(backend, scenario.dims, config.kv_cache_format,
                                   options.cache_scale, num_pages, config.page_size,
                                   scenario.num_layers);
  const LatentCache first = storage.layer(0);
  backend.fill_bytes(first.data, kPoison, scenario.num_layers * num_pages * first.page_stride, {});
  write_prefixes(backend, scenario, paged, storage);

  std::vector<DeviceTensor> weights;
  for (int32_t layer = 0; layer < scenario.num_layers; ++layer) {
    weights.push_back(upload_weight(backend, scenario, layer));
  }

  // What the workspace's size does not cover shows as a broken zone after it.
  constexpr size_t kZone = 4096;
  const size_t bytes = workspace_bytes(config, backend);
  const DeviceBuffer workspace(backend, bytes + kZone);
  backend.fill_bytes(workspace.data(), options.fill, workspace.bytes(), {});
  Engine engine(config, backend, workspace.span().first(bytes));

  ScenarioResult results;
  for (size_t s = 0; s < scenario.steps.size(); ++s) {
    const std::vector<ScheduledRequest>& step = scenario.steps[s];
    const HostStep host = make_host_step(step, paged);
    const DeviceArray<int64_t> slots(backend, host.slots);
    const DeviceArray<int32_t> table(backend, host.table_storage);
    StepInputs inputs;
    inputs.batch = {host.query_start_loc, host.context_lens};
    inputs.num_pages = num_pages;
    if (options.table_on_device) {
      inputs.device_block_table = table.data();
      inputs.device_block_table_stride = host.table.row_stride;
    } else {
      inputs.host_block_table = host.table;
      inputs.reject_duplicate_pages = true;
    }
    inputs.slot_mapping = slots.data();
    inputs.host_slot_mapping = host.slots;
    engine.begin_step(inputs);

    const int64_t rows =
        config.shape_class.enabled() ? config.shape_class.max_query_tokens : scenario.num_tokens(s);
    std::vector<LayerResult>& layers = results.emplace_back();
    for (int32_t layer = 0; layer < scenario.num_layers; ++layer) {
      const DeviceLayer device(backend, scenario, step, layer, rows, options);
      const LayerParams params =
          device.params(weights[layer].rows().data, storage.layer(layer), options);
      const auto run = [&] { engine.run_layer(params); };
      options.around_layer ? options.around_layer(run) : run();
      backend.synchronize({});
      layers.push_back(device.result());
    }
  }

  std::vector<std::byte> zone(kZone);
  backend.copy_to_host(zone.data(), workspace.span().data() + bytes, kZone, {});
  backend.synchronize({});
  const std::vector<std::byte> untouched(kZone, std::byte{options.fill});
  EXPECT_TRUE(same_bits(std::span<const std::byte>(zone), untouched))
      << "written past the workspace";
  return results;
}

ScenarioExpectation expect_scenario(const Scenario& scenario, KvCacheFormat format, float scale,
                                    std::vector<int32_t> heads) {
  const ModelDims& dims = scenario.dims;
  const int64_t p = dims.qk_nope_head_dim, rr = dims.qk_rope_head_dim, v = dims.v_head_dim,
                l = dims.kv_lora_rank;
  if (heads.empty()) {
    heads.resize(dims.num_heads);
    std::iota(heads.begin(), heads.end(), 0);
  }
  const auto num_heads = static_cast<int64_t>(heads.size());
  const double softmax_scale = scenario.softmax_scale == 0.0f
                                   ? 1.0 / std::sqrt(static_cast<double>(p + rr))
                                   : double{scenario.softmax_scale};

  ScenarioExpectation expected(scenario.steps.size());
  for (size_t s = 0; s < scenario.steps.size(); ++s) {
    const int64_t tokens = scenario.num_tokens(s);
    expected[s].assign(scenario.num_layers, {heads, std::vector<double>(tokens * num_heads * v),
                                             std::vector<double>(tokens * num_heads)});
  }
  for (int32_t layer = 0; layer < scenario.num_layers; ++layer) {
    for (size_t id = 0; id < scenario.requests.size(); ++id) {
      const Scenario::Request& request = scenario.requests[id];
      const std::vector<float>& given = request.rows[layer];
      std::vector<float> cached;
      for (int64_t row = 0; row < request.prefix_len + request.prompt_len; ++row) {
        append(cached, through_cache(rows_of(given, row, row + 1, l + rr), format, scale));
      }
      for (int64_t h = 0; h < num_heads; ++h) {
        const auto weight =
            std::span(scenario.kv_b_proj[layer]).subspan(heads[h] * (p + v) * l, (p + v) * l);
        RequestKeys keys;
        keys.given = oracle::expand_head(columns_of(given, l + rr, 0, l), weight, p, v, l);
        keys.cached = format == KvCacheFormat::kBf16
                          ? keys.given
                          : oracle::expand_head(columns_of(cached, l + rr, 0, l), weight, p, v, l);
        keys.given_k_pe = columns_of(given, l + rr, l, l + rr);
        keys.cached_k_pe = columns_of(cached, l + rr, l, l + rr);

        for (size_t s = 0; s < scenario.steps.size(); ++s) {
          int64_t row = 0;
          for (const ScheduledRequest& r : scenario.steps[s]) {
            if (r.id != static_cast<int32_t>(id)) {
              row += r.query_len;
              continue;
            }
            const int64_t c = r.context_len, n = r.query_len;
            const oracle::HeadKeys visible{splice(keys.cached.k_nope, keys.given.k_nope, c, n, p),
                                           splice(keys.cached.v, keys.given.v, c, n, v)};
            std::vector<float> q;
            for (int64_t i = 0; i < n; ++i) {
              const int64_t at =
                  ((c - request.prefix_len + i) * dims.num_heads + heads[h]) * (p + rr);
              append(q, std::span(request.q[layer]).subspan(at, p + rr));
            }
            std::vector<int64_t> counts(n);
            std::iota(counts.begin(), counts.end(), c + 1);
            const oracle::HeadResult result =
                oracle::attend_head(q, visible, splice(keys.cached_k_pe, keys.given_k_pe, c, n, rr),
                                    counts, p, rr, v, softmax_scale);
            for (int64_t i = 0; i < n; ++i, ++row) {
              Expected& e = expected[s][layer];
              std::copy_n(result.out.begin() + i * v, v, e.out.begin() + (row * num_heads + h) * v);
              e.lse[row * num_heads + h] = result.lse[i];
            }
          }
        }
      }
    }
  }
  return expected;
}

namespace {

/// The expected heads of a result, in the expectation's order.
LayerResult select_heads(const LayerResult& found, const Expected& expected,
                         const ModelDims& dims) {
  const int64_t v = dims.v_head_dim;
  const auto rows = static_cast<int64_t>(expected.lse.size() / expected.heads.size());
  LayerResult selected;
  for (int64_t row = 0; row < rows; ++row) {
    for (const int32_t head : expected.heads) {
      const int64_t at = row * dims.num_heads + head;
      append(selected.out, std::span(found.out).subspan(at * v, v));
      selected.lse.push_back(found.lse[at]);
    }
  }
  return selected;
}

}  // namespace

::testing::AssertionResult agrees(const ScenarioResult& found, const ScenarioExpectation& expected,
                                  const ModelDims& dims, const Tolerance& tolerance) {
  const auto finite = [](float x) { return std::isfinite(x); };
  for (size_t s = 0; s < expected.size(); ++s) {
    for (size_t layer = 0; layer < expected[s].size(); ++layer) {
      const LayerResult& result = found[s][layer];
      const Expected& e = expected[s][layer];
      if (e.lse.empty()) continue;
      if (!std::ranges::all_of(result.out, finite) || !std::ranges::all_of(result.lse, finite)) {
        return ::testing::AssertionFailure() << "step " << s << " layer " << layer << " not finite";
      }
      const LayerResult selected = select_heads(result, e, dims);
      const double error = relative_error(selected.out, e.out);
      const double lse = lse_error(selected.lse, e.lse);
      if (!(error <= tolerance.relative && lse <= tolerance.lse)) {
        return ::testing::AssertionFailure()
               << "step " << s << " layer " << layer << ": relative error " << error << " of "
               << tolerance.relative << ", LSE error " << lse << " of " << tolerance.lse;
      }
      const int64_t v = dims.v_head_dim;
      for (size_t row = 0; row < e.lse.size(); ++row) {
        const double of_row = relative_error(std::span(selected.out).subspan(row * v, v),
                                             std::span(e.out).subspan(row * v, v));
        if (of_row <= 2 * tolerance.relative) continue;
        return ::testing::AssertionFailure()
               << "step " << s << " layer " << layer << " row " << row / e.heads.size() << " head "
               << e.heads[row % e.heads.size()] << ": relative error " << of_row << " of "
               << 2 * tolerance.relative;
      }
    }
  }
  return ::testing::AssertionSuccess();
}

double unchunked_error(Backend& backend, const Scenario& scenario, KvCacheFormat format,
                       float scale, const ScenarioExpectation& expected) {
  const ModelDims& dims = scenario.dims;
  const int64_t latent = dims.latent_dim();
  double worst = 0.0;
  for (size_t s = 0; s < scenario.steps.size(); ++s) {
    for (int32_t layer = 0; layer < scenario.num_layers; ++layer) {
      const std::vector<ScheduledRequest>& step = scenario.steps[s];
      std::vector<float> keys;
      std::vector<AttentionItem> items;
      AttentionItem next;
      int32_t longest = 0;
      for (const ScheduledRequest& r : step) {
        const std::vector<float>& rows = scenario.requests[r.id].rows[layer];
        for (int64_t i = 0; i < r.context_len; ++i) {
          append(keys, through_cache(rows_of(rows, i, i + 1, latent), format, scale));
        }
        append(keys, rows_of(rows, r.context_len, r.context_len + r.query_len, latent));
        next.q_len = r.query_len;
        next.k_len = r.context_len + r.query_len;
        next.causal_offset = r.context_len;
        if (next.q_len > 0) items.push_back(next);
        next.q_begin += next.q_len;
        next.out_row = next.q_begin;
        next.k_begin += next.k_len;
        longest = std::max(longest, next.k_len);
      }
      if (items.empty()) continue;
      const auto rows = static_cast<int64_t>(keys.size()) / latent;
      const DeviceTensor rows_tensor(backend, kBf16, {.rows = rows, .dim = latent}, keys);
      const DeviceTensor weight = upload_weight(backend, scenario, layer);
      const DeviceTensor expanded(
          backend, kBf16, {.rows = rows, .heads = dims.num_heads, .dim = dims.kv_head_dim()});
      const DeviceArray<AttentionItem> device_items(backend, items);
      const DeviceLayer device(backend, scenario, step, layer, scenario.num_tokens(s), {});
      const LayerParams params = device.params(nullptr, {}, {});
      const DeviceBuffer scratch(
          backend, backend.scratch_bytes({.dims = dims,
                                          .max_query_tokens = next.q_begin,
                                          .max_rows = static_cast<int32_t>(rows),
                                          .max_requests = static_cast<int32_t>(items.size())}));
      const OpContext context{{}, scratch.span()};
      backend.expand({.dims = dims,
                      .latent = rows_tensor.const_rows(),
                      .kv_b_proj = weight.rows().data,
                      .expanded = expanded.rows(),
                      .num_rows = {rows}},
                     context);
      PrefillAttentionParams attention;
      attention.num_heads = dims.num_heads;
      attention.qk_nope_head_dim = dims.qk_nope_head_dim;
      attention.qk_rope_head_dim = dims.qk_rope_head_dim;
      attention.v_head_dim = dims.v_head_dim;
      attention.softmax_scale =
          scenario.softmax_scale == 0.0f ? default_softmax_scale(dims) : scenario.softmax_scale;
      attention.q = params.q;
      attention.k_nope = expanded.const_heads();
      attention.k_pe = rows_tensor.const_rows(dims.kv_lora_rank);
      attention.v = expanded.const_heads(dims.qk_nope_head_dim);
      attention.q_rows = next.q_begin;
      attention.k_rows = rows;
      attention.items = device_items.data();
      attention.num_items = {static_cast<int64_t>(items.size())};
      attention.max_q_len = next.q_begin;
      attention.max_k_len = longest;
      attention.out = params.out;
      attention.lse = params.lse;
      backend.prefill_attention(attention, context);
      backend.synchronize({});
      const LayerResult selected = select_heads(device.result(), expected[s][layer], dims);
      worst = std::max(worst, relative_error(selected.out, expected[s][layer].out));
    }
  }
  EXPECT_LE(worst, 3e-3) << "the unchunked call is no yardstick";
  return worst;
}

::testing::AssertionResult same_bits(const ScenarioResult& a, const ScenarioResult& b) {
  for (size_t s = 0; s < a.size(); ++s) {
    for (size_t layer = 0; layer < a[s].size(); ++layer) {
      for (const auto field : {&LayerResult::out, &LayerResult::lse}) {
        const ::testing::AssertionResult same = same_bits(
            std::span<const float>(a[s][layer].*field), std::span<const float>(b[s][layer].*field));
        if (!same) {
          return ::testing::AssertionFailure()
                 << "step " << s << " layer " << layer
                 << (field == &LayerResult::out ? " out: " : " lse: ") << same.message();
        }
      }
    }
  }
  return ::testing::AssertionSuccess();
}

EngineConfig config_for(const Scenario& scenario, int32_t workspace_tokens, int32_t page_size) {
  EngineConfig config;
  config.dims = scenario.dims;
  config.softmax_scale = scenario.softmax_scale;
  config.workspace_tokens = workspace_tokens;
  config.page_size = page_size;
  config.max_query_tokens = 1;
  config.max_requests = 1;
  for (size_t s = 0; s < scenario.steps.size(); ++s) {
    config.max_query_tokens =
        std::max(config.max_query_tokens, static_cast<int32_t>(scenario.num_tokens(s)));
    config.max_requests =
        std::max(config.max_requests, static_cast<int32_t>(scenario.steps[s].size()));
  }
  return config;
}

std::string describe(const EngineConfig& config) {
  constexpr std::string_view kPolicies[] = {"auto", "expand", "absorb"};
  return fmt::format("{} {} {} {} W {} page {} H {}", schedule_name(config.schedule),
                     merge_mode_name(config.merge), kPolicies[static_cast<int>(config.path)],
                     kv_cache_format_name(config.kv_cache_format), config.workspace_tokens,
                     config.page_size, config.dims.num_heads);
}

}  // namespace mla::test
