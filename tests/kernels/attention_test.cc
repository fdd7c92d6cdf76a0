// prefill_attention: what its contract says beside being right (attention_grid_test).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/convert.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/kernels/attention_harness.h"
#include "tests/support/compare.h"
#include "tests/support/device_tensor.h"
#include "tests/support/sparse_memory.h"

namespace mla::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();

/// A chunk with a request that has no keys in it, a causal item behind a context, and one whose
/// first rows see nothing. Lengths fit no tile; rows of q, keys and output lie apart.
std::vector<AttentionItem> uneven_items() {
  return {
      {.q_begin = 0, .q_len = 19, .k_begin = 3, .k_len = 70, .out_row = 40},
      {.q_begin = 19, .q_len = 5, .k_begin = 73, .k_len = 0, .out_row = 30},
      {.q_begin = 26, .q_len = 33, .k_begin = 75, .k_len = 90, .causal_offset = 57, .out_row = 60},
      {.q_begin = 60, .q_len = 12, .k_begin = 10, .k_len = 8, .causal_offset = -4, .out_row = 1}};
}

/// With items of many query tiles, and with few queries before many keys, which a kernel may split.
std::vector<AttentionItem> long_items() {
  std::vector<AttentionItem> items = uneven_items();
  items.push_back({.q_begin = 72, .q_len = 270, .k_len = 165, .causal_offset = 9, .out_row = 100});
  items.push_back({.q_begin = 342, .q_len = 3, .k_begin = 7, .k_len = 2600, .out_row = 372});
  items.push_back(
      {.q_begin = 345, .q_len = 70, .k_len = 1400, .causal_offset = 1330, .out_row = 375});
  return items;
}

std::span<const float> row_of(const std::vector<float>& values, int64_t row, int64_t size) {
  return std::span(values).subspan(row * size, size);
}

// q = 0 weighs all visible keys alike: LSE = ln(count), out = their mean value.
TEST_F(AttentionTest, ZeroQueriesAverageTheVisibleValues) {
  AttentionCase c{.heads = 3, .out_dtype = DType::kFloat32};
  c.items = {{.q_len = 64, .k_len = 310, .causal_offset = 246},
             {.q_begin = 64, .q_len = 9, .k_begin = 310, .k_len = 75, .out_row = 64}};
  fill(c);
  std::ranges::fill(c.q, 0.0f);
  // Values of 1 in the first 246 keys, 0 in the rest: a mean that is known in closed form.
  for (int64_t k = 0; k < c.k_rows; ++k) {
    std::fill_n(c.values.begin() + k * 3 * 128, 3 * 128, k < 246 ? 1.0f : 0.0f);
  }
  const AttentionResult found = run(c);
  for (int64_t i = 0; i < 64; ++i) {
    const float count = static_cast<float>(247 + i);
    EXPECT_NEAR(found.lse[i * 3], std::log(count), 2e-6);
    // Equal weights are exp(0) = 1, which no rounding of weights changes.
    EXPECT_NEAR(found.out[i * 3 * 128], 246.0f / count, 2e-6);
  }
  for (int64_t i = 64; i < 73; ++i) {
    EXPECT_NEAR(found.lse[i * 3 + 2], std::log(75.0), 2e-6);
    EXPECT_EQ(found.out[i * 3 * 128], 0.0f);
  }
}

TEST_F(AttentionTest, RowsWithoutKeysAreExactlyEmpty) {
  for (const DType out_dtype : {DType::kFloat32, DType::kBFloat16}) {
    AttentionCase c{.heads = 5, .out_dtype = out_dtype};
    c.items = {{.q_begin = 0, .q_len = 150, .k_len = 140, .causal_offset = -139},
               {.q_begin = 150, .q_len = 7, .k_begin = 140, .k_len = 0, .out_row = 150},
               {.q_begin = 157, .q_len = 5, .k_len = 9, .causal_offset = kLeast, .out_row = 157},
               {.q_begin = 162, .q_len = 3, .k_len = 0, .causal_offset = 0, .out_row = 162}};
    fill(c);
    const AttentionResult found = run(c);
    for (int64_t row = 0; row < 165; ++row) {
      if (row >= 139 && row < 150) continue;  // these 11 rows see 1 to 11 keys
      EXPECT_TRUE(same_bits(row_of(found.out, row, 5 * 128), std::vector<float>(5 * 128, 0.0f)));
      EXPECT_TRUE(same_bits(row_of(found.lse, row, 5), std::vector<float>(5, -kInf))) << row;
    }
    expect_attention(backend(), found, c);
  }
}

