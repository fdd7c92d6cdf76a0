// mask_empty_context: exactly the rows of requests without context become empty.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "tests/support/compare.h"
#include "tests/support/device_tensor.h"
#include "tests/support/sparse_memory.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

std::vector<int32_t> cumulative(const std::vector<int32_t>& lengths, int32_t first = 0) {
  std::vector<int32_t> sums(lengths.size() + 1, first);
  std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
  for (size_t i = 1; i < sums.size(); ++i) sums[i] += first;
  return sums;
}

struct MaskCase {
  std::vector<int32_t> query_lens;
  std::vector<int32_t> context_lens;
  int64_t heads = 4;
  int64_t dim = 16;
  DType dtype = DType::kFloat32;
  DeviceTensor::Shape strides = {};  // row_stride and head_stride
  bool lse_rows_first = false;
  int32_t first_query = 0;        // query_start_loc[0]
  int32_t first_token = 0;        // what the op subtracts from it
  int32_t requests_capacity = 0;  // 0: no actual count is given
};

class MaskTest : public BackendTest {
 protected:
  /// Runs the op over random values, some of them NaN, and expects each row either empty, as its
  /// lengths say, or with all its bits as before. Returns the emptied rows.
  std::vector<int64_t> check(const MaskCase& m) {
    const std::vector<int32_t> query_start_loc = cumulative(m.query_lens, m.first_query);
    const std::vector<int32_t> context_start_loc = cumulative(m.context_lens);
    const int64_t first_row = m.first_query - m.first_token;
    const int64_t rows = query_start_loc.back() - m.first_token + 3;  // and 3 behind the last
    DeviceTensor::Shape shape = m.strides;
    shape.rows = rows;
    shape.heads = m.heads;
    shape.dim = m.dim;
    std::vector<float> values = random_values(rows * m.heads * m.dim, m.dtype);
    for (float& value : values) {
      if (random_chance(0.1)) value = std::numeric_limits<float>::quiet_NaN();
    }
    std::vector<float> lses = random_values(rows * m.heads, DType::kFloat32);
    const DeviceTensor output(backend(), m.dtype, shape, values);
    DeviceTensor lse = DeviceTensor::lse(backend(), rows, m.heads, m.lse_rows_first);
    lse.upload(lses);
    const std::vector<float> before = output.download();

    const int32_t requests = static_cast<int32_t>(m.query_lens.size());
    const DeviceArray<int32_t> queries(backend(), query_start_loc);
    const DeviceArray<int32_t> contexts(backend(), context_start_loc);
    const DeviceArray<int32_t> actual(backend(), std::vector<int32_t>{requests});
    MaskEmptyContextParams params;
    params.num_heads = static_cast<int32_t>(m.heads);
    params.head_dim = static_cast<int32_t>(m.dim);
    params.query_start_loc = queries.data();
    params.context_start_loc = contexts.data();
    params.num_requests = {requests};
    if (m.requests_capacity > 0) params.num_requests = {m.requests_capacity, actual.data()};
    params.first_token = m.first_token;
    params.max_query_len =
        requests == 0 ? 0 : *std::max_element(m.query_lens.begin(), m.query_lens.end());
    params.output = output.heads();
    params.lse = lse.lse();
    backend().mask_empty_context(params, op_context());
    backend().synchronize({});

    std::vector<float> expected = before;
    std::vector<int64_t> emptied;
    int64_t row = first_row;
    for (int32_t r = 0; r < requests; ++r) {
      for (int32_t i = 0; i < m.query_lens[r]; ++i, ++row) {
        if (m.context_lens[r] > 0) continue;
        emptied.push_back(row);
        std::fill_n(expected.begin() + row * m.heads * m.dim, m.heads * m.dim, 0.0f);
        std::fill_n(lses.begin() + row * m.heads, m.heads, -std::numeric_limits<float>::infinity());
      }
    }
    EXPECT_TRUE(same_bits(output.download(), expected));
    EXPECT_TRUE(same_bits(lse.download(), lses));
    EXPECT_TRUE(output.padding_is_poison());
    EXPECT_TRUE(lse.padding_is_poison());
    return emptied;
  }

