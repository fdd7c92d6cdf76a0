// The checks of what a serving stack passes in: each error names the request, the value, the limit.
#include "metadata/batch.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "metadata/context_parallel.h"
#include "metadata/error.h"
#include "metadata/model.h"

namespace mla {
namespace {

template <typename Call>
void expect_refused(Call call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << testing::PrintToString(words);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "'" << word << "' is not in: " << error.what();
    }
  }
}

void check(const std::vector<int32_t>& query_start_loc, const std::vector<int32_t>& context_lens) {
  validate_batch({query_start_loc, context_lens});
}

TEST(Batch, LegalOnes) {
  EXPECT_NO_THROW(validate_batch({}));
  EXPECT_NO_THROW(check({0}, {}));
  EXPECT_NO_THROW(check({0, 0, 5}, {7, 0}));
  EXPECT_NO_THROW(check({0, 1}, {2147483646}));
}

TEST(Batch, Refusals) {
  expect_refused([] { check({0, 1}, {1, 2}); }, {"2 entries", "context_lens 2"});
  expect_refused([] { check({1, 2}, {0}); }, {"query_start_loc[0] is 1"});
  expect_refused([] { check({0, 5, 3}, {0, 0}); }, {"request 1", "from 5 to 3"});
  expect_refused([] { check({0, 1, 2}, {4, -1}); }, {"request 1", "-1", "below 0"});
  expect_refused([] { check({0, 1}, {2147483647}); }, {"request 0", "2147483648", "2147483647"});
  expect_refused([] { check({0, 1, 2}, {2000000000, 2000000000}); }, {"request 1", "2147483647"});
}

TEST(BlockTable, TooShortForTheUsedPart) {
  const std::vector<int32_t> ids = {1, 2};
  const HostBlockTable table = {ids.data(), 1, 2, 2};
  const auto lens = [](int32_t length) { return std::vector<int32_t>{length}; };
  EXPECT_NO_THROW(validate_block_table(table, lens(128), 64, 3, true));
  // The field's case: a span from 128 of length 65 over a table of two pages of 64.
  expect_refused([&] { validate_block_table(table, lens(128 + 65), 64, 3, false); },
                 {"request 0", "193", "4 pages", "has 2"});
  expect_refused(
      [&] {
        validate_block_table(table, std::vector<int32_t>{1, 0}, 64, 3, false);
      },
      {"1 rows", "2 requests"});
  expect_refused([&] { validate_block_table(table, lens(-200), 64, 3, true); },
                 {"request 0", "-200", "below 0"});
  expect_refused([&] { validate_block_table(table, lens(1), 0, 3, true); }, {"page_size is 0"});
  const HostBlockTable overlapping = {ids.data(), 1, 2, 1};
  expect_refused([&] { validate_block_table(overlapping, lens(1), 64, 3, true); },
                 {"row stride 1", "2 pages"});
  const HostBlockTable missing = {nullptr, 1, 2, 2};
  EXPECT_NO_THROW(validate_block_table(missing, lens(0), 64, 3, true));
  expect_refused([&] { validate_block_table(missing, lens(65), 64, 3, true); },
                 {"request 0", "65", "no block table"});
}

TEST(BlockTable, IdsAreCheckedInTheUsedPartOnly) {
  const std::vector<int32_t> ids = {0, 5, -7, 3, 3, 99};
  const HostBlockTable table = {ids.data(), 2, 3, 3};
  EXPECT_NO_THROW(validate_block_table(table, std::vector<int32_t>{32, 16}, 16, 6, true));
  expect_refused(
      [&] {
        validate_block_table(table, std::vector<int32_t>{33, 0}, 16, 6, false);
      },
      {"request 0", "-7", "entry 2", "[0, 6)"});
  expect_refused(
      [&] {
        validate_block_table(table, std::vector<int32_t>{17, 16}, 16, 5, false);
      },
      {"request 0", "page id 5", "[0, 5)"});
  EXPECT_NO_THROW(validate_block_table(table, std::vector<int32_t>{0, 32}, 16, 6, false));
  expect_refused(
      [&] {
        validate_block_table(table, std::vector<int32_t>{0, 32}, 16, 6, true);
      },
      {"request 1", "page id 3", "twice"});
}

