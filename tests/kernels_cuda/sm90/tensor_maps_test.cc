// The arguments of tensor maps; encoding them takes a driver.
#include "kernels/cuda/sm90/tensor_maps.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/cuda/sm90/tile_config.h"

namespace mla::sm90 {
namespace {

using Dims = std::array<uint64_t, 3>;
using Strides = std::array<uint64_t, 2>;
using Box = std::array<uint32_t, 3>;

TEST(TensorMapsTest, ViewsOfTheExpansionKeepItsStrides) {
  // k_nope and v of 16 heads of the expansion [rows, 16 * (128 + 128)].
  const std::vector<uint16_t> memory(256);
  const ConstHeadRows v{memory.data() + 128, DType::kBFloat16, 16 * 256, 256};
  const TensorMapSpec spec = head_rows_spec(v, 128, 16, 70000, 80);
  EXPECT_EQ(spec.data, memory.data() + 128);
  EXPECT_EQ(spec.rank, 3u);
  EXPECT_EQ(spec.dims, (Dims{128, 16, 70000}));
  EXPECT_EQ(spec.stride_bytes, (Strides{512, 8192}));
  EXPECT_EQ(spec.box, (Box{kPanelColumns, 1, 80}));
  EXPECT_EQ(head_step(v, 16), 1);
}

TEST(TensorMapsTest, StridesBeyond32BitsStay) {
  const std::vector<uint16_t> memory(8);
  const ConstHeadRows q{memory.data(), DType::kFloat16, int64_t{1} << 33, int64_t{1} << 32};
  const TensorMapSpec spec = head_rows_spec(q, 192, 2, 3, 64);
  EXPECT_EQ(spec.dtype, DType::kFloat16);
  EXPECT_EQ(spec.stride_bytes, (Strides{uint64_t{1} << 33, uint64_t{1} << 34}));
}

TEST(TensorMapsTest, SharedOrSingleHeadsHaveOneCoordinate) {
  const std::vector<uint16_t> memory(8);
  const ConstHeadRows shared{memory.data(), DType::kBFloat16, 576, 0};
  EXPECT_EQ(head_rows_spec(shared, 192, 16, 10, 128).dims, (Dims{192, 1, 10}));
  EXPECT_EQ(head_rows_spec(shared, 192, 16, 10, 128).stride_bytes, (Strides{1152, 1152}));
  EXPECT_EQ(head_step(shared, 16), 0);
  // The head stride of a single head may be anything; it is never used.
  const ConstHeadRows single{memory.data(), DType::kBFloat16, 576, 3};
  EXPECT_EQ(head_rows_spec(single, 192, 1, 10, 128).stride_bytes, (Strides{1152, 1152}));
  EXPECT_EQ(head_step(single, 1), 0);
}

TEST(TensorMapsTest, RopeKeysAreTheTailOfLatentRows) {
  const std::vector<uint16_t> memory(576);
  const ConstRows k_pe{memory.data() + 512, DType::kBFloat16, 576};
  const TensorMapSpec spec = rows_spec(k_pe, 64, 4097, 128);
  EXPECT_EQ(spec.data, memory.data() + 512);
  EXPECT_EQ(spec.rank, 2u);
  EXPECT_EQ(spec.dims, (Dims{64, 4097, 0}));
  EXPECT_EQ(spec.stride_bytes, (Strides{1152, 0}));
  EXPECT_EQ(spec.box, (Box{kPanelColumns, 128, 0}));
}

}  // namespace
}  // namespace mla::sm90