TEST_F(AttentionTest, ALaunchInWhichNoRowHasKeys) {
  AttentionCase c{.heads = 2};
  c.items = {{.q_len = 70, .k_len = 0}};
  fill(c);
  check(c);
  c.items.clear();
  EXPECT_TRUE(c.covered_rows() == std::vector<bool>(70));
  run(c);  // expects nothing to be written
  c.items_capacity = 8;
  run(c);
}

TEST_F(AttentionTest, MergesAPrefix) {
  for (const bool in_place : {true, false}) {
    for (const DType out_dtype : {DType::kFloat32, DType::kBFloat16}) {
      if (in_place && out_dtype != DType::kFloat32) continue;
      AttentionCase c{.heads = 5, .out_dtype = out_dtype, .items = uneven_items()};
      c.prefix_in_place = in_place;
      fill(c, /*with_prefix=*/true);
      const AttentionResult found = run(c);
      expect_attention(backend(), found, c);
      if (out_dtype != DType::kFloat32) continue;
      for (int64_t row = 30 * 5; row < 35 * 5; ++row) {  // no keys: the prefix, bit for bit
        const bool empty = std::isinf(c.prefix_lse[row]);
        EXPECT_EQ(found.lse[row], empty ? -kInf : c.prefix_lse[row]);
        EXPECT_TRUE(same_bits(row_of(found.out, row, 128),
                              empty ? std::vector<float>(128, 0.0f)
                                    : std::vector<float>(c.prefix_out.begin() + row * 128,
                                                         c.prefix_out.begin() + row * 128 + 128)));
      }
    }
  }
}

TEST_F(AttentionTest, LayoutsOfTheLse) {
  AttentionCase c{.heads = 3, .items = uneven_items()};
  fill(c);
  const AttentionResult heads_first = run(c);
  expect_attention(backend(), heads_first, c);
  c.lse_rows_first = true;
  const AttentionResult rows_first = run(c);
  EXPECT_TRUE(same_bits(rows_first.lse, heads_first.lse));
  c.lse_wanted = false;
  EXPECT_TRUE(same_bits(run(c).out, heads_first.out));
}

// Rows of K and V between and behind the items' ranges belong to other requests or to nobody.
TEST_F(AttentionTest, KeysOutsideTheRangesReachNoResult) {
  for (const KeyLayout layout : {KeyLayout::kExpanded, KeyLayout::kSeparate}) {
    AttentionCase c{.heads = 5, .layout = layout, .items = uneven_items(), .k_rows = 300};
    fill(c);
    std::vector<bool> used(c.k_rows);
    for (const AttentionItem& item : c.items) {
      std::fill_n(used.begin() + item.k_begin, item.k_len, true);
    }
    for (int64_t k = 0; k < c.k_rows; ++k) {
      if (used[k]) continue;
      std::fill_n(c.k_nope.begin() + k * 5 * c.p, 5 * c.p, kNaN);
      std::fill_n(c.k_pe.begin() + k * c.rr, c.rr, random_chance(0.5) ? kNaN : kInf);
      std::fill_n(c.values.begin() + k * 5 * c.v, 5 * c.v, random_chance(0.5) ? kNaN : kInf);
    }
    check(c);
  }
}

/// NaN in keys [from, k_rows), for which all rows up to `last_row` must be as without it.
void poison_keys(AttentionCase& c, int64_t from) {
  std::fill(c.k_nope.begin() + from * c.heads * c.p, c.k_nope.end(), kNaN);
  std::fill(c.k_pe.begin() + from * c.rr, c.k_pe.end(), kNaN);
  std::fill(c.values.begin() + from * c.heads * c.v, c.values.end(), kNaN);
}

// What the header does not promise and the CPU backend keeps all the same.
constexpr const char* kHiddenKeys = "tensor cores multiply a hidden value of NaN by a weight of 0";

