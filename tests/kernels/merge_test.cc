// merge_attn_states and clear_partial: the algebra's corners, layouts and refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/convert.h"
#include "tests/kernels/merge_harness.h"
#include "tests/support/compare.h"
#include "tests/support/sparse_memory.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

class MergeTest : public BackendTest {
 protected:
  /// Values and LSEs, of which a tenth on each side says "no keys", half of those by +inf; the
  /// values beside such an LSE are NaN.
  void fill(MergeCase& m, double empty_fraction = 0.1) {
    const auto side = [&](std::vector<float>& out, std::vector<float>& lse, DType dtype) {
      out = random_values(m.tokens * m.heads * m.dim, dtype);
      lse = random_values(m.tokens * m.heads, DType::kFloat32, 3.0);
      for (int64_t row = 0; row < m.tokens * m.heads; ++row) {
        if (!random_chance(empty_fraction)) continue;
        lse[row] = random_chance(0.5) ? kInf : -kInf;
        std::fill_n(out.begin() + row * m.dim, m.dim, kNaN);
      }
    };
    side(m.prefix_out, m.prefix_lse, m.prefix.dtype);
    side(m.suffix_out, m.suffix_lse, m.suffix.dtype);
  }

  Merged merge(const MergeCase& m, InPlace in_place = InPlace::kNo) {
    return run_merge(backend(), op_context(), m, in_place);
  }

  /// One token, one head: every value of a side is the same.
  Merged merge_one(DType dtype, float prefix, float prefix_lse, float suffix, float suffix_lse) {
    MergeCase m{.tokens = 1, .heads = 1, .dim = 24};
    m.prefix.dtype = m.suffix.dtype = m.output.dtype = dtype;
    m.prefix_out.assign(24, prefix);
    m.prefix_lse = {prefix_lse};
    m.suffix_out.assign(24, suffix);
    m.suffix_lse = {suffix_lse};
    return merge(m);
  }
};

TEST_F(MergeTest, BothSidesEmptyGiveExactlyZero) {
  for (const DType dtype : kFloatTypes) {
    for (const float p : {kInf, -kInf}) {
      for (const float s : {kInf, -kInf}) {
        const Merged found = merge_one(dtype, kNaN, p, kNaN, s);
        EXPECT_TRUE(same_bits(found.out, std::vector<float>(24, 0.0f)));
        EXPECT_EQ(found.lse[0], -kInf);
      }
    }
  }
}

TEST_F(MergeTest, AnEmptySideLeavesTheOtherBitForBit) {
  for (const DType dtype : kFloatTypes) {
    const float x = round_to_dtype(1.0 / 3.0, dtype);
    for (const float empty : {kInf, -kInf}) {
      for (const float lse : {1.0f, -0.0f, -1e30f, 3e38f}) {
        const Merged left = merge_one(dtype, x, lse, kNaN, empty);
        const Merged right = merge_one(dtype, kNaN, empty, x, lse);
        EXPECT_TRUE(same_bits(left.out, std::vector<float>(24, x)));
        EXPECT_TRUE(same_bits(right.out, std::vector<float>(24, x)));
        EXPECT_EQ(left.lse[0], lse);
        EXPECT_EQ(right.lse[0], lse);
      }
    }
  }
}

TEST_F(MergeTest, LargeLogarithmsKeepTheirDifference) {
  const Merged found = merge_one(DType::kFloat32, 0.0f, 1000.0f, 1.0f, 999.0f);
  EXPECT_NEAR(found.out[0], 0.268941, 1e-6);
  EXPECT_NEAR(found.lse[0], 1000.313262, 6.2e-5);  // float32 steps by 6.1e-5 there
}

TEST_F(MergeTest, ASideTooSmallToCountIsNotRead) {
  const Merged found = merge_one(DType::kFloat32, kNaN, -200.0f, 5.0f, 0.0f);
  EXPECT_EQ(found.out[0], 5.0f);
  EXPECT_EQ(found.lse[0], 0.0f);
}

TEST_F(MergeTest, ANaNLogarithmPropagates) {
  for (const float other : {0.5f, -kInf, kInf, kNaN}) {
    for (const bool prefix : {true, false}) {
      const Merged found = prefix ? merge_one(DType::kFloat32, 1.0f, kNaN, 2.0f, other)
                                  : merge_one(DType::kFloat32, 2.0f, other, 1.0f, kNaN);
      EXPECT_TRUE(std::isnan(found.lse[0])) << other << prefix;
      for (const float value : found.out) EXPECT_TRUE(std::isnan(value)) << other << prefix;
    }
  }
}

