// merge_attn_states over the grid that other engines test, and over more than 2^32 elements.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/kernels/merge_harness.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

struct Types {
  DType prefix, suffix, output;
};
constexpr Types kTypes[] = {
    {DType::kFloat32, DType::kFloat32, DType::kFloat32},
    {DType::kFloat16, DType::kFloat16, DType::kFloat16},
    {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16},
    {DType::kFloat32, DType::kBFloat16, DType::kBFloat16},  // the running partial's last merge
};

class MergeGridTest : public BackendTest {
 protected:
  /// Random values are drawn once; tensors take them from a random place on.
  std::vector<float> values(int64_t count, const std::vector<float>& pool) {
    std::vector<float> result(count);
    size_t from = random_int(0, static_cast<int32_t>(pool.size()) - 1);
    for (float& value : result) {
      value = pool[from];
      if (++from == pool.size()) from = 0;
    }
    return result;
  }
};

// Every triple of tokens, heads and dims; the CPU takes one combination of types for each, so that
// every pair meets every combination.
TEST_F(MergeGridTest, TokensHeadsDimsAndTypes) {
  constexpr int64_t kTokens[] = {256, 512, 613, 1024, 1536, 4096};
  constexpr int64_t kHeads[] = {4, 8, 16, 32, 48, 64};
  constexpr int64_t kDims[] = {32, 48, 64, 96, 128, 256};
  std::vector<std::vector<float>> pools;
  for (const Types& types : kTypes) {
    pools.push_back(random_values(99'991, types.prefix));
    pools.push_back(random_values(99'991, types.suffix));
  }
  std::vector<float> lse_pool = random_values(9'973, DType::kFloat32, 3.0);
  for (float& lse : lse_pool) {
    if (random_chance(0.1)) lse = kInf;
  }
  const OpContext context = op_context({.dims = {.num_heads = 64,
                                                 .qk_nope_head_dim = 128,
                                                 .qk_rope_head_dim = 64,
                                                 .v_head_dim = 256,
                                                 .kv_lora_rank = 512},
                                        .max_query_tokens = 4096,
                                        .max_rows = 4096,
                                        .max_requests = 1});
  int cell = 0;
  for (int t = 0; t < 6; ++t) {
    for (int h = 0; h < 6; ++h) {
      for (int d = 0; d < 6; ++d) {
        for (int types = 0; types < 4; ++types) {
          if (on_cpu() && types != (t + h + d) % 4) continue;
          MergeCase m{.tokens = kTokens[t], .heads = kHeads[h], .dim = kDims[d]};
          m.prefix.dtype = kTypes[types].prefix;
          m.suffix.dtype = kTypes[types].suffix;
          m.output.dtype = kTypes[types].output;
          const int64_t rows = m.tokens * m.heads;
          m.prefix_out = values(rows * m.dim, pools[2 * types]);
          m.suffix_out = values(rows * m.dim, pools[2 * types + 1]);
          m.prefix_lse = values(rows, lse_pool);
          m.suffix_lse = values(rows, lse_pool);
          SCOPED_TRACE(std::to_string(m.tokens) + " x " + std::to_string(m.heads) + " x " +
                       std::to_string(m.dim) + ", types " + std::to_string(types));
          expect_merged(run_merge(backend(), context, m), m);
          if (HasFailure()) return;
          ++cell;
        }
      }
    }
  }
  EXPECT_EQ(cell, on_cpu() ? 216 : 864);
}

// 262,152 x 128 x 128 is 2^32 + 131,072 elements: marker rows past 2^32 would fall on rows 0 to 7.
TEST_F(MergeGridTest, MoreThan32BitsOfElements) {
  if (on_cpu()) GTEST_SKIP() << "24 GiB; merge_test has the CPU's case";
  constexpr int64_t kTokens = 262'152, kHeads = 128, kDim = 128, kRow = kHeads * kDim;
  constexpr int64_t kMarked = 262'144;
  const size_t bytes = kTokens * kRow * sizeof(uint16_t);
  const DeviceBuffer prefix(backend(), bytes), suffix(backend(), bytes), output(backend(), bytes);
  const DeviceBuffer lse(backend(), kTokens * kHeads * sizeof(float));
  const DeviceBuffer output_lse(backend(), lse.bytes());
  const auto view = [](const DeviceBuffer& buffer) {
    return HeadRows{buffer.data(), DType::kBFloat16, kRow, kDim};
  };
  const auto lse_view = [](const DeviceBuffer& buffer) {
    return Lse{static_cast<float*>(buffer.data()), kTokens, 1};
  };
  const auto row_address = [](const DeviceBuffer& buffer, int64_t row) {
    return static_cast<uint16_t*>(buffer.data()) + row * kRow;
  };
  backend().fill_bytes(prefix.data(), 0, bytes, {});
  backend().fill_bytes(suffix.data(), 0, bytes, {});
  backend().fill_bytes(output.data(), kPoison, bytes, {});
  backend().fill_bytes(lse.data(), 0, lse.bytes(), {});  // equal weights
  const auto bf16 = [](int64_t integer) {                // exact up to 256
    const float value = static_cast<float>(integer);
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint16_t>(bits >> 16);
  };
  for (int64_t i = 0; i < 8; ++i) {
    for (const int64_t row : {i, kMarked + i}) {
      const int64_t mark = row < 8 ? 2 * i + 2 : 100 + 2 * i;
      const std::vector<uint16_t> values(kRow, bf16(mark));
      backend().copy_to_device(row_address(prefix, row), values.data(), kRow * 2, {});
      backend().synchronize({});
    }
  }
  backend().merge_attn_states({.num_heads = kHeads,
                               .head_dim = kDim,
                               .num_tokens = {kTokens},
                               .prefix_out = as_const(view(prefix)),
                               .prefix_lse = as_const(lse_view(lse)),
                               .suffix_out = as_const(view(suffix)),
                               .suffix_lse = as_const(lse_view(lse)),
                               .output = view(output),
                               .output_lse = lse_view(output_lse)},
                              op_context());
  for (int64_t i = 0; i < 8; ++i) {
    for (const int64_t row : {i, kMarked + i, int64_t{131'072} + i}) {
      const int64_t half = row < 8 ? i + 1 : row >= kMarked ? 50 + i : 0;
      std::vector<uint16_t> found(kRow);
      backend().copy_to_host(found.data(), row_address(output, row), kRow * 2, {});
      backend().synchronize({});
      EXPECT_EQ(found, std::vector<uint16_t>(kRow, bf16(half))) << "row " << row;
    }
  }
}

}  // namespace
}  // namespace mla::test
