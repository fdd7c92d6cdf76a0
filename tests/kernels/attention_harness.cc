#include "tests/kernels/attention_harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

#include "metadata/error.h"
#include "metadata/plan.h"
#include "tests/oracle/oracle.h"
#include "tests/support/compare.h"
#include "tests/support/device_tensor.h"

namespace mla::test {
namespace {

/// Keys and values in one of the layouts.
struct DeviceKeys {
  std::vector<DeviceTensor> tensors;
  ConstHeadRows k_nope;
  ConstRows k_pe;
  ConstHeadRows v;
};

/// Writes columns [column, column + count) of every row of `to` from the rows of `from`.
void copy_columns(std::vector<float>& to, int64_t to_columns, int64_t column,
                  const std::vector<float>& from, int64_t count) {
  const int64_t rows = count == 0 ? 0 : static_cast<int64_t>(from.size()) / count;
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(from.begin() + r * count, count, to.begin() + r * to_columns + column);
  }
}

DeviceKeys make_keys(Backend& backend, const AttentionCase& c) {
  const int64_t rows = c.k_rows, heads = c.heads, p = c.p, rr = c.rr, v = c.v;
  DeviceKeys keys;
  switch (c.layout) {
    case KeyLayout::kSeparate:
      keys.tensors.emplace_back(backend, c.dtype,
                                DeviceTensor::Shape{.rows = rows,
                                                    .heads = heads,
                                                    .dim = p,
                                                    .row_stride = heads * (p + 8) + 16,
                                                    .head_stride = p + 8},
                                c.k_nope);
      keys.tensors.emplace_back(backend, c.dtype,
                                DeviceTensor::Shape{.rows = rows, .dim = rr, .row_stride = rr + 24},
                                c.k_pe);
      keys.tensors.emplace_back(  // heads first
          backend, c.dtype,
          DeviceTensor::Shape{.rows = rows,
                              .heads = heads,
                              .dim = v,
                              .row_stride = v,
                              .head_stride = (rows + 1) * v},
          c.values);
      keys.k_nope = keys.tensors[0].const_heads();
      keys.k_pe = keys.tensors[1].const_rows();
      keys.v = keys.tensors[2].const_heads();
      break;
    case KeyLayout::kExpanded: {
      std::vector<float> expanded(rows * heads * (p + v));
      copy_columns(expanded, p + v, 0, c.k_nope, p);
      copy_columns(expanded, p + v, p, c.values, v);
      keys.tensors.emplace_back(backend, c.dtype,
                                DeviceTensor::Shape{.rows = rows, .heads = heads, .dim = p + v},
                                expanded);
      constexpr int64_t kLora = 40;
      keys.tensors.emplace_back(
          backend, c.dtype, DeviceTensor::Shape{.rows = rows, .dim = rr, .row_stride = kLora + rr},
          c.k_pe);
      keys.k_nope = keys.tensors[0].const_heads();
      keys.v = keys.tensors[0].const_heads(p);
      keys.k_pe = keys.tensors[1].const_rows();
      break;
    }
    case KeyLayout::kLatent: {
      std::vector<float> latent(rows * (p + rr));
      copy_columns(latent, p + rr, 0, c.k_nope, p);
      copy_columns(latent, p + rr, p, c.k_pe, rr);
      keys.tensors.emplace_back(backend, c.dtype, DeviceTensor::Shape{.rows = rows, .dim = p + rr},
                                latent);
      const ConstRows shared = keys.tensors[0].const_rows();
      keys.k_nope = {shared.data, c.dtype, shared.row_stride, 0};
      keys.v = keys.k_nope;
      keys.k_pe = keys.tensors[0].const_rows(p);
    }
  }
  if (rr == 0) keys.k_pe = {nullptr, c.dtype, 0};
  return keys;
}

float scale_of(const AttentionCase& c) {
  return c.softmax_scale != 0.0f ? c.softmax_scale
                                 : 1.0f / std::sqrt(static_cast<float>(c.p + c.rr));
}

/// Columns of one head, of rows [begin, begin + count).
std::vector<float> head_rows(const std::vector<float>& tensor, int64_t begin, int64_t count,
                             int64_t heads, int64_t head, int64_t dim) {
  std::vector<float> rows;
  rows.reserve(count * dim);
  for (int64_t r = begin; r < begin + count; ++r) {
    const auto row = tensor.begin() + (r * heads + head) * dim;
    rows.insert(rows.end(), row, row + dim);
  }
  return rows;
}

}  // namespace

