#include "tools/cli/op_tensors.h"

#include <cmath>
#include <span>

#include "tests/oracle/oracle.h"

namespace mla::cli {

/// What make_set allocates, for every set, and the copies on the host while one is made or checked.
double OpTensors::all_sets_bytes() const {
  const double heads = dims.num_heads;
  const double weights = heads * dims.kv_head_dim() * dims.kv_lora_rank * 2;
  const double expanded = k * heads * dims.kv_head_dim() * 2;
  const double query = heads * (dims.qk_head_dim() + dims.latent_dim() + dims.v_head_dim) * 2;
  const double out = heads * (std::max(dims.v_head_dim, dims.kv_lora_rank) + 1) * 4;
  const double set = weights + expanded + double(num_pages()) * page_stride() +
                     double(k) * dims.latent_dim() * 2 + t * (query + 2 * out);
  return kOpTensorSets * set + weights + expanded;
}

std::unique_ptr<OpTensorSet> OpTensors::make_set() {
  auto set = std::make_unique<OpTensorSet>();
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

bool OpTensors::check_attention(int32_t k_len, bool causal) {
  const int64_t p = dims.qk_nope_head_dim, rr = dims.qk_rope_head_dim, v = dims.v_head_dim;
  const int64_t heads = dims.num_heads, columns = dims.kv_head_dim(), qk = dims.qk_head_dim();
  const OpTensorSet& set = *sets[0];
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
      if (!(std::fabs(lse[head * t + row] - expected.lse[0]) <=
            1e-3 * std::max(1.0, std::fabs(expected.lse[0])))) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace mla::cli
