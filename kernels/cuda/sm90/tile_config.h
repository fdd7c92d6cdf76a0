// Tile arithmetic of the Hopper prefill attention: shapes, shared-memory layout and registers.
#ifndef KERNELS_CUDA_SM90_TILE_CONFIG_H_
#define KERNELS_CUDA_SM90_TILE_CONFIG_H_

#include <cstdint>

#include "kernels/host_device.h"

namespace mla::sm90 {

inline constexpr int kQueryRows = 128;     // query rows of a tile
inline constexpr int kWarpgroupRows = 64;  // of which each consumer warpgroup has a half
inline constexpr int kPanelColumns = 64;   // 2-byte elements of a 128-byte row, the swizzle width
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kSharedMemoryLimit = 232448;  // bytes that one block may ask for (227 KiB)

/// One block's work is a tile of kQueryRows x all keys of an item, kKeyRows keys at a time. Q
/// stays in shared memory; K and V blocks go through rings of kStages.
///
/// A tile of C columns lies in shared memory as C / 64 panels, each [rows][128 bytes], swizzled.
template <int kNope, int kRope, int kValue, int kKeys>
struct TileConfig {
  static constexpr int kNopeDim = kNope;  // P
  static constexpr int kRopeDim = kRope;  // Rr
  static constexpr int kQkDim = kNope + kRope;
  static constexpr int kValueDim = kValue;  // V
  static constexpr int kKeyRows = kKeys;
  static constexpr int kStages = 2;

  // One producer warpgroup, then two consumers. 128 x (40 + 2 x 232) of 65,536 registers.
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kThreads = 128 * (1 + kConsumerWarpgroups);
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kQueryPanelBytes = kWarpgroupRows * kPanelRowBytes;
  static constexpr int kKeyPanelBytes = kKeyRows * kPanelRowBytes;
  static constexpr int kQueryBytes = kQkDim / kPanelColumns * kQueryPanelBytes;  // a warpgroup's
  static constexpr int kKeyBytes = kQkDim / kPanelColumns * kKeyPanelBytes;
  static constexpr int kValueBytes = kValueDim / kPanelColumns * kKeyPanelBytes;

  // Regions, in bytes from the 1,024-byte aligned start.
  static constexpr int kQueryOffset = 0;
  static constexpr int kKeyOffset = kQueryOffset + kConsumerWarpgroups * kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kKeyBytes;
  static constexpr int kControlOffset = kValueOffset + kStages * kValueBytes;
  static constexpr int kControlBytes = 256;  // barriers and tile slots
  static constexpr int kAlignment = 1024;
  static constexpr int kSharedMemoryBytes = kControlOffset + kControlBytes;