void AttentionCase::fit_rows() {
  for (const AttentionItem& item : items) {
    q_rows = std::max<int64_t>(q_rows, item.q_begin + item.q_len);
    k_rows = std::max<int64_t>(k_rows, item.k_begin + item.k_len);
    out_rows = std::max<int64_t>(out_rows, item.out_row + item.q_len);
  }
}

std::vector<bool> AttentionCase::covered_rows() const {
  std::vector<bool> covered(out_rows);
  for (const AttentionItem& item : items) {
    std::fill_n(covered.begin() + item.out_row, item.q_len, true);
  }
  return covered;
}

AttentionResult run_attention(Backend& backend, const OpContext& context, const AttentionCase& c) {
  const int64_t heads = c.heads, d = c.p + c.rr, v = c.v;
  const DeviceTensor q(backend, c.dtype,
                       {.rows = c.q_rows,
                        .heads = heads,
                        .dim = d,
                        .row_stride = heads * (d + 8),
                        .head_stride = d + 8},
                       c.q);
  const DeviceKeys keys = make_keys(backend, c);
  const DeviceTensor::Shape out_shape{
      .rows = c.out_rows, .heads = heads, .dim = v, .row_stride = heads * v + 8};
  DeviceTensor out(backend, c.out_dtype, out_shape);
  DeviceTensor lse = DeviceTensor::lse(backend, c.out_rows, heads, c.lse_rows_first);
  const DeviceArray<AttentionItem> items(backend, c.items);
  const DeviceArray<int32_t> actual(backend,
                                    std::vector<int32_t>{static_cast<int32_t>(c.items.size())});

  PrefillAttentionParams params;
  params.num_heads = c.heads;
  params.qk_nope_head_dim = c.p;
  params.qk_rope_head_dim = c.rr;
  params.v_head_dim = c.v;
  params.softmax_scale = scale_of(c);
  params.q = q.const_heads();
  params.k_nope = keys.k_nope;
  params.k_pe = keys.k_pe;
  params.v = keys.v;
  params.q_rows = c.q_rows;
  params.k_rows = c.k_rows;
  params.items = items.data();
  params.num_items = {static_cast<int64_t>(c.items.size())};
  if (c.items_capacity > 0) params.num_items = {c.items_capacity, actual.data()};
  for (const AttentionItem& item : c.items) {
    params.max_q_len = std::max(params.max_q_len, item.q_len);
    params.max_k_len = std::max(params.max_k_len, item.k_len);
  }
  params.max_q_len += c.bound_slack;
  params.max_k_len += c.bound_slack;
  std::optional<DeviceTensor> prefix_out;
  std::optional<DeviceTensor> prefix_lse;
  if (!c.prefix_out.empty()) {
    if (c.prefix_in_place) {
      out.upload(c.prefix_out);
      lse.upload(c.prefix_lse);
      params.prefix_out = out.const_heads();
      params.prefix_lse = lse.const_lse();
    } else {
      DeviceTensor::Shape prefix_shape = out_shape;
      prefix_shape.row_stride = 0;
      prefix_out.emplace(backend, DType::kFloat32, prefix_shape, c.prefix_out);
      prefix_lse.emplace(DeviceTensor::lse(backend, c.out_rows, heads, !c.lse_rows_first));
      prefix_lse->upload(c.prefix_lse);
      params.prefix_out = prefix_out->const_heads();
      params.prefix_lse = prefix_lse->const_lse();
    }
  }
  params.out = out.heads();
  if (c.lse_wanted) params.lse = lse.lse();

  const AttentionResult before{out.download(), lse.download()};
  backend.prefill_attention(params, context);
  backend.synchronize({});
  AttentionResult after{out.download(), lse.download()};

  EXPECT_TRUE(out.padding_is_poison());
  EXPECT_TRUE(lse.padding_is_poison());
  const std::vector<bool> covered = c.covered_rows();
  for (int64_t row = 0; row < c.out_rows; ++row) {
    if (!covered[row]) {
      EXPECT_TRUE(same_bits(std::span(after.out).subspan(row * heads * v, heads * v),
                            std::span(before.out).subspan(row * heads * v, heads * v)))
          << "row " << row << " belongs to no item";
    }
    if (!covered[row] || !c.lse_wanted) {
      EXPECT_TRUE(same_bits(std::span(after.lse).subspan(row * heads, heads),
                            std::span(before.lse).subspan(row * heads, heads)))
          << "lse of row " << row << " belongs to no item or isn't wanted";
    }
  }
  return after;
}

