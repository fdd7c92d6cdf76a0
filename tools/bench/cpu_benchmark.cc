// What the CPU backend reaches, beside the machine's own float32 GEMM in the same run.
//
// `of_sgemm` is the op's FLOP rate over that of one big matrix product by the same library on the
// same executor. The two are timed in turn, so that a busy machine slows both.
#include <benchmark/benchmark.h>
#include <blis-serial/cblas.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "kernels/convert.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"

namespace mla {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Executor& executor() {
  static const std::unique_ptr<Executor> instance = make_thread_pool();
  return *instance;
}

Backend& backend() {
  static const std::unique_ptr<Backend> instance = make_cpu_backend(executor());
  return *instance;
}

std::vector<uint16_t> random_bf16(int64_t size) {
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(size);
  for (uint16_t& x : values) x = float_to_bf16(normal(engine));
  return values;
}

/// c = a b with 2,048 rows of a for each worker.
class Sgemm {
 public:
  Sgemm()
      : a_(kSize * kSize * executor().num_workers(), 0.5f),
        b_(kSize * kSize, 0.5f),
        c_(a_.size()) {}

  void run() {
    executor().parallel_for(executor().num_workers(), [&](int64_t i, int) {
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kSize, kSize, kSize, 1.0f,
                  a_.data() + i * kSize * kSize, kSize, b_.data(), kSize, 0.0f,
                  c_.data() + i * kSize * kSize, kSize);
    });
  }
  double flops() const { return 2.0 * a_.size() * kSize; }

 private:
  static constexpr int64_t kSize = 2048;
  std::vector<float> a_;
  std::vector<float> b_;
  std::vector<float> c_;
};

/// Times `op` against the GEMM, in turn.
template <typename Op>
void compare_with_sgemm(benchmark::State& state, double flops, const Op& op) {
  static Sgemm sgemm;
  sgemm.run();
  op();
  double op_seconds = 0.0;
  double sgemm_seconds = 0.0;
  for (auto _ : state) {
    const Clock::time_point sgemm_start = Clock::now();
    sgemm.run();
    sgemm_seconds += seconds_since(sgemm_start);
    const Clock::time_point op_start = Clock::now();
    op();
    const double elapsed = seconds_since(op_start);
    state.SetIterationTime(elapsed);
    op_seconds += elapsed;
  }
  const double op_rate = flops * state.iterations() / op_seconds;
  const double sgemm_rate = sgemm.flops() * state.iterations() / sgemm_seconds;
  state.counters["gflops"] = op_rate * 1e-9;
  state.counters["sgemm_gflops"] = sgemm_rate * 1e-9;
  state.counters["of_sgemm"] = op_rate / sgemm_rate;
}

DeviceBuffer make_scratch(const ModelDims& dims) {
  return DeviceBuffer(backend(),
                      backend().scratch_bytes(
                          {.dims = dims, .max_query_tokens = 1, .max_rows = 1, .max_requests = 1}));
}

