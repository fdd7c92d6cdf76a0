// Products with kv_b_proj against float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "metadata/model.h"
#include "tests/oracle/oracle.h"
#include "tests/support/compare.h"
#include "tests/support/device_tensor.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

constexpr DType kBf16 = DType::kBFloat16;

const ModelDims kDims[] = {
    {.num_heads = 5,
     .qk_nope_head_dim = 128,
     .qk_rope_head_dim = 64,
     .v_head_dim = 128,
     .kv_lora_rank = 512},
    {.num_heads = 3,
     .qk_nope_head_dim = 192,
     .qk_rope_head_dim = 64,
     .v_head_dim = 256,
     .kv_lora_rank = 512},
    {.num_heads = 7,
     .qk_nope_head_dim = 24,
     .qk_rope_head_dim = 8,
     .v_head_dim = 40,
     .kv_lora_rank = 56},
};

class ExpandTest : public BackendTest {
 protected:
  static size_t weight_size(const ModelDims& dims) {
    return static_cast<size_t>(dims.num_heads) * dims.kv_head_dim() * dims.kv_lora_rank;
  }
  /// Of a size that makes each product about 1.
  std::vector<float> random_weight(const ModelDims& dims) {
    return random_values(weight_size(dims), kBf16, 1.0 / std::sqrt(dims.kv_lora_rank));
  }
  DeviceTensor weight_tensor(const ModelDims& dims, const std::vector<float>& weight) {
    return DeviceTensor(
        backend(), kBf16,
        {.rows = int64_t{dims.num_heads} * dims.kv_head_dim(), .dim = dims.kv_lora_rank}, weight);
  }
  OpContext context(const ModelDims& dims, int64_t rows) {
    return op_context({.dims = dims,
                       .max_query_tokens = static_cast<int32_t>(rows),
                       .max_rows = static_cast<int32_t>(rows),
                       .max_requests = 1});
  }
};

/// Each value is a float32 sum of `terms` products about 1 in all, rounded once: at most half a
/// bf16 unit in the last place from the exact value, and 1e-5 for the sum.
void expect_rounded_once(const std::vector<float>& found, const std::vector<double>& exact,
                         double relative) {
  ASSERT_EQ(found.size(), exact.size());
  int wrong = 0;
  for (size_t i = 0; i < found.size() && wrong < 4; ++i) {
    if (std::fabs(found[i] - exact[i]) <= relative * std::fabs(exact[i]) + 1e-5) continue;
    ++wrong;
    ADD_FAILURE() << "value " << i << " is " << found[i] << ", exactly " << exact[i];
  }
}
constexpr double kBf16HalfUnit = 1.0 / 256;

TEST_F(ExpandTest, ExpandsStridedLatentRows) {
  for (const ModelDims& dims : kDims) {
    const int64_t l = dims.kv_lora_rank;
    const int64_t columns = int64_t{dims.num_heads} * dims.kv_head_dim();
    const std::vector<float> weight = random_weight(dims);
    const DeviceTensor weights = weight_tensor(dims, weight);
    for (const int64_t rows : {1, 3, 64, 130}) {
      // The first L columns of rows that hold Rr more; NaN lies there and must not be read.
      const std::vector<float> latent = random_values(rows * l, kBf16);
      const DeviceTensor latents(backend(), kBf16,
                                 {.rows = rows, .dim = l, .row_stride = dims.latent_dim()}, latent);
      const DeviceTensor expanded(backend(), kBf16,
                                  {.rows = rows, .dim = columns, .row_stride = columns + 16});
      backend().expand({.dims = dims,
                        .latent = latents.const_rows(),
                        .kv_b_proj = weights.const_rows().data,
                        .expanded = expanded.rows(),
                        .num_rows = {rows}},
                       context(dims, rows));
      std::vector<double> exact(rows * columns);
      for (int64_t h = 0; h < dims.num_heads; ++h) {
        const oracle::HeadKeys keys =
            oracle::expand_head(latent,
                                {weight.data() + h * dims.kv_head_dim() * l,
                                 static_cast<size_t>(dims.kv_head_dim() * l)},
                                dims.qk_nope_head_dim, dims.v_head_dim, l, /*round=*/false);
        for (int64_t r = 0; r < rows; ++r) {
          double* row = exact.data() + r * columns + h * dims.kv_head_dim();
          std::copy_n(keys.k_nope.begin() + r * dims.qk_nope_head_dim, dims.qk_nope_head_dim, row);
          std::copy_n(keys.v.begin() + r * dims.v_head_dim, dims.v_head_dim,
                      row + dims.qk_nope_head_dim);
        }
      }
      expect_rounded_once(expanded.download(), exact, kBf16HalfUnit);
      EXPECT_TRUE(expanded.padding_is_poison());
    }
  }
}