AttentionExpected expected_attention(const AttentionCase& c) {
  const int64_t heads = c.heads, p = c.p, rr = c.rr, v = c.v;
  const bool shared = c.layout == KeyLayout::kLatent;
  AttentionExpected expected{std::vector<double>(c.out_rows * heads * v),
                             std::vector<double>(c.out_rows * heads)};
  for (const AttentionItem& item : c.items) {
    std::vector<int64_t> visible(item.q_len);
    for (int64_t i = 0; i < item.q_len; ++i) {
      visible[i] = std::clamp<int64_t>(i + int64_t{item.causal_offset} + 1, 0, item.k_len);
    }
    const std::vector<float> k_pe = head_rows(c.k_pe, item.k_begin, item.k_len, 1, 0, rr);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t key_head = shared ? 0 : h;
      const int64_t key_heads = shared ? 1 : heads;
      oracle::HeadKeys keys;
      keys.k_nope = head_rows(c.k_nope, item.k_begin, item.k_len, key_heads, key_head, p);
      if (shared) {
        for (int64_t k = 0; k < item.k_len; ++k) {
          keys.v.insert(keys.v.end(), keys.k_nope.begin() + k * p, keys.k_nope.begin() + k * p + v);
        }
      } else {
        keys.v = head_rows(c.values, item.k_begin, item.k_len, heads, h, v);
      }
      const oracle::HeadResult result =
          oracle::attend_head(head_rows(c.q, item.q_begin, item.q_len, heads, h, p + rr), keys,
                              k_pe, visible, p, rr, v, scale_of(c));
      for (int64_t i = 0; i < item.q_len; ++i) {
        const int64_t row = (item.out_row + i) * heads + h;
        double prefix = c.prefix_out.empty() ? -HUGE_VAL : double{c.prefix_lse[row]};
        if (prefix == HUGE_VAL) prefix = -HUGE_VAL;
        const double own = result.lse[i];
        const double high = std::max(prefix, own);
        double lse = high;
        if (high > -HUGE_VAL) lse += std::log(std::exp(prefix - high) + std::exp(own - high));
        expected.lse[row] = lse;
        for (int64_t j = 0; j < v; ++j) {
          double value = 0.0;
          if (own > -HUGE_VAL) value += std::exp(own - lse) * result.out[i * v + j];
          if (prefix > -HUGE_VAL) value += std::exp(prefix - lse) * c.prefix_out[row * v + j];
          expected.out[row * v + j] = value;
        }
      }
    }
  }
  return expected;
}