/// Arguments: query rows, keys, heads, P, Rr, V, causal. K and V are views of one expansion.
void attention(benchmark::State& state) {
  const auto q_len = static_cast<int32_t>(state.range(0));
  const auto k_len = static_cast<int32_t>(state.range(1));
  const ModelDims dims{.num_heads = static_cast<int32_t>(state.range(2)),
                       .qk_nope_head_dim = static_cast<int32_t>(state.range(3)),
                       .qk_rope_head_dim = static_cast<int32_t>(state.range(4)),
                       .v_head_dim = static_cast<int32_t>(state.range(5)),
                       .kv_lora_rank = 512};
  const bool causal = state.range(6) != 0;
  const int64_t heads = dims.num_heads;
  const int64_t kv = dims.kv_head_dim();
  const std::vector<uint16_t> q = random_bf16(q_len * heads * dims.qk_head_dim());
  const std::vector<uint16_t> expanded = random_bf16(k_len * heads * kv);
  const std::vector<uint16_t> k_pe = random_bf16(int64_t{k_len} * dims.qk_rope_head_dim);
  std::vector<float> out(q_len * heads * dims.v_head_dim);
  std::vector<float> lse(heads * q_len);
  const AttentionItem item{
      .q_len = q_len, .k_len = k_len, .causal_offset = causal ? k_len - q_len : kUnmasked};
  const DeviceBuffer scratch = make_scratch(dims);

  PrefillAttentionParams params;
  params.num_heads = dims.num_heads;
  params.qk_nope_head_dim = dims.qk_nope_head_dim;
  params.qk_rope_head_dim = dims.qk_rope_head_dim;
  params.v_head_dim = dims.v_head_dim;
  params.softmax_scale = default_softmax_scale(dims);
  params.q = {q.data(), DType::kBFloat16, heads * dims.qk_head_dim(), dims.qk_head_dim()};
  params.k_nope = {expanded.data(), DType::kBFloat16, heads * kv, kv};
  params.k_pe = {k_pe.data(), DType::kBFloat16, dims.qk_rope_head_dim};
  params.v = {expanded.data() + dims.qk_nope_head_dim, DType::kBFloat16, heads * kv, kv};
  params.q_rows = q_len;
  params.k_rows = k_len;
  params.items = &item;
  params.num_items = {.capacity = 1};
  params.max_q_len = q_len;
  params.max_k_len = k_len;
  params.out = {out.data(), DType::kFloat32, heads * dims.v_head_dim, dims.v_head_dim};
  params.lse = {lse.data(), q_len, 1};

  double scores = double{1} * q_len * k_len;
  if (causal) scores -= 0.5 * q_len * (q_len - 1.0);
  const double flops = 2.0 * heads * scores * (dims.qk_head_dim() + dims.v_head_dim);
  compare_with_sgemm(state, flops, [&] {
    backend().prefill_attention(params, {{}, scratch.span()});
  });
}
BENCHMARK(attention)
    ->ArgNames({"q", "k", "heads", "nope", "rope", "v", "causal"})
    ->Args({512, 8192, 16, 128, 64, 128, 0})
    ->Args({2048, 2048, 16, 128, 64, 128, 1})
    ->Args({64, 8192, 16, 128, 64, 128, 0})
    ->Args({512, 8192, 4, 192, 64, 256, 0})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

/// Arguments: rows, heads; the dimensions of deepseek-v3.
void expand(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const ModelDims dims{.num_heads = static_cast<int32_t>(state.range(1)),
                       .qk_nope_head_dim = 128,
                       .qk_rope_head_dim = 64,
                       .v_head_dim = 128,
                       .kv_lora_rank = 512};
  const int64_t columns = int64_t{dims.num_heads} * dims.kv_head_dim();
  const std::vector<uint16_t> latent = random_bf16(rows * dims.latent_dim());
  const std::vector<uint16_t> weight = random_bf16(columns * dims.kv_lora_rank);
  std::vector<uint16_t> expanded(rows * columns);
  const DeviceBuffer scratch = make_scratch(dims);
  const ExpandParams params{.dims = dims,
                            .latent = {latent.data(), DType::kBFloat16, dims.latent_dim()},
                            .kv_b_proj = weight.data(),
                            .expanded = {expanded.data(), DType::kBFloat16, columns},
                            .num_rows = {.capacity = rows}};
  compare_with_sgemm(state, 2.0 * rows * columns * dims.kv_lora_rank, [&] {
    backend().expand(params, {{}, scratch.span()});
  });
}
BENCHMARK(expand)
    ->ArgNames({"rows", "heads"})
    ->Args({8192, 16})
    ->Args({256, 16})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

/// Arguments: tokens, heads; 128 values a head, float32 prefix in place, bf16 suffix.
void merge(benchmark::State& state) {
  const int64_t tokens = state.range(0);
  const auto heads = static_cast<int32_t>(state.range(1));
  constexpr int32_t kDim = 128;
  std::vector<float> running(tokens * heads * kDim, 1.0f);
  std::vector<float> running_lse(tokens * heads, 1.0f);
  const std::vector<uint16_t> suffix = random_bf16(tokens * heads * kDim);
  const std::vector<float> suffix_lse(tokens * heads, 1.0f);
  MergeAttnStatesParams params;
  params.num_heads = heads;
  params.head_dim = kDim;
  params.num_tokens = {.capacity = tokens};
  params.output = {running.data(), DType::kFloat32, int64_t{heads} * kDim, kDim};
  params.output_lse = {running_lse.data(), tokens, 1};
  params.prefix_out = as_const(params.output);
  params.prefix_lse = as_const(params.output_lse);
  params.suffix_out = {suffix.data(), DType::kBFloat16, int64_t{heads} * kDim, kDim};
  params.suffix_lse = {suffix_lse.data(), tokens, 1};
  for (auto _ : state) backend().merge_attn_states(params, {});
  state.SetBytesProcessed(state.iterations() * tokens * heads *
                          (kDim * (4 + 4 + 2) + 3 * int64_t{sizeof(float)}));
}
BENCHMARK(merge)
    ->ArgNames({"tokens", "heads"})
    ->Args({4096, 16})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace mla

BENCHMARK_MAIN();
