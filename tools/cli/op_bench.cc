#include "tools/cli/op_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>

#include "tests/oracle/oracle.h"
#include "tools/cli/measure.h"
#include "tools/cli/op_tensors.h"

namespace mla::cli {
namespace {

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

OpBench::OpBench(const Options& options, Device& device, int32_t query_tokens, int32_t key_rows)
    : tensors_(std::make_unique<OpTensors>(options, device, query_tokens, key_rows)) {}

OpBench::~OpBench() = default;

OpCase OpBench::gather() {
  OpTensors& s = *tensors_;
  OpCase op;
  op.name = "gather_latent";
  op.shape = fmt::format("{} rows {}", s.k, kv_cache_format_name(s.config.kv_cache_format));
  op.cost.bytes = double(s.k) *
                  (kv_cache_row_bytes(s.config.kv_cache_format, s.dims) + 2 * s.dims.latent_dim());
  op.enqueue = [&s](int64_t call) {
    const OpTensorSet& set = *s.sets[call % kOpTensorSets];
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
  OpTensors& s = *tensors_;
  const double heads = s.dims.num_heads;
  OpCase op;
  op.name = "expand";
  op.shape = fmt::format("H{} {} rows", s.dims.num_heads, s.k);
  op.cost.flops = 2 * heads * s.dims.kv_head_dim() * s.dims.kv_lora_rank * s.k;
  op.cost.bytes = 2 * (double(s.k) * s.dims.kv_lora_rank + heads * s.dims.kv_head_dim() * s.k +
                       heads * s.dims.kv_head_dim() * s.dims.kv_lora_rank);
  op.enqueue = [&s](int64_t call) {
    const OpTensorSet& set = *s.sets[call % kOpTensorSets];
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

OpCase OpBench::attention() {
  OpTensors& s = *tensors_;
  const double heads = s.dims.num_heads;
  OpCase op;
  op.name = "prefill_attention";
  op.shape = fmt::format("H{} q{} k{}", s.dims.num_heads, s.t, s.k);
  op.cost.flops = 2 * heads * (s.dims.qk_head_dim() + s.dims.v_head_dim) * s.t * s.k;
  op.cost.bytes = heads * (2.0 * s.t * s.dims.qk_head_dim() + 4.0 * s.t * s.dims.v_head_dim +
                           2.0 * s.k * s.dims.kv_head_dim()) +
                  2.0 * s.k * s.dims.qk_rope_head_dim;
  op.enqueue = [&s](int64_t call) {
    s.backend.prefill_attention(
        s.attention_params(*s.sets[call % kOpTensorSets], kUnmaskedItem, s.k), s.context());
  };
  op.check = [&s] { return s.check_attention(s.k, /*causal=*/false); };
  return op;
}

OpCase OpBench::causal_attention() {
  OpTensors& s = *tensors_;
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
    s.backend.prefill_attention(s.attention_params(*s.sets[call % kOpTensorSets], kCausalItem, n),
                                s.context());
  };
  op.check = [&s, n] { return s.check_attention(n, /*causal=*/true); };
  return op;
}

OpCase OpBench::absorbed_attention() {
  OpTensors& s = *tensors_;
  const double heads = s.dims.num_heads;
  OpCase op;
  op.name = "absorbed_attention";
  op.shape = fmt::format("H{} q{} k{}", s.dims.num_heads, s.t, s.k);
  op.cost.flops = 2 * heads * (s.dims.latent_dim() + s.dims.kv_lora_rank) * s.t * s.k;
  op.cost.bytes = heads * s.t * (2.0 * s.dims.latent_dim() + 4.0 * s.dims.kv_lora_rank) +
                  2.0 * s.k * s.dims.latent_dim();
  op.enqueue = [&s](int64_t call) {
    const OpTensorSet& set = *s.sets[call % kOpTensorSets];
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
  OpTensors& s = *tensors_;
  const double elements = double(s.t) * s.dims.num_heads * s.dims.v_head_dim;
  OpCase op;
  op.name = "mask_empty_context";
  op.shape = fmt::format("H{} {} rows", s.dims.num_heads, s.t);
  op.cost.bytes = elements * 4 + 4.0 * s.t * s.dims.num_heads;
  op.enqueue = [&s](int64_t call) {
    const OpTensorSet& set = *s.sets[call % kOpTensorSets];
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
  OpTensors& s = *tensors_;
  for (const auto& set : s.sets) {
    s.backend.prefill_attention(s.attention_params(*set, kUnmaskedItem, s.k), s.context());
  }
  const double elements = double(s.t) * s.dims.num_heads * s.dims.v_head_dim;
  OpCase op;
  op.name = "merge_attn_states";
  op.shape = fmt::format("H{} {} rows", s.dims.num_heads, s.t);
  op.cost.bytes = elements * (4 + 4 + 2) + 12.0 * s.t * s.dims.num_heads;
  op.enqueue = [&s](int64_t call) {
    const OpTensorSet& set = *s.sets[call % kOpTensorSets];
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