  static_assert(kConsumerWarpgroups * kWarpgroupRows == kQueryRows);
  static_assert(kNope % kPanelColumns == 0 && kRope % kPanelColumns == 0);
  static_assert(kValue % kPanelColumns == 0 && kValue <= 256 && kKeys % 16 == 0);
  static_assert(kKeyPanelBytes % kAlignment == 0, "a swizzled panel starts at 1,024 bytes");
  static_assert(kSharedMemoryBytes <= kSharedMemoryLimit);
};

using DeepSeekTiles = TileConfig<128, 64, 128, 128>;
using GlmTiles = TileConfig<192, 64, 256, 80>;

/// Keys that row `i` of a tile sees are the first visible_keys(limit, i, k_len) of its item.
/// `limit` is row 0's count before it is clamped to [0, k_len].
MLA_HOST_DEVICE constexpr int32_t visible_keys(int32_t limit, int32_t i, int32_t k_len) {
  const int32_t keys = limit + i;
  return keys < 0 ? 0 : keys > k_len ? k_len : keys;
}

/// The limit of the tile that starts at query `q` of an item; kUnmasked is just a large offset.
/// Clamped so that adding a row never overflows and never changes what visible_keys returns.
MLA_HOST_DEVICE constexpr int32_t tile_limit(int32_t q, int32_t causal_offset, int32_t k_len) {
  const int64_t limit = int64_t{q} + causal_offset + 1;
  if (limit >= k_len) return k_len;
  return limit < -kQueryRows ? -kQueryRows : static_cast<int32_t>(limit);
}

/// Key blocks that a tile of `rows` query rows must look at, and how many of them (the first ones)
/// every row sees in full.
template <typename Config>
MLA_HOST_DEVICE constexpr int32_t key_blocks(int32_t limit, int32_t rows, int32_t k_len) {
  return (visible_keys(limit, rows - 1, k_len) + Config::kKeyRows - 1) / Config::kKeyRows;
}
template <typename Config>
MLA_HOST_DEVICE constexpr int32_t full_key_blocks(int32_t limit, int32_t k_len) {
  return visible_keys(limit, 0, k_len) / Config::kKeyRows;
}

/// Into how many ranges of keys, attended apart and merged, the tiles of an item are cut, so that
/// an item of few tiles fills the device. A function of the item and the number of heads alone:
/// what else is in the batch must not change a row's bits. `tiles` are those of all heads, `keys`
/// the most that one of them sees.
inline constexpr int32_t kMultiprocessors = 132;  // of an H200 or H100
inline constexpr int32_t kMaxSplitTiles = 96;     // more tiles fill most of the device uncut
inline constexpr int32_t kMaxSplits = 16;
inline constexpr int32_t kMinSplitKeys = 8192;
inline constexpr int32_t kSplitCostKeys = 512;  // a range's start, end and merge, in keys

MLA_HOST_DEVICE constexpr int32_t key_splits(int64_t tiles, int32_t keys) {
  if (tiles > kMaxSplitTiles) return 1;
  const int32_t most = keys / kMinSplitKeys < kMaxSplits ? keys / kMinSplitKeys : kMaxSplits;
  int32_t best = 1;
  int64_t best_cost = 0;
  for (int32_t splits = 1; splits <= most; ++splits) {
    const int64_t rounds = (tiles * splits + kMultiprocessors - 1) / kMultiprocessors;
    const int64_t cost = rounds * (keys / splits + kSplitCostKeys);
    if (splits == 1 || cost < best_cost) {
      best = splits;
      best_cost = cost;
    }
  }
  return best;
}

/// Partial tiles that suffice for items whose keys add up to `rows`.
MLA_HOST_DEVICE constexpr int64_t max_partial_tiles(int32_t num_heads, int64_t rows) {
  return num_heads > kMaxSplitTiles || rows < 2 * kMinSplitKeys
             ? 0
             : rows / kMinSplitKeys * (kMaxSplitTiles / num_heads * num_heads);
}

/// Heads that are worked on side by side: few enough for their keys and values to stay in L2 while
/// all query tiles of an item pass over them, yet `least` of them, and groups of about one size.
MLA_HOST_DEVICE constexpr int32_t heads_together(int32_t num_heads, int64_t key_value_bytes,
                                                 int32_t least) {
  constexpr int64_t kL2Budget = int64_t{32} << 20;  // of 50 or 60 MB
  const int64_t fit = key_value_bytes > 0 ? kL2Budget / key_value_bytes : num_heads;
  const int64_t heads = fit > least ? fit : least;
  if (heads >= num_heads) return num_heads;
  const int32_t groups = num_heads / static_cast<int32_t>(heads);
  return (num_heads + groups - 1) / groups;
}

/// The least heads of a group under a causal limit. Tiles of a group come longest first, and those
/// of the last one must be many for the short ones to even out the end.
MLA_HOST_DEVICE constexpr int32_t balanced_heads(int32_t query_tiles) {
  return (3 * kMultiprocessors + query_tiles - 1) / query_tiles;
}

}  // namespace mla::sm90

#endif  // KERNELS_CUDA_SM90_TILE_CONFIG_H_
