// Embedding the engine: two prompts are prefilled in two steps, the second of which attends to what
// the first left in the cache. Change make_cpu_backend to make_cuda_backend and the same program
// runs on a GPU, with tensors in its memory.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "engine/engine.h"
#include "engine/paged_cache.h"
#include "kernels/convert.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"

namespace {

std::vector<uint16_t> random_bf16(int64_t count) {
  static std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) value = mla::float_to_bf16(normal(random));
  return values;
}

}  // namespace

int main() {
  // Once: a backend, the workspace it needs, and an engine that owns neither.
  const std::unique_ptr<mla::Executor> executor = mla::make_thread_pool();
  const std::unique_ptr<mla::Backend> backend = mla::make_cpu_backend(*executor);

  mla::EngineConfig config;
  config.dims = mla::find_preset("deepseek-v2-lite");
  config.page_size = 16;
  config.workspace_tokens = 256;
  config.max_query_tokens = 512;
  config.max_requests = 8;
  const mla::DeviceBuffer workspace(*backend, mla::workspace_bytes(config, *backend));
  mla::Engine engine(config, *backend, workspace.span());

  // A serving stack brings its own cache and page tables; these stand in for them.
  constexpr int32_t kPages = 64;
  const mla::LatentCacheStorage cache(*backend, config.dims, config.kv_cache_format, 1.0f, kPages,
                                      config.page_size, /*num_layers=*/1);
  mla::PagedRequests requests(kPages, config.page_size);
  const std::vector<int32_t> ids = {requests.add(), requests.add()};
  const std::vector<uint16_t> kv_b_proj = random_bf16(
      int64_t{config.dims.num_heads} * config.dims.kv_head_dim() * config.dims.kv_lora_rank);

  std::vector<int32_t> context_lens = {0, 0};
  for (const std::vector<int32_t>& query_lens : {std::vector{300, 20}, std::vector{100, 1}}) {
    // Once a step: where each request's new tokens go, and the plan that all layers share.
    std::vector<int32_t> query_start_loc = {0};
    std::vector<int64_t> slots;
    for (size_t r = 0; r < ids.size(); ++r) {
      requests.grow(ids[r], context_lens[r] + query_lens[r]);
      for (int32_t i = 0; i < query_lens[r]; ++i) {
        slots.push_back(requests.slot(ids[r], context_lens[r] + i));
      }
      query_start_loc.push_back(query_start_loc.back() + query_lens[r]);
    }
    std::vector<int32_t> table;
    mla::StepInputs step;
    step.batch = {query_start_loc, context_lens};
    step.num_pages = kPages;
    step.host_block_table = requests.block_table(ids, table);
    step.slot_mapping = slots.data();
    step.host_slot_mapping = slots;
    engine.begin_step(step);

    // Once a layer: queries and latent rows in, attention output out.
    const int64_t tokens = query_start_loc.back();
    const mla::ModelDims& dims = config.dims;
    const auto q = random_bf16(tokens * dims.num_heads * dims.qk_head_dim());
    const auto kv_c = random_bf16(tokens * dims.kv_lora_rank);
    const auto k_pe = random_bf16(tokens * dims.qk_rope_head_dim);
    std::vector<uint16_t> out(static_cast<size_t>(tokens * dims.num_heads * dims.v_head_dim));

    constexpr auto kBf16 = mla::DType::kBFloat16;
    mla::LayerParams layer;
    layer.q = {q.data(), kBf16, int64_t{dims.num_heads} * dims.qk_head_dim(), dims.qk_head_dim()};
    layer.kv_c = {kv_c.data(), kBf16, dims.kv_lora_rank};
    layer.k_pe = {k_pe.data(), kBf16, dims.qk_rope_head_dim};
    layer.kv_b_proj = kv_b_proj.data();
    layer.kv_cache = cache.layer(0);
    layer.out = {out.data(), kBf16, int64_t{dims.num_heads} * dims.v_head_dim, dims.v_head_dim};
    engine.run_layer(layer);

    std::printf("%lld new tokens over %d + %d cached ones, %zu chunks: out[0] = %g\n",
                static_cast<long long>(tokens), context_lens[0], context_lens[1],
                engine.plan().chunks().size(), mla::bf16_to_float(out[0]));
    for (size_t r = 0; r < ids.size(); ++r) context_lens[r] += query_lens[r];
  }
}