TEST_F(MergeTest, EveryCombinationOfTypes) {
  for (const DType prefix : kFloatTypes) {
    for (const DType suffix : kFloatTypes) {
      for (const DType output : kFloatTypes) {
        MergeCase m{.tokens = 37, .heads = 5, .dim = 40};
        m.prefix.dtype = prefix;
        m.suffix.dtype = suffix;
        m.output.dtype = output;
        fill(m);
        expect_merged(merge(m), m);
      }
    }
  }
}

// The three tensors as they come from different kernels: a suffix padded to heads of 192, a prefix
// of 128, rows that are wider than their heads, heads-first tensors, both layouts of the LSE.
TEST_F(MergeTest, EveryTensorHasItsOwnStrides) {
  constexpr int64_t kTokens = 9, kHeads = 5, kDim = 128;
  const MergeLayout layouts[] = {
      {},
      {.row_stride = kHeads * 192, .head_stride = 192},
      {.row_stride = kHeads * kDim + 8},
      {.row_stride = kDim, .head_stride = kTokens * kDim, .lse_rows_first = true},
      {.row_stride = 3 * kHeads * kDim, .lse_rows_first = true}};
  for (const MergeLayout& prefix : layouts) {
    for (const MergeLayout& suffix : layouts) {
      for (const MergeLayout& output : layouts) {
        MergeCase m{.tokens = kTokens, .heads = kHeads, .dim = kDim};
        m.prefix = prefix;
        m.suffix = suffix;
        m.suffix.dtype = DType::kBFloat16;
        m.output = output;
        m.output.dtype = DType::kBFloat16;
        fill(m);
        expect_merged(merge(m), m);
      }
    }
  }
}

TEST_F(MergeTest, InPlaceGivesTheSameBits) {
  for (const DType dtype : kFloatTypes) {
    MergeCase m{.tokens = 65, .heads = 3, .dim = 72};
    m.prefix = m.suffix = m.output = {.dtype = dtype, .row_stride = 3 * 80, .head_stride = 80};
    fill(m);
    const Merged apart = merge(m);
    expect_merged(apart, m);
    for (const InPlace in_place : {InPlace::kPrefix, InPlace::kSuffix}) {
      const Merged found = merge(m, in_place);
      EXPECT_TRUE(same_bits(found.out, apart.out));
      EXPECT_TRUE(same_bits(found.lse, apart.lse));
    }
  }
}

TEST_F(MergeTest, RowsFromPrefixTokensOnHaveNoPrefix) {
  for (const int64_t prefix_tokens : {0, 1, 17, 32, 33, 40}) {
    MergeCase m{.tokens = 33, .heads = 4, .dim = 16};
    m.prefix_tokens = prefix_tokens;
    fill(m);
    // What lies there may be anything; a NaN lse would show.
    for (size_t row = prefix_tokens * m.heads; row < m.prefix_lse.size(); ++row) {
      m.prefix_lse[row] = kNaN;
    }
    expect_merged(merge(m), m);
  }
}

TEST_F(MergeTest, QuantisedOutputSaturates) {
  for (const float scale : {0.0037f, 0.25f, 1.0f}) {
    MergeCase m{.tokens = 50, .heads = 3, .dim = 24, .output_scale = scale};
    m.suffix.dtype = DType::kBFloat16;
    m.output.dtype = DType::kFloat8E4M3;
    fill(m);
    m.prefix_lse[0] = m.suffix_lse[0] = 0.0f;
    std::fill_n(m.prefix_out.begin(), 24, 4096.0f);
    std::fill_n(m.suffix_out.begin(), 24, 4096.0f);
    m.prefix_lse[1] = m.suffix_lse[1] = 0.0f;
    std::fill_n(m.prefix_out.begin() + 24, 24, -4096.0f);
    std::fill_n(m.suffix_out.begin() + 24, 24, -4096.0f);
    const Merged found = merge(m);
    expect_merged(found, m);
    EXPECT_EQ(found.out[0], 448.0f);
    EXPECT_EQ(found.out[24], -448.0f);
  }
}

TEST_F(MergeTest, TheActualCountLimitsTheRows) {
  for (const int32_t actual : {0, 1, 100, 130}) {
    MergeCase m{.tokens = 130, .heads = 3, .dim = 16, .actual_tokens = actual};
    fill(m);
    expect_merged(merge(m), m);
  }
}