TEST_F(ExpandTest, ARowsBitsDoNotDependOnTheOthers) {
  for (const ModelDims& dims : kDims) {
    const int64_t columns = int64_t{dims.num_heads} * dims.kv_head_dim();
    constexpr int64_t kRows = 150;
    const std::vector<float> weight = random_weight(dims);
    const DeviceTensor weights = weight_tensor(dims, weight);
    const DeviceTensor latents(backend(), kBf16, {.rows = kRows, .dim = dims.kv_lora_rank},
                               random_values(kRows * dims.kv_lora_rank, kBf16));
    const auto expand = [&](int64_t first, int64_t rows, int32_t actual) {
      const DeviceTensor expanded(backend(), kBf16, {.rows = rows, .dim = columns});
      const DeviceArray<int32_t> count(backend(), std::vector<int32_t>{actual});
      backend().expand({.dims = dims,
                        .latent = latents.const_rows(first * dims.kv_lora_rank),
                        .kv_b_proj = weights.const_rows().data,
                        .expanded = expanded.rows(),
                        .num_rows = {rows, actual < 0 ? nullptr : count.data()}},
                       context(dims, rows));
      return expanded.download();
    };
    const std::vector<float> all = expand(0, kRows, -1);
    for (const int64_t rows : {1, 2, 7, 64, 65, 128}) {
      const int64_t first = random_int(0, static_cast<int32_t>(kRows - rows));
      EXPECT_TRUE(same_bits(expand(first, rows, -1),
                            std::span(all).subspan(first * columns, rows * columns)))
          << rows << " rows from " << first;
    }
    // A captured launch of 150 rows that serves 61.
    const std::vector<float> some = expand(0, kRows, 61);
    EXPECT_TRUE(same_bits(std::span(some).first(61 * columns), std::span(all).first(61 * columns)));
  }
}

TEST_F(ExpandTest, AbsorbsQueries) {
  for (const ModelDims& dims : kDims) {
    const int64_t p = dims.qk_nope_head_dim, rr = dims.qk_rope_head_dim, l = dims.kv_lora_rank;
    const int64_t heads = dims.num_heads;
    const std::vector<float> weight = random_weight(dims);
    const DeviceTensor weights = weight_tensor(dims, weight);
    for (const int64_t rows : {1, 9, 70}) {
      const std::vector<float> q = random_values(rows * heads * (p + rr), kBf16);
      const DeviceTensor queries(backend(), kBf16,
                                 {.rows = rows,
                                  .heads = heads,
                                  .dim = p + rr,
                                  .row_stride = heads * (p + rr + 8) + 16,
                                  .head_stride = p + rr + 8},
                                 q);
      std::vector<double> exact;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t h = 0; h < heads; ++h) {
          const float* query = q.data() + (r * heads + h) * (p + rr);
          const float* w_uk = weight.data() + h * dims.kv_head_dim() * l;
          std::vector<double> sums(l);
          for (int64_t i = 0; i < p; ++i) {
            for (int64_t c = 0; c < l; ++c) sums[c] += double{query[i]} * w_uk[i * l + c];
          }
          exact.insert(exact.end(), sums.begin(), sums.end());
          exact.insert(exact.end(), query + p, query + p + rr);
        }
      }
      for (const DType dtype : {kBf16, DType::kFloat32}) {
        if (dtype != kBf16 && !backend().supports_path(dims, Path::kAbsorb)) continue;
        const DeviceTensor absorbed(
            backend(), dtype,
            {.rows = rows, .heads = heads, .dim = l + rr, .row_stride = heads * (l + rr) + 24});
        backend().absorb_query({.dims = dims,
                                .q = queries.const_heads(),
                                .kv_b_proj = weights.const_rows().data,
                                .absorbed = absorbed.heads(),
                                .num_rows = {rows}},
                               context(dims, rows));
        const std::vector<float> found = absorbed.download();
        expect_rounded_once(found, exact, dtype == kBf16 ? kBf16HalfUnit : 1e-5);
        for (int64_t row = 0; row < rows * heads; ++row) {  // RoPE values are copied
          EXPECT_TRUE(same_bits(std::span(found).subspan(row * (l + rr) + l, rr),
                                std::span(q).subspan(row * (p + rr) + p, rr)));
        }
        EXPECT_TRUE(absorbed.padding_is_poison());
      }
    }
  }
}

TEST_F(ExpandTest, ProjectsValues) {
  for (const ModelDims& dims : kDims) {
    const int64_t v = dims.v_head_dim, l = dims.kv_lora_rank, heads = dims.num_heads;
    const std::vector<float> weight = random_weight(dims);
    const DeviceTensor weights = weight_tensor(dims, weight);
    for (const int64_t rows : {1, 9, 70}) {
      const std::vector<float> latent = random_values(rows * heads * l, DType::kFloat32);
      const DeviceTensor latents(
          backend(), DType::kFloat32,
          {.rows = rows, .heads = heads, .dim = l, .row_stride = heads * l + 8}, latent);
      const DeviceTensor values(backend(), DType::kFloat32,
                                {.rows = rows,
                                 .heads = heads,
                                 .dim = v,
                                 .row_stride = heads * (v + 8),
                                 .head_stride = v + 8});
      backend().project_value({.dims = dims,
                               .latent_out = latents.const_heads(),
                               .kv_b_proj = weights.const_rows().data,
                               .values = values.heads(),
                               .num_rows = {rows}},
                              context(dims, rows));
      std::vector<double> exact;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t h = 0; h < heads; ++h) {
          const float* row = latent.data() + (r * heads + h) * l;
          const float* w_uv = weight.data() + (h * dims.kv_head_dim() + dims.qk_nope_head_dim) * l;
          for (int64_t i = 0; i < v; ++i) {
            double sum = 0.0;
            for (int64_t c = 0; c < l; ++c) sum += double{row[c]} * w_uv[i * l + c];
            exact.push_back(sum);
          }
        }
      }
      // A GPU may take the float32 input in bf16 parts; two of them leave 2^-16.
      expect_rounded_once(values.download(), exact, 1e-5);
      EXPECT_TRUE(values.padding_is_poison());
    }
  }
}

