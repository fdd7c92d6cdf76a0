// The tile arithmetic of the Hopper attention against the definition of an item, key by key.
#include "kernels/cuda/sm90/tile_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>

#include "metadata/attention_item.h"

namespace mla::sm90 {
namespace {

bool sees(const AttentionItem& item, int64_t query, int64_t key) {
  return key < item.k_len && key <= query + item.causal_offset;
}

AttentionItem random_item(std::mt19937_64& random) {
  const auto below = [&](int n) { return static_cast<int32_t>(random() % n); };
  AttentionItem item;
  item.q_len = 1 + below(400);
  item.k_len = below(700);
  const int32_t offsets[] = {kUnmasked,
                             0,
                             item.k_len - item.q_len,
                             -below(500),
                             below(900),
                             std::numeric_limits<int32_t>::min(),
                             kUnmasked - below(100)};
  item.causal_offset = offsets[random() % std::size(offsets)];
  return item;
}

template <typename Config>
void check_blocks(const AttentionItem& item) {
  for (int32_t q = 0; q < item.q_len; q += kQueryRows) {
    const int32_t rows = std::min(kQueryRows, item.q_len - q);
    const int32_t limit = tile_limit(q, item.causal_offset, item.k_len);
    int32_t most = 0;
    int32_t least = item.k_len;
    for (int32_t i = 0; i < rows; ++i) {
      int32_t count = 0;
      while (sees(item, q + i, count)) ++count;
      ASSERT_EQ(visible_keys(limit, i, item.k_len), count)
          << "query " << q + i << ", " << item.k_len << " keys, offset " << item.causal_offset;
      most = std::max(most, count);
      least = std::min(least, count);
    }
    // Exactly the blocks that hold a visible key, and exactly those that every row sees whole.
    ASSERT_EQ(key_blocks<Config>(limit, rows, item.k_len),
              (most + Config::kKeyRows - 1) / Config::kKeyRows);
    ASSERT_EQ(full_key_blocks<Config>(limit, item.k_len), least / Config::kKeyRows);
  }
}

TEST(TileConfigTest, VisibleKeysAndBlocksFollowTheItem) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 500; ++i) {
    const AttentionItem item = random_item(random);
    check_blocks<DeepSeekTiles>(item);
    check_blocks<GlmTiles>(item);
    if (HasFatalFailure()) return;
  }
}

TEST(TileConfigTest, LimitsOfHugeItemsDoNotOverflow) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int32_t kKeys = kMost - 2 * kQueryRows;
  const int32_t limit = tile_limit(kMost - kQueryRows, kUnmasked, kKeys);
  EXPECT_EQ(visible_keys(limit, kQueryRows - 1, kKeys), kKeys);
  const int32_t none = tile_limit(0, std::numeric_limits<int32_t>::min(), kKeys);
  EXPECT_EQ(visible_keys(none, kQueryRows - 1, kKeys), 0);
}

template <typename Config>
void check_layout() {
  // Regions follow one another without a gap or an overlap, all of them aligned for the swizzle.
  EXPECT_EQ(Config::kKeyOffset, 2 * Config::kQueryBytes);
  EXPECT_EQ(Config::kQueryBytes, kWarpgroupRows * Config::kQkDim * 2);
  EXPECT_EQ(Config::kValueOffset - Config::kKeyOffset,
            Config::kStages * Config::kKeyRows * Config::kQkDim * 2);
  EXPECT_EQ(Config::kControlOffset - Config::kValueOffset,
            Config::kStages * Config::kKeyRows * Config::kValueDim * 2);
  for (const int offset : {Config::kKeyOffset, Config::kKeyBytes, Config::kValueOffset,
                           Config::kValueBytes, Config::kControlOffset}) {
    EXPECT_EQ(offset % Config::kAlignment, 0);
  }
  EXPECT_LE(Config::kSharedMemoryBytes, kSharedMemoryLimit);
  EXPECT_LE(128 * (Config::kProducerRegisters + 2 * Config::kConsumerRegisters), 65536);
}

TEST(TileConfigTest, SharedMemoryHoldsAllRegions) {
  check_layout<DeepSeekTiles>();
  check_layout<GlmTiles>();
  EXPECT_EQ(DeepSeekTiles::kControlOffset, 208 * 1024);
  EXPECT_EQ(GlmTiles::kControlOffset, 224 * 1024);
}

TEST(TileConfigTest, SplitsAreBoundedAndFillTheDevice) {
  for (int32_t tiles = 1; tiles <= 2 * kMaxSplitTiles; ++tiles) {
    for (int32_t keys = 0; keys <= 300000; keys += 1237) {
      const int32_t splits = key_splits(tiles, keys);
      ASSERT_GE(splits, 1);
      ASSERT_LE(splits, kMaxSplits);
      ASSERT_LE(int64_t{splits} * kMinSplitKeys, std::max(keys, kMinSplitKeys));
      ASSERT_TRUE(splits == 1 || tiles <= kMaxSplitTiles) << tiles << " tiles";
    }
  }
  EXPECT_EQ(key_splits(16, 65536), 8);  // 128 of 132 multiprocessors
  EXPECT_EQ(key_splits(64, 65536), 2);
  EXPECT_EQ(key_splits(64, 8192), 1);
}

TEST(TileConfigTest, PartialTilesSufficeForAnyItemsOfTheRows) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 2000; ++round) {
    const int32_t heads = 1 + static_cast<int32_t>(random() % 128);
    const int64_t rows = static_cast<int64_t>(random() % 200000);
    int64_t left = rows, partials = 0;
    while (left > 0) {
      const int32_t keys = 1 + static_cast<int32_t>(random() % left);
      const int64_t tiles = int64_t{heads} * (1 + random() % 7);
      const int32_t splits = key_splits(tiles, keys);
      if (splits > 1) partials += tiles * splits;
      left -= keys;
    }
    ASSERT_LE(partials, max_partial_tiles(heads, rows)) << heads << " heads, " << rows << " rows";
  }
}

TEST(TileConfigTest, HeadsTogetherStayWithinTheirNumber) {
  EXPECT_EQ(heads_together(128, 0, 1), 128);
  EXPECT_EQ(heads_together(128, int64_t{4096} * 512, 1), 16);
  EXPECT_EQ(heads_together(5, int64_t{4096} * 512, 1), 5);
  EXPECT_EQ(heads_together(16, int64_t{1} << 40, 1), 1);
}

TEST(TileConfigTest, HeadsTogetherAreAtLeastAndInEvenGroups) {
  for (int32_t heads = 1; heads <= 130; ++heads) {
    for (int32_t least = 1; least <= 140; ++least) {
      const int32_t together = heads_together(heads, int64_t{1} << 40, least);
      ASSERT_GE(together, std::min(least, heads));
      ASSERT_LE(together, heads);
      ASSERT_LT(together, 2 * least + 1) << heads << " heads, at least " << least;
    }
  }
  EXPECT_EQ(balanced_heads(64), 7);
  EXPECT_EQ(balanced_heads(1000), 1);
}

}  // namespace
}  // namespace mla::sm90