TEST_F(MergeTest, MoreTokensThanALaunchHasRowsOfBlocks) {
  MergeCase m{.tokens = 70'000, .heads = 1, .dim = 8};
  fill(m);
  expect_merged(merge(m), m);
}

TEST_F(MergeTest, TheOutputLseIsOptional) {
  const DeviceTensor prefix(backend(), DType::kFloat32, {.rows = 1, .dim = 8},
                            std::vector<float>(8, 1.0f));
  const DeviceTensor suffix(backend(), DType::kFloat32, {.rows = 1, .dim = 8},
                            std::vector<float>(8, 3.0f));
  const DeviceTensor output(backend(), DType::kFloat32, {.rows = 1, .dim = 8});
  DeviceTensor lse = DeviceTensor::lse(backend(), 1, 1);
  lse.upload(std::vector<float>{0.0f});
  backend().merge_attn_states({.num_heads = 1,
                               .head_dim = 8,
                               .num_tokens = {1},
                               .prefix_out = prefix.const_heads(),
                               .prefix_lse = lse.const_lse(),
                               .suffix_out = suffix.const_heads(),
                               .suffix_lse = lse.const_lse(),
                               .output = output.heads(),
                               .output_lse = {}},
                              op_context());
  EXPECT_EQ(output.download(), std::vector<float>(8, 2.0f));
}

// Views whose rows lie 2^31 and more elements apart, over memory that is only backed where it is
// touched. In 32 bits the offsets of distinct rows fall together.
TEST_F(MergeTest, OffsetsHave64Bits) {
  if (!on_cpu()) GTEST_SKIP() << "host memory; merge_grid_test has the CUDA case";
  constexpr int64_t kTokens = 5, kHeads = 2, kDim = 8;
  constexpr int64_t kRowStride = (int64_t{1} << 31) + 64;  // elements
  constexpr int64_t kRow = kHeads * kDim;
  constexpr size_t kBytes = ((kTokens - 1) * kRowStride + kRow) * sizeof(uint16_t);
  const SparseMemory prefix(kBytes);
  const SparseMemory suffix(kBytes);
  const SparseMemory output(kBytes);
  if (!prefix.valid() || !suffix.valid() || !output.valid()) GTEST_SKIP() << "address space";
  const auto view = [](const SparseMemory& memory) {
    return HeadRows{memory.data(), DType::kBFloat16, kRowStride, kDim};
  };
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t i = 0; i < kRow; ++i) {
      prefix.at<uint16_t>(t * kRowStride)[i] = float_to_bf16(static_cast<float>(t + 1));
      suffix.at<uint16_t>(t * kRowStride)[i] = float_to_bf16(static_cast<float>(10 * (t + 1)));
    }
  }
  std::vector<float> lse(kTokens * kHeads, 0.0f);
  std::vector<float> output_lse(lse.size(), kNaN);
  const auto lse_view = [](std::vector<float>& values) { return Lse{values.data(), kTokens, 1}; };
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
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t i = 0; i < kRow; ++i) {
      ASSERT_EQ(bf16_to_float(output.at<uint16_t>(t * kRowStride)[i]),
                5.5f * static_cast<float>(t + 1))
          << t;
    }
  }
}