// Keys of the range that the mask hides from every row.
TEST_F(AttentionTest, KeysThatTheMaskHidesFromAllReachNoResult) {
  if (!on_cpu()) GTEST_SKIP() << kHiddenKeys;
  for (const int32_t offset : {0, 3, 60, 200}) {
    AttentionCase c{.heads = 3};
    c.items = {{.q_len = 37, .k_len = 300, .causal_offset = offset}};
    fill(c);
    poison_keys(c, 37 + offset);
    check(c);
  }
}

// A NaN in key 100 is the business of the rows that see it, and of no other.
TEST_F(AttentionTest, KeysThatTheMaskHidesFromARowDoNotReachIt) {
  if (!on_cpu()) GTEST_SKIP() << kHiddenKeys;
  AttentionCase c{.heads = 3};
  c.items = {{.q_len = 190, .k_len = 190, .causal_offset = 0}};
  fill(c);
  const AttentionResult clean = run(c);
  poison_keys(c, 100);
  const AttentionResult found = run(c);
  for (int64_t row = 0; row < 190; ++row) {
    if (row < 100) {
      EXPECT_TRUE(same_bits(row_of(found.out, row, 3 * 128), row_of(clean.out, row, 3 * 128)));
      EXPECT_TRUE(same_bits(row_of(found.lse, row, 3), row_of(clean.lse, row, 3))) << row;
    } else {
      EXPECT_TRUE(std::isnan(found.out[row * 3 * 128])) << row;
    }
  }
}

TEST_F(AttentionTest, RowsOfNoItemAreLeftAlone) {
  AttentionCase c{.heads = 2, .out_dtype = DType::kFloat32, .items = uneven_items()};
  c.q_rows = 90;
  c.out_rows = 120;
  fill(c, /*with_prefix=*/true);
  check(c);  // run_attention compares the uncovered rows
}

TEST_F(AttentionTest, OffsetsNearTheEndsOfInt32) {
  AttentionCase c{.heads = 1};
  c.items = {{.q_len = 5, .k_len = 40, .causal_offset = kMost - 1},
             {.q_begin = 5, .q_len = 5, .k_len = 40, .causal_offset = kLeast + 1, .out_row = 5},
             {.q_begin = 10, .q_len = 5, .k_len = 40, .causal_offset = 39, .out_row = 10}};
  fill(c);
  check(c);
}

TEST_F(AttentionTest, MoreItemsThanALaunchHasRowsOfBlocks) {
  AttentionCase c{.heads = 1};
  for (int32_t i = 0; i < 70'000; ++i) {
    c.items.push_back({.q_begin = i, .q_len = 1, .k_begin = i % 100, .k_len = i % 4, .out_row = i});
  }
  fill(c);
  check(c);
}

// Scores of hundreds: only the running maximum keeps exp finite, and one key often takes it all.
TEST_F(AttentionTest, LargeScores) {
  AttentionCase c{.heads = 2, .softmax_scale = 8.0f};
  c.items = {{.q_len = 70, .k_len = 530, .causal_offset = 460}};
  fill(c);
  check(c);
}

TEST_F(AttentionTest, SameBitsRunAfterRun) {
  AttentionCase c{.heads = 2, .out_dtype = DType::kFloat32, .items = long_items()};
  fill(c);
  const AttentionResult first = run(c);
  const AttentionResult second = run_attention(backend(), context_for(c, 0), c);
  EXPECT_TRUE(same_bits(first.out, second.out));
  EXPECT_TRUE(same_bits(first.lse, second.lse));
}

TEST_F(AttentionTest, ARowsBitsDependOnItsItemAlone) {
  AttentionCase c{.heads = 2, .out_dtype = DType::kFloat32, .items = long_items()};
  fill(c);
  const AttentionResult together = run(c);
  for (const AttentionItem& item : c.items) {
    AttentionCase alone = c;
    alone.items = {item};
    alone.items_capacity = 9;  // as a captured launch, sized for its class
    alone.bound_slack = 3000;
    const AttentionResult found = run(alone);
    for (int64_t row = item.out_row; row < item.out_row + item.q_len; ++row) {
      EXPECT_TRUE(same_bits(row_of(found.out, row, 2 * 128), row_of(together.out, row, 2 * 128)));
      EXPECT_TRUE(same_bits(row_of(found.lse, row, 2), row_of(together.lse, row, 2)));
    }
  }
}