TEST(SlotMapping, NegativeSlotsSkip) {
  EXPECT_NO_THROW(validate_slot_mapping(std::vector<int64_t>{-1, 0, 63}, 64));
  expect_refused(
      [] {
        validate_slot_mapping(std::vector<int64_t>{0, 64}, 64);
      },
      {"token 1", "slot 64", "[0, 64)"});
}

TEST(ContextParallel, LocalLengthsAgreeWithCounting) {
  for (int32_t world : {1, 2, 3, 4, 5, 7, 8}) {
    for (int32_t interleave : {1, 3, 16, 64}) {
      std::vector<int32_t> count(static_cast<size_t>(world), 0);
      for (int32_t length = 0; length < 700; ++length) {
        for (int32_t rank = 0; rank < world; ++rank) {
          ASSERT_EQ(local_length(length, {world, rank, interleave}), count[rank])
              << world << " " << interleave << " " << length << " " << rank;
        }
        const ContextShard shard = {world, owner_rank(length, {world, 0, interleave}), interleave};
        EXPECT_EQ(local_position(length, shard), count[shard.rank]);
        ++count[shard.rank];
      }
    }
  }
}

TEST(ContextParallel, SpansOfTheField) {
  const int32_t expected[] = {0, 16, 16, 0};
  for (int32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(local_span_length(16, 48, {4, rank, 16}), expected[rank]);
  }
  EXPECT_EQ(local_length(2147483647, {8, 7, 1}), 268435455);
}

TEST(Model, PresetsAndNames) {
  const std::pair<const char*, ModelDims> presets[] = {
      {"deepseek-v2", {128, 128, 64, 128, 512}},  {"deepseek-v2-lite", {16, 128, 64, 128, 512}},
      {"deepseek-v3", {128, 128, 64, 128, 512}},  {"deepseek-r1", {128, 128, 64, 128, 512}},
      {"kimi-k2", {64, 128, 64, 128, 512}},       {"glm-5", {64, 192, 64, 256, 512}},
      {"glm-4.7-flash", {20, 192, 64, 256, 512}},
  };
  for (const auto& [name, dims] : presets) {
    EXPECT_EQ(find_preset(name), dims) << name;
    EXPECT_NO_THROW(validate_dims(dims));
  }
  EXPECT_EQ(model_presets().size(), std::size(presets));
  for (const char* name : {"bf16", "fp8_e4m3", "fp8_ds_mla"}) {
    EXPECT_EQ(kv_cache_format_name(find_kv_cache_format(name)), name);
  }
  expect_refused([] { find_preset("gpt-2"); }, {"gpt-2", "deepseek-v2-lite", "kimi-k2"});
  expect_refused([] { find_kv_cache_format("int4"); }, {"int4", "fp8_ds_mla"});
  EXPECT_FLOAT_EQ(default_softmax_scale(find_preset("kimi-k2")), 0.072168784f);
}

TEST(Model, RowBytes) {
  const ModelDims dims = find_preset("glm-5");
  EXPECT_EQ(kv_cache_row_bytes(KvCacheFormat::kBf16, dims), 1152);
  EXPECT_EQ(kv_cache_row_bytes(KvCacheFormat::kFp8E4M3, dims), 576);
  EXPECT_EQ(kv_cache_row_bytes(KvCacheFormat::kFp8DsMla, dims), 656);
  expect_refused(
      [] {
        kv_cache_row_bytes(KvCacheFormat::kFp8DsMla, {1, 24, 8, 40, 48});
      },
      {"512", "48 and 8"});
}

TEST(Model, RefusedDimsAndScales) {
  expect_refused([] { validate_dims({0, 128, 64, 128, 512}); }, {"num_heads is 0"});
  expect_refused([] { validate_dims({1025, 128, 64, 128, 512}); }, {"num_heads is 1025", "1024"});
  expect_refused([] { validate_dims({1, 100, 64, 128, 512}); }, {"qk_nope_head_dim is 100"});
  expect_refused([] { validate_dims({1, 128, 64, 2048, 512}); }, {"v_head_dim is 2048", "1024"});
  expect_refused([] { validate_softmax_scale(std::numeric_limits<float>::quiet_NaN()); }, {"nan"});
  expect_refused([] { validate_softmax_scale(0.0f); }, {"softmax_scale is 0"});
}

}  // namespace
}  // namespace mla