TEST_F(MergeTest, RefusesBadParams) {
  MergeCase m{.tokens = 4, .heads = 2, .dim = 16};
  fill(m, 0.0);
  const DeviceTensor::Shape shape{.rows = 4, .heads = 2, .dim = 16};
  const DeviceTensor prefix(backend(), DType::kFloat32, shape, m.prefix_out);
  const DeviceTensor suffix(backend(), DType::kFloat32, shape, m.suffix_out);
  const DeviceTensor output(backend(), DType::kFloat32, shape);
  DeviceTensor lse = DeviceTensor::lse(backend(), 4, 2);
  lse.upload(m.prefix_lse);
  const DeviceTensor output_lse = DeviceTensor::lse(backend(), 4, 2);
  const DeviceArray<float> scale(backend(), std::vector<float>{1.0f});
  const MergeAttnStatesParams good{.num_heads = 2,
                                   .head_dim = 16,
                                   .num_tokens = {4},
                                   .prefix_out = prefix.const_heads(),
                                   .prefix_lse = lse.const_lse(),
                                   .suffix_out = suffix.const_heads(),
                                   .suffix_lse = lse.const_lse(),
                                   .output = output.heads(),
                                   .output_lse = output_lse.lse()};
  const auto refuse = [&](const std::string& what, const auto& spoil) {
    MergeAttnStatesParams params = good;
    spoil(params);
    expect_refused([&] { backend().merge_attn_states(params, op_context()); }, what);
  };
  using Params = MergeAttnStatesParams;
  refuse("no heads", [](Params& p) { p.num_heads = 0; });
  refuse("negative heads", [](Params& p) { p.num_heads = -2; });
  refuse("dim 0", [](Params& p) { p.head_dim = 0; });
  refuse("dim 12", [](Params& p) { p.head_dim = 12; });
  refuse("negative tokens", [](Params& p) { p.num_tokens.capacity = -1; });
  refuse("no prefix", [](Params& p) { p.prefix_out.data = nullptr; });
  refuse("no prefix lse", [](Params& p) { p.prefix_lse.data = nullptr; });
  refuse("no suffix", [](Params& p) { p.suffix_out.data = nullptr; });
  refuse("no suffix lse", [](Params& p) { p.suffix_lse.data = nullptr; });
  refuse("no output", [](Params& p) { p.output.data = nullptr; });
  refuse("e4m3 prefix", [](Params& p) { p.prefix_out.dtype = DType::kFloat8E4M3; });
  refuse("e4m3 suffix", [](Params& p) { p.suffix_out.dtype = DType::kFloat8E4M3; });
  refuse("e4m3 without scale", [](Params& p) { p.output.dtype = DType::kFloat8E4M3; });
  refuse("scale without e4m3", [&](Params& p) { p.output_scale = scale.data(); });
  refuse("in place, other strides", [&](Params& p) {
    p.output = HeadRows{const_cast<void*>(p.prefix_out.data), DType::kFloat32, 16, 64};
  });
  refuse("overlapping heads", [](Params& p) { p.output.head_stride = 8; });
  refuse("overlapping rows", [](Params& p) { p.output.row_stride = 16; });
  EXPECT_TRUE(
      same_bits(output.download(), DeviceTensor(backend(), DType::kFloat32, shape).download()));
  EXPECT_TRUE(same_bits(output_lse.download(), DeviceTensor::lse(backend(), 4, 2).download()));

  backend().merge_attn_states(good, op_context());  // what they were spoiled from is right
  m.output.dtype = DType::kFloat32;
  m.suffix_lse = m.prefix_lse;
  expect_merged({output.download(), output_lse.download()}, m);
}

TEST_F(MergeTest, ClearPartialEmptiesTheRowsOfTheStepAlone) {
  for (const bool rows_first : {false, true}) {
    for (const int32_t actual : {0, 1, 77, 90}) {
      constexpr int64_t kCapacity = 90, kHeads = 5;
      DeviceTensor lse = DeviceTensor::lse(backend(), 100, kHeads, rows_first);
      const std::vector<float> before = random_values(100 * kHeads, DType::kFloat32);
      lse.upload(before);
      const DeviceArray<int32_t> count(backend(), std::vector<int32_t>{actual});
      backend().clear_partial(
          {.num_heads = kHeads, .num_tokens = {kCapacity, count.data()}, .lse = lse.lse()},
          op_context());
      std::vector<float> expected = before;
      std::fill_n(expected.begin(), actual * kHeads, -kInf);
      EXPECT_TRUE(same_bits(lse.download(), expected));
      EXPECT_TRUE(lse.padding_is_poison());
    }
  }
  const DeviceTensor lse = DeviceTensor::lse(backend(), 4, 2);
  const ClearPartialParams good{.num_heads = 2, .num_tokens = {4}, .lse = lse.lse()};
  const auto refuse = [&](const std::string& what, const auto& spoil) {
    ClearPartialParams params = good;
    spoil(params);
    expect_refused([&] { backend().clear_partial(params, op_context()); }, what);
  };
  refuse("no heads", [](ClearPartialParams& p) { p.num_heads = 0; });
  refuse("negative tokens", [](ClearPartialParams& p) { p.num_tokens.capacity = -4; });
  refuse("no lse", [](ClearPartialParams& p) { p.lse.data = nullptr; });
  EXPECT_TRUE(same_bits(lse.download(), DeviceTensor::lse(backend(), 4, 2).download()));
}

}  // namespace
}  // namespace mla::test