TEST_F(AttentionTest, TheNumberOfWorkersDoesNotChangeBits) {
  if (!on_cpu()) GTEST_SKIP() << "of the CPU backend";
  AttentionCase c{.heads = 2, .items = long_items()};
  fill(c);
  const AttentionResult three = run(c);
  InlineExecutor executor;
  const std::unique_ptr<Backend> single = make_cpu_backend(executor);
  const AttentionResult one = run_attention(*single, context_for(c), c);
  EXPECT_TRUE(same_bits(three.out, one.out));
  EXPECT_TRUE(same_bits(three.lse, one.lse));
}

// Rows of every tensor lie more than 2^31 elements apart. Query i is 0, so out is the mean of the
// values, key k's being k + 1.
TEST_F(AttentionTest, OffsetsHave64Bits) {
  if (!on_cpu()) GTEST_SKIP() << "host memory";
  constexpr int64_t kRows = 3, kDim = 8;
  constexpr int64_t kRowStride = (int64_t{1} << 31) + 64;
  constexpr size_t kBytes = ((kRows - 1) * kRowStride + kDim) * sizeof(uint16_t);
  const SparseMemory zeros(kBytes);
  const SparseMemory values(kBytes);
  const SparseMemory out(2 * kBytes);
  if (!zeros.valid() || !values.valid() || !out.valid()) GTEST_SKIP() << "address space";
  for (int64_t k = 0; k < kRows; ++k) {
    std::fill_n(values.at<uint16_t>(k * kRowStride), kDim,
                float_to_bf16(static_cast<float>(k + 1)));
  }
  const std::vector<AttentionItem> items = {{.q_len = kRows, .k_len = kRows, .causal_offset = 0}};
  PrefillAttentionParams params;
  params.num_heads = 1;
  params.qk_nope_head_dim = kDim;
  params.v_head_dim = kDim;
  params.softmax_scale = 1.0f;
  params.q = {zeros.data(), DType::kBFloat16, kRowStride, kDim};
  params.k_nope = params.q;
  params.v = {values.data(), DType::kBFloat16, kRowStride, kDim};
  params.q_rows = kRows;
  params.k_rows = kRows;
  params.items = items.data();
  params.num_items = {1};
  params.max_q_len = kRows;
  params.max_k_len = kRows;
  params.out = {out.data(), DType::kFloat32, kRowStride, kDim};
  backend().prefill_attention(params, op_context());
  for (int64_t i = 0; i < kRows; ++i) {
    EXPECT_NEAR(*out.at<float>(i * kRowStride), 1.0f + 0.5f * static_cast<float>(i), 1e-6f);
  }
}