  /// The published case: requests 0 and 33 are long, the one without context is request 32.
  static MaskCase published_case() {
    MaskCase m;
    m.query_lens.assign(31, 1);
    m.query_lens.insert(m.query_lens.begin(), 2);
    m.query_lens.insert(m.query_lens.end(), {131, 1});
    m.context_lens.assign(32, 4);
    m.context_lens.insert(m.context_lens.end(), {0, 3});
    return m;
  }
};

TEST_F(MaskTest, ExactlyRows33To163) {
  std::vector<int64_t> rows(131);
  std::iota(rows.begin(), rows.end(), 33);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    MaskCase m = published_case();
    m.dtype = dtype;
    EXPECT_EQ(check(m), rows);
    m.heads = 64;
    m.dim = 128;
    EXPECT_EQ(check(m), rows);
  }
}

TEST_F(MaskTest, AllOrNoneAreEmpty) {
  EXPECT_EQ(check({.query_lens = {3, 70, 1}, .context_lens = {0, 0, 0}}).size(), 74u);
  EXPECT_EQ(check({.query_lens = {3, 70, 1}, .context_lens = {1, 2, 9}}).size(), 0u);
  EXPECT_EQ(check({.query_lens = {5}, .context_lens = {0}, .heads = 1, .dim = 8}).size(), 5u);
}