void expect_attention(const Backend& backend, AttentionResult found, const AttentionCase& c) {
  const bool rounds_weights = backend.name() != "cpu";
  const double in_units = c.dtype == DType::kBFloat16 ? 1.0 : 0.125;  // fp16 has 3 bits more
  double tolerance = 1e-5;
  if (c.out_dtype != DType::kFloat32) tolerance = 2.5e-3 * in_units;
  if (rounds_weights) tolerance = (c.out_dtype == DType::kFloat32 ? 3e-3 : 4e-3) * in_units;

  const AttentionExpected expected = expected_attention(c);
  const std::vector<bool> covered = c.covered_rows();
  const int64_t heads = c.heads, v = c.v;
  for (int64_t row = 0; row < c.out_rows; ++row) {
    if (covered[row]) continue;
    std::fill_n(found.out.begin() + row * heads * v, heads * v, 0.0f);
    std::fill_n(found.lse.begin() + row * heads, heads, 0.0f);
  }
  EXPECT_LE(relative_error(found.out, expected.out), tolerance);
  for (int64_t row = 0; row < c.out_rows * heads; ++row) {
    const std::span<const float> values = std::span(found.out).subspan(row * v, v);
    const std::span<const double> exact = std::span(expected.out).subspan(row * v, v);
    // Infinite where a row that must be exactly 0 isn't.
    const double error = relative_error(values, exact);
    if (error > 3 * tolerance) {
      ADD_FAILURE() << "row " << row / heads << ", head " << row % heads << ": error " << error;
      break;
    }
  }
  if (!c.lse_wanted) return;
  EXPECT_LE(lse_error(found.lse, expected.lse), 1e-5);
}

bool supports(const Backend& backend, const AttentionCase& c) {
  if (backend.name() == "cpu") return true;
  const bool absorbed = c.layout == KeyLayout::kLatent;
  ModelDims dims{.num_heads = c.heads,
                 .qk_nope_head_dim = c.p,
                 .qk_rope_head_dim = c.rr,
                 .v_head_dim = c.v,
                 .kv_lora_rank = 512};
  if (absorbed) {  // the case's P and V are the model's L
    dims.kv_lora_rank = c.p;
    dims.qk_nope_head_dim = dims.v_head_dim = 128;
  }
  try {
    backend.attention_kernel(dims, c.dtype, absorbed ? Path::kAbsorb : Path::kExpand);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnsupported) return false;
    throw;
  }
  return true;
}

void AttentionTest::fill(AttentionCase& c, bool with_prefix) {
  c.fit_rows();
  const int64_t key_heads = c.layout == KeyLayout::kLatent ? 1 : c.heads;
  c.q = random_values(c.q_rows * c.heads * (c.p + c.rr), c.dtype);
  c.k_nope = random_values(c.k_rows * key_heads * c.p, c.dtype);
  c.k_pe = random_values(c.k_rows * c.rr, c.dtype);
  if (c.layout != KeyLayout::kLatent) {
    c.values = random_values(c.k_rows * c.heads * c.v, c.dtype);
  }
  if (!with_prefix) return;
  c.prefix_out = random_values(c.out_rows * c.heads * c.v, DType::kFloat32);
  c.prefix_lse = random_values(c.out_rows * c.heads, DType::kFloat32, 3.0);
  for (int64_t row = 0; row < c.out_rows * c.heads; ++row) {
    if (!random_chance(1.0 / 3)) continue;
    c.prefix_lse[row] = random_chance(0.5) ? HUGE_VALF : -HUGE_VALF;
    std::fill_n(c.prefix_out.begin() + row * c.v, c.v, std::numeric_limits<float>::quiet_NaN());
  }
}

OpContext AttentionTest::context_for(const AttentionCase& c, uint8_t poison) {
  const int64_t most = std::max({c.q_rows, c.k_rows, int64_t{1}}) + c.bound_slack;
  const size_t items =
      std::max<size_t>({c.items.size(), size_t{1}, static_cast<size_t>(c.items_capacity)});
  return op_context({.dims = {.num_heads = c.heads,
                              .qk_nope_head_dim = c.p,
                              .qk_rope_head_dim = std::max(c.rr, 8),
                              .v_head_dim = c.v,
                              .kv_lora_rank = 512},
                     .max_query_tokens = static_cast<int32_t>(most),
                     .max_rows = static_cast<int32_t>(most),
                     .max_requests = static_cast<int32_t>(items)},
                    poison);
}

}  // namespace mla::test