TEST_F(AttentionTest, RefusesBadParams) {
  constexpr DType kBf16 = DType::kBFloat16;
  const DeviceTensor q(backend(), kBf16, {.rows = 4, .heads = 2, .dim = 192},
                       random_values(4 * 2 * 192, kBf16));
  const DeviceTensor k(backend(), kBf16, {.rows = 6, .heads = 2, .dim = 256},
                       random_values(6 * 2 * 256, kBf16));
  const DeviceTensor k_pe(backend(), kBf16, {.rows = 6, .dim = 64}, random_values(6 * 64, kBf16));
  const DeviceTensor out(backend(), kBf16, {.rows = 4, .heads = 2, .dim = 128});
  const DeviceTensor lse = DeviceTensor::lse(backend(), 4, 2);
  const DeviceTensor prefix(backend(), DType::kFloat32, {.rows = 4, .heads = 2, .dim = 128});
  const std::vector<std::byte> out_before = out.image();
  const std::vector<std::byte> lse_before = lse.image();
  const DeviceArray<AttentionItem> items(backend(),
                                         std::vector<AttentionItem>{{.q_len = 4, .k_len = 6}});
  PrefillAttentionParams good;
  good.num_heads = 2;
  good.qk_nope_head_dim = 128;
  good.qk_rope_head_dim = 64;
  good.v_head_dim = 128;
  good.softmax_scale = 0.07f;
  good.q = q.const_heads();
  good.k_nope = k.const_heads();
  good.k_pe = k_pe.const_rows();
  good.v = k.const_heads(128);
  good.q_rows = 4;
  good.k_rows = 6;
  good.items = items.data();
  good.num_items = {1};
  good.max_q_len = 4;
  good.max_k_len = 6;
  good.out = out.heads();
  good.lse = lse.lse();
  const auto refuse = [&](const std::string& what, const auto& spoil) {
    PrefillAttentionParams params = good;
    spoil(params);
    expect_refused([&] { backend().prefill_attention(params, op_context()); }, what);
  };
  using Params = PrefillAttentionParams;
  refuse("no heads", [](Params& p) { p.num_heads = 0; });
  refuse("P = 0", [](Params& p) { p.qk_nope_head_dim = 0; });
  refuse("P = 100", [](Params& p) { p.qk_nope_head_dim = 100; });
  refuse("Rr = -8", [](Params& p) { p.qk_rope_head_dim = -8; });
  refuse("V = 0", [](Params& p) { p.v_head_dim = 0; });
  for (const float scale : {0.0f, -1.0f, kNaN, kInf}) {
    refuse("scale " + std::to_string(scale), [&](Params& p) { p.softmax_scale = scale; });
  }
  refuse("no q", [](Params& p) { p.q.data = nullptr; });
  refuse("no k_nope", [](Params& p) { p.k_nope.data = nullptr; });
  refuse("no k_pe", [](Params& p) { p.k_pe.data = nullptr; });
  refuse("no v", [](Params& p) { p.v.data = nullptr; });
  refuse("no out", [](Params& p) { p.out.data = nullptr; });
  refuse("no items", [](Params& p) { p.items = nullptr; });
  refuse("negative items", [](Params& p) { p.num_items.capacity = -1; });
  refuse("negative q rows", [](Params& p) { p.q_rows = -1; });
  refuse("negative k rows", [](Params& p) { p.k_rows = -1; });
  refuse("negative query length", [](Params& p) { p.max_q_len = -1; });
  refuse("negative key length", [](Params& p) { p.max_k_len = -1; });
  refuse("fp16 q over bf16 keys", [](Params& p) { p.q.dtype = DType::kFloat16; });
  refuse("fp16 v beside bf16", [](Params& p) { p.v.dtype = DType::kFloat16; });
  refuse("fp16 k_nope beside bf16", [](Params& p) { p.k_nope.dtype = DType::kFloat16; });
  refuse("fp16 k_pe beside bf16", [](Params& p) { p.k_pe.dtype = DType::kFloat16; });
  refuse("fp16 out beside bf16", [](Params& p) { p.out.dtype = DType::kFloat16; });
  refuse("e4m3 out", [](Params& p) { p.out.dtype = DType::kFloat8E4M3; });
  refuse("q stride of 388", [](Params& p) { p.q.row_stride = 388; });
  refuse("k_nope stride of 260", [](Params& p) { p.k_nope.head_stride = 260; });
  refuse("overlapping out", [](Params& p) { p.out.row_stride = 128; });
  const auto misalign = [](const void* data) { return static_cast<const std::byte*>(data) + 8; };
  refuse("q off by 8 bytes", [&](Params& p) { p.q.data = misalign(p.q.data); });
  refuse("k_nope off by 8 bytes", [&](Params& p) { p.k_nope.data = misalign(p.k_nope.data); });
  refuse("k_pe off by 8 bytes", [&](Params& p) { p.k_pe.data = misalign(p.k_pe.data); });
  refuse("v off by 8 bytes", [&](Params& p) { p.v.data = misalign(p.v.data); });
  refuse("prefix without lse", [&](Params& p) { p.prefix_out = prefix.const_heads(); });
  refuse("lse without prefix", [&](Params& p) { p.prefix_lse = lse.const_lse(); });
  refuse("bf16 prefix", [&](Params& p) {
    p.prefix_out = out.const_heads();
    p.prefix_lse = lse.const_lse();
  });
  backend().synchronize({});
  EXPECT_TRUE(same_bits(out.image(), out_before));
  EXPECT_TRUE(same_bits(lse.image(), lse_before));

  AttentionCase c{.heads = 2};
  c.items = {{.q_len = 4, .k_len = 6}};
  if (!supports(backend(), c)) return;
  backend().prefill_attention(good, op_context());  // what they were spoiled from is right
  for (const float value : out.download()) EXPECT_TRUE(std::isfinite(value));
}

}  // namespace
}  // namespace mla::test