TEST_F(MaskTest, RequestsWithoutQueriesTouchNothing) {
  EXPECT_EQ(check({.query_lens = {0, 1, 0, 1}, .context_lens = {0, 3, 0, 5}, .heads = 9}),
            std::vector<int64_t>());
  EXPECT_EQ(check({.query_lens = {0, 1, 0, 1}, .context_lens = {2, 0, 0, 0}, .heads = 9}),
            (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(check({.query_lens = {0, 0}, .context_lens = {0, 0}}).size(), 0u);
  EXPECT_EQ(check({.query_lens = {}, .context_lens = {}}).size(), 0u);
}

TEST_F(MaskTest, TheFirstTokenShiftsTheRows) {
  EXPECT_EQ(check({.query_lens = {2, 3, 4},
                   .context_lens = {5, 0, 1},
                   .first_query = 100,
                   .first_token = 100}),
            (std::vector<int64_t>{2, 3, 4}));
  EXPECT_EQ(check({.query_lens = {2, 3, 4},
                   .context_lens = {0, 1, 0},
                   .first_query = 100,
                   .first_token = 90}),
            (std::vector<int64_t>{10, 11, 15, 16, 17, 18}));
}

TEST_F(MaskTest, RandomLengthsAndStrides) {
  for (int round = 0; round < 20; ++round) {
    MaskCase m{.query_lens = {}, .context_lens = {}};
    const int32_t requests = random_int(1, 40);
    for (int32_t r = 0; r < requests; ++r) {
      m.query_lens.push_back(random_chance(0.2) ? 0 : random_int(1, random_chance(0.1) ? 90 : 5));
      m.context_lens.push_back(random_chance(0.5) ? 0 : random_int(1, 2000));
    }
    m.heads = random_int(1, 13);
    m.dim = 8 * random_int(1, 12);
    m.dtype = round % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
    m.strides.head_stride = m.dim + 8 * random_int(0, 3);
    m.strides.row_stride = m.heads * m.strides.head_stride + random_int(0, 9);
    m.lse_rows_first = random_chance(0.5);
    m.first_query = random_int(0, 50);
    m.first_token = random_int(0, m.first_query);
    m.requests_capacity = random_chance(0.5) ? requests + random_int(0, 100) : 0;
    check(m);
    if (HasFailure()) return;
  }
}

TEST_F(MaskTest, MoreRequestsThanALaunchHasRowsOfBlocks) {
  MaskCase m{.query_lens = std::vector<int32_t>(70'000, 1),
             .context_lens = std::vector<int32_t>(70'000, 1),
             .heads = 1,
             .dim = 8};
  for (size_t r = 0; r < m.context_lens.size(); r += 3) m.context_lens[r] = 0;
  EXPECT_EQ(check(m).size(), 23'334u);
}

TEST_F(MaskTest, OffsetsHave64Bits) {
  if (!on_cpu()) GTEST_SKIP() << "host memory";
  constexpr int64_t kRows = 4, kHeads = 2, kDim = 8;
  constexpr int64_t kRowStride = (int64_t{1} << 31) + 64;
  const SparseMemory output(((kRows - 1) * kRowStride + kHeads * kDim) * sizeof(uint16_t));
  if (!output.valid()) GTEST_SKIP() << "address space";
  for (int64_t row = 0; row < kRows; ++row) {
    std::fill_n(output.at<uint16_t>(row * kRowStride), kHeads * kDim, uint16_t{7});
  }
  std::vector<float> lse(kRows * kHeads, 1.0f);
  const std::vector<int32_t> queries = cumulative({2, 2});
  const std::vector<int32_t> contexts = cumulative({5, 0});
  MaskEmptyContextParams params;
  params.num_heads = kHeads;
  params.head_dim = kDim;
  params.query_start_loc = queries.data();
  params.context_start_loc = contexts.data();
  params.num_requests = {2};
  params.max_query_len = 2;
  params.output = {output.data(), DType::kBFloat16, kRowStride, kDim};
  params.lse = {lse.data(), kRows, 1};
  backend().mask_empty_context(params, op_context());
  for (int64_t row = 0; row < kRows; ++row) {
    const uint16_t* values = output.at<uint16_t>(row * kRowStride);
    EXPECT_EQ(std::count(values, values + kHeads * kDim, row < 2 ? 7 : 0), kHeads * kDim) << row;
  }
}

TEST_F(MaskTest, RefusesBadParams) {
  const DeviceTensor output(backend(), DType::kFloat32, {.rows = 4, .heads = 2, .dim = 16});
  const DeviceTensor lse = DeviceTensor::lse(backend(), 4, 2);
  const std::vector<std::byte> output_before = output.image();
  const std::vector<std::byte> lse_before = lse.image();
  const DeviceArray<int32_t> queries(backend(), cumulative({4}));
  const DeviceArray<int32_t> contexts(backend(), cumulative({0}));
  MaskEmptyContextParams good;
  good.num_heads = 2;
  good.head_dim = 16;
  good.query_start_loc = queries.data();
  good.context_start_loc = contexts.data();
  good.num_requests = {1};
  good.max_query_len = 4;
  good.output = output.heads();
  good.lse = lse.lse();
  const auto refuse = [&](const std::string& what, const auto& spoil) {
    MaskEmptyContextParams params = good;
    spoil(params);
    expect_refused([&] { backend().mask_empty_context(params, op_context()); }, what);
  };
  using Params = MaskEmptyContextParams;
  refuse("no heads", [](Params& p) { p.num_heads = 0; });
  refuse("dim 0", [](Params& p) { p.head_dim = 0; });
  refuse("dim 20", [](Params& p) { p.head_dim = 20; });
  refuse("no queries", [](Params& p) { p.query_start_loc = nullptr; });
  refuse("no contexts", [](Params& p) { p.context_start_loc = nullptr; });
  refuse("negative requests", [](Params& p) { p.num_requests.capacity = -1; });
  refuse("negative first token", [](Params& p) { p.first_token = -1; });
  refuse("negative query length", [](Params& p) { p.max_query_len = -1; });
  refuse("no output", [](Params& p) { p.output.data = nullptr; });
  refuse("no lse", [](Params& p) { p.lse.data = nullptr; });
  refuse("e4m3 output", [](Params& p) { p.output.dtype = DType::kFloat8E4M3; });
  backend().synchronize({});
  EXPECT_TRUE(same_bits(output.image(), output_before));
  EXPECT_TRUE(same_bits(lse.image(), lse_before));

  backend().mask_empty_context(good, op_context());
  EXPECT_EQ(output.download(), std::vector<float>(128, 0.0f));
}

}  // namespace
}  // namespace mla::test