TEST_F(ExpandTest, RefusesBadParams) {
  const ModelDims dims = kDims[2];
  const int64_t columns = int64_t{dims.num_heads} * dims.kv_head_dim();
  const DeviceTensor weights = weight_tensor(dims, random_weight(dims));
  const DeviceTensor latents(backend(), kBf16, {.rows = 4, .dim = dims.kv_lora_rank},
                             random_values(4 * dims.kv_lora_rank, kBf16));
  const DeviceTensor expanded(backend(), kBf16, {.rows = 4, .dim = columns});
  const std::vector<std::byte> before = expanded.image();
  const ExpandParams good{.dims = dims,
                          .latent = latents.const_rows(),
                          .kv_b_proj = weights.const_rows().data,
                          .expanded = expanded.rows(),
                          .num_rows = {4}};
  const auto refuse = [&](const std::string& what, const auto& spoil) {
    ExpandParams params = good;
    spoil(params);
    expect_refused([&] { backend().expand(params, context(dims, 4)); }, what);
  };
  refuse("no heads", [](ExpandParams& p) { p.dims.num_heads = 0; });
  refuse("dim 20", [](ExpandParams& p) { p.dims.v_head_dim = 20; });
  refuse("negative rows", [](ExpandParams& p) { p.num_rows.capacity = -1; });
  refuse("no latent", [](ExpandParams& p) { p.latent.data = nullptr; });
  refuse("no weight", [](ExpandParams& p) { p.kv_b_proj = nullptr; });
  refuse("no output", [](ExpandParams& p) { p.expanded.data = nullptr; });
  refuse("float32 latent", [](ExpandParams& p) { p.latent.dtype = DType::kFloat32; });
  refuse("fp16 output", [](ExpandParams& p) { p.expanded.dtype = DType::kFloat16; });
  refuse("narrow latent", [](ExpandParams& p) { p.latent.row_stride = 8; });
  refuse("overlapping output", [](ExpandParams& p) { p.expanded.row_stride -= 8; });
  backend().synchronize({});
  EXPECT_TRUE(same_bits(expanded.image(), before));

  const auto refuse_absorb = [&](const std::string& what, const auto& spoil) {
    AbsorbQueryParams params;
    params.dims = dims;
    params.q = {latents.const_rows().data, kBf16, 8, 0};
    params.kv_b_proj = weights.const_rows().data;
    params.absorbed = {expanded.rows().data, kBf16, columns, dims.latent_dim()};
    params.num_rows = {1};
    spoil(params);
    expect_refused([&] { backend().absorb_query(params, context(dims, 1)); }, what);
  };
  refuse_absorb("no q", [](AbsorbQueryParams& p) { p.q.data = nullptr; });
  refuse_absorb("no weight", [](AbsorbQueryParams& p) { p.kv_b_proj = nullptr; });
  refuse_absorb("no output", [](AbsorbQueryParams& p) { p.absorbed.data = nullptr; });
  refuse_absorb("float32 q", [](AbsorbQueryParams& p) { p.q.dtype = DType::kFloat32; });
  refuse_absorb("negative rows", [](AbsorbQueryParams& p) { p.num_rows.capacity = -1; });

  const auto refuse_project = [&](const std::string& what, const auto& spoil) {
    ProjectValueParams params;
    params.dims = dims;
    params.latent_out = {latents.const_rows().data, DType::kFloat32, 8, 0};
    params.kv_b_proj = weights.const_rows().data;
    params.values = {expanded.rows().data, DType::kFloat32, columns / 2, dims.v_head_dim};
    params.num_rows = {1};
    spoil(params);
    expect_refused([&] { backend().project_value(params, context(dims, 1)); }, what);
  };
  refuse_project("no input", [](ProjectValueParams& p) { p.latent_out.data = nullptr; });
  refuse_project("no weight", [](ProjectValueParams& p) { p.kv_b_proj = nullptr; });
  refuse_project("no output", [](ProjectValueParams& p) { p.values.data = nullptr; });
  refuse_project("bf16 input", [](ProjectValueParams& p) { p.latent_out.dtype = kBf16; });
  refuse_project("negative rows", [](ProjectValueParams& p) { p.num_rows.capacity = -1; });
  backend().synchronize({});
  EXPECT_TRUE(same_bits(expanded.image(), before));
}

}  // namespace
}  // namespace mla::test
