// From tile numbers to work: what the producer hands to the consumers for each tile.
#ifndef KERNELS_CUDA_SM90_TILE_SCHEDULE_CUH_
#define KERNELS_CUDA_SM90_TILE_SCHEDULE_CUH_

#include "kernels/cuda/sm90/kernel_args.h"
#include "kernels/cuda/sm90/tile_config.h"

namespace mla::sm90 {

/// One tile: up to kQueryRows query rows of one head of one item, against all of its keys or one
/// split of them. In shared memory.
struct TileWork {
  int32_t head;
  int32_t q_row;  // rows of the tile's first query, in q and in out
  int32_t out_row;
  int32_t rows;  // valid query rows; 0 says that there are no more tiles
  int32_t k_begin;
  int32_t k_len;
  int32_t limit;        // see visible_keys
  int32_t block_begin;  // key blocks [block_begin, block_end) are this tile's: none where no row
  int32_t block_end;    // sees a key
  int32_t splits;
  int32_t split;
  int32_t partial;  // the partial tile of the first split
};

__host__ __device__ constexpr int32_t query_tiles(int32_t q_len) {
  return (q_len + kQueryRows - 1) / kQueryRows;
}

/// The last item whose first tile is at most `tile`. All lanes of a warp call it together.
__device__ __forceinline__ int32_t find_item(const int32_t* first_tile, int32_t num_items,
                                             int32_t tile, int lane) {
  int32_t begin = 0;
  int32_t count = num_items;
  while (count > 1) {
    const int32_t step = (count + 31) / 32;
    const int32_t offset = lane * step;
    const bool before = offset < count && first_tile[begin + offset] <= tile;
    const int32_t skip = (__popc(__ballot_sync(~0u, before)) - 1) * step;
    begin += skip;
    count = min(step, count - skip);
  }
  return begin;
}

/// Turns tile numbers into work, for one warp. It remembers the item of the last tile: mostly the
/// next one is of the same, and needs no search.
template <typename Config>
class TileLocator {
 public:
  __device__ TileLocator(const TileList& tiles, int32_t num_heads, int lane)
      : tiles_(tiles),
        num_heads_(num_heads),
        lane_(lane),
        num_items_(*tiles.num_items),
        num_tiles_(tiles.first_tile[num_items_]) {}

  __device__ __forceinline__ bool contains(int32_t tile) const { return tile < num_tiles_; }

  __device__ __forceinline__ TileWork locate(int32_t tile) {
    // All three loads are under way together.
    int32_t first = tiles_.first_tile[item_];
    const int32_t end = tiles_.first_tile[item_ + 1];
    ScheduledItem scheduled = tiles_.items[item_];
    if (tile < first || tile >= end) {
      item_ = find_item(tiles_.first_tile, num_items_, tile, lane_);
      first = tiles_.first_tile[item_];
      scheduled = tiles_.items[item_];
    }
    return tile_of(scheduled, static_cast<uint32_t>(tile - first), num_heads_);
  }

 private:
  /// Tiles of an item: groups of heads that share L2; in a group split by split, in a split the
  /// last query rows first (under a causal limit they see most keys), then all heads of the group.
  static __device__ __forceinline__ TileWork tile_of(const ScheduledItem& scheduled, uint32_t local,
                                                     uint32_t num_heads) {
    const AttentionItem& item = scheduled.item;
    const uint32_t splits = scheduled.splits;
    const uint32_t tile_rows = query_tiles(item.q_len);
    const int64_t head_bytes = int64_t{item.k_len} * (Config::kNopeDim + Config::kValueDim) * 2;
    const int32_t least = item.causal_offset == kUnmasked ? 1 : balanced_heads(tile_rows);
    const uint32_t group_heads = heads_together(num_heads, head_bytes, least);
    const uint32_t group = local / (group_heads * tile_rows * splits);
    const uint32_t in_group = local - group * group_heads * tile_rows * splits;
    const uint32_t heads = min(group_heads, num_heads - group * group_heads);
    const uint32_t split = in_group / (heads * tile_rows);
    const uint32_t in_split = in_group - split * heads * tile_rows;
    const uint32_t row = tile_rows - 1 - in_split / heads;
    const uint32_t head = group * group_heads + in_split % heads;
    const int32_t q = static_cast<int32_t>(row) * kQueryRows;

    TileWork work;
    work.head = static_cast<int32_t>(head);
    work.q_row = item.q_begin + q;
    work.out_row = item.out_row + q;
    work.rows = min(kQueryRows, item.q_len - q);
    work.k_begin = item.k_begin;
    work.k_len = item.k_len;
    work.limit = tile_limit(q, item.causal_offset, item.k_len);
    const uint32_t blocks = key_blocks<Config>(work.limit, work.rows, item.k_len);
    work.block_begin = static_cast<int32_t>(blocks * split / splits);
    work.block_end = static_cast<int32_t>(blocks * (split + 1) / splits);
    work.splits = scheduled.splits;
    work.split = static_cast<int32_t>(split);
    work.partial =
        scheduled.first_partial + static_cast<int32_t>((head * tile_rows + row) * splits);
    return work;
  }

  const TileList& tiles_;
  const int32_t num_heads_;
  const int lane_;
  const int32_t num_items_;
  const int32_t num_tiles_;
  int32_t item_ = 0;
};

}  // namespace mla::sm90

#endif  // KERNELS_CUDA_SM90_TILE_SCHEDULE_CUH_
