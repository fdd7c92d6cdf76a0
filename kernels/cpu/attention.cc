// Flash-style attention: a task is one query tile of one item and head; it walks the keys in
// blocks, with the scores of one block at a time in scratch.
//
// Tile sizes are constants and every GEMM's shape follows from the item alone, so a row's bits do
// not depend on the other items of the launch nor on the number of workers.
#include <cmath>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/vector_ops.h"
#include "kernels/lse.h"
#include "metadata/error.h"

namespace mla::cpu {
namespace {

constexpr int64_t kQueryTile = 256;
constexpr int64_t kKeyBlock = 256;  // a multiple of kRowPadding
static_assert(kKeyBlock % kRowPadding == 0);

/// One worker's float32 tiles, as offsets in elements from its start.
struct Layout {
  Layout(int64_t qk_head_dim, int64_t v_head_dim) {
    queries = 0;
    keys = queries + kQueryTile * qk_head_dim;
    values = keys + kKeyBlock * qk_head_dim;
    scores = values + kKeyBlock * v_head_dim;
    out = scores + kQueryTile * kKeyBlock;
    max = out + kQueryTile * v_head_dim;
    sum = max + kQueryTile;
    size = sum + kQueryTile;
  }
  int64_t queries;  // [kQueryTile, P + Rr], times the softmax scale
  int64_t keys;     // [kKeyBlock, P + Rr]
  int64_t values;   // [kKeyBlock, V]
  int64_t scores;   // [kQueryTile, kKeyBlock], then the weights in place
  int64_t out;      // [kQueryTile, V] before the division by sum
  int64_t max;      // [kQueryTile] running row maximum
  int64_t sum;      // [kQueryTile] running sum of exp(score - max)
  int64_t size;
};

int64_t num_tiles(const AttentionItem& item) { return (item.q_len + kQueryTile - 1) / kQueryTile; }

/// How many keys query i of the item sees: the first so many.
int64_t visible_keys(const AttentionItem& item, int64_t i) {
  return std::clamp<int64_t>(i + item.causal_offset + 1, 0, item.k_len);
}

const std::byte* element(const ConstHeadRows& view, int64_t row, int64_t head) {
  return static_cast<const std::byte*>(view.data) +
         (row * view.row_stride + head * view.head_stride) * dtype_bytes(view.dtype);
}

class TileTask {
 public:
  TileTask(const PrefillAttentionParams& params, const AttentionItem& item, int64_t tile,
           int64_t head, float* scratch)
      : p_(params),
        item_(item),
        head_(head),
        first_(tile * kQueryTile),
        count_(std::min(kQueryTile, item.q_len - first_)),
        qk_dim_(params.qk_nope_head_dim + params.qk_rope_head_dim),
        v_dim_(params.v_head_dim) {
    const Layout layout(qk_dim_, v_dim_);
    queries_ = scratch + layout.queries;
    keys_ = scratch + layout.keys;
    values_ = scratch + layout.values;
    scores_ = scratch + layout.scores;
    out_ = scratch + layout.out;
    max_ = scratch + layout.max;
    sum_ = scratch + layout.sum;
  }

  void run() {
    load_queries();
    std::fill_n(out_, count_ * v_dim_, 0.0f);
    std::fill_n(max_, count_, -INFINITY);
    std::fill_n(sum_, count_, 0.0f);
    const int64_t keys = visible_keys(item_, first_ + count_ - 1);
    for (int64_t begin = 0; begin < keys; begin += kKeyBlock) {
      attend_block(begin, std::min(kKeyBlock, keys - begin));
    }
    finish();
  }

 private:
  /// Query row of the tile, counted within the item.
  int64_t visible(int64_t row) const { return visible_keys(item_, first_ + row); }

  void load_queries() {
    for (int64_t i = 0; i < count_; ++i) {
      to_float(element(p_.q, item_.q_begin + first_ + i, head_), p_.q.dtype, qk_dim_,
               p_.softmax_scale, queries_ + i * qk_dim_);
    }
  }

  const std::byte* value_row(int64_t key) const {
    return element(p_.v, item_.k_begin + key, head_);
  }

  void load_keys_and_values(int64_t begin, int64_t n) {
    const int64_t nope = p_.qk_nope_head_dim;
    for (int64_t j = 0; j < n; ++j) {
      const int64_t row = item_.k_begin + begin + j;
      float* const key = keys_ + j * qk_dim_;
      to_float(element(p_.k_nope, row, head_), p_.k_nope.dtype, nope, 1.0f, key);
      if (p_.qk_rope_head_dim > 0) {
        to_float(static_cast<const uint16_t*>(p_.k_pe.data) + row * p_.k_pe.row_stride,
                 p_.k_pe.dtype, p_.qk_rope_head_dim, 1.0f, key + nope);
      }
      to_float(value_row(begin + j), p_.v.dtype, v_dim_, 1.0f, values_ + j * v_dim_);
    }
  }

  /// Keys [begin, begin + n) of the item.
  void attend_block(int64_t begin, int64_t n) {
    load_keys_and_values(begin, n);
    int64_t top = 0;  // rows above it see nothing of this block
    while (visible(top) <= begin) ++top;

    const bool some_hidden = visible(0) < begin + n;
    int64_t poisoned[kKeyBlock];
    int64_t num_poisoned = 0;
    if (some_hidden) num_poisoned = set_poison_aside(begin, n, poisoned);

    const int64_t rows = count_ - top;
    float* const scores = scores_ + top * kKeyBlock;
    gemm_nt(rows, n, qk_dim_, queries_ + top * qk_dim_, qk_dim_, keys_, qk_dim_, scores, kKeyBlock);
    for (int64_t i = top; i < count_; ++i) update_row(i, std::min(n, visible(i) - begin), n);
    gemm_nn(rows, v_dim_, n, scores, kKeyBlock, values_, v_dim_, true, out_ + top * v_dim_, v_dim_);
    for (int64_t j = 0; j < num_poisoned; ++j) add_poison(begin, poisoned[j]);
  }

  /// Scores to weights; what the row has so far is brought to the new maximum.
  void update_row(int64_t i, int64_t visible_here, int64_t n) {
    const SoftmaxRow row = softmax_row(scores_ + i * kKeyBlock, visible_here, n, max_[i]);
    if (row.max != max_[i]) {
      const float factor = max_[i] == -INFINITY ? 0.0f : std::exp(max_[i] - row.max);
      if (factor == 0.0f) {
        std::fill_n(out_ + i * v_dim_, v_dim_, 0.0f);
        sum_[i] = 0.0f;
      } else {
        scale_row(out_ + i * v_dim_, v_dim_, factor);
        sum_[i] *= factor;
      }
    }
    max_[i] = row.max;
    sum_[i] += row.sum;
  }

  /// In a block that some row sees in part, a hidden value row that is not finite would reach that
  /// row as 0 * NaN. Such rows leave the GEMM, and are added to the query rows that see them.
  int64_t set_poison_aside(int64_t begin, int64_t n, int64_t* poisoned) {
    int64_t count = 0;
    for (int64_t j = std::max<int64_t>(0, visible(0) - begin); j < n; ++j) {
      float* const row = values_ + j * v_dim_;
      if (all_finite(row, v_dim_)) continue;
      std::fill_n(row, v_dim_, 0.0f);
      poisoned[count++] = j;
    }
    return count;
  }

  void add_poison(int64_t begin, int64_t j) {
    float* const row = values_ + j * v_dim_;
    to_float(value_row(begin + j), p_.v.dtype, v_dim_, 1.0f, row);
    for (int64_t i = 0; i < count_; ++i) {
      if (visible(i) <= begin + j) continue;
      const float weight = scores_[i * kKeyBlock + j];
      for (int64_t d = 0; d < v_dim_; ++d) out_[i * v_dim_ + d] += weight * row[d];
    }
  }

  void finish() {
    for (int64_t i = 0; i < count_; ++i) {
      float* const out = out_ + i * v_dim_;
      const int64_t row = int64_t{item_.out_row} + first_ + i;
      float lse = -INFINITY;
      // All scores -inf leave a sum of 0, which is the empty state too.
      if (visible(i) > 0 && sum_[i] != 0.0f) {
        lse = max_[i] + std::log(sum_[i]);
        scale_row(out, v_dim_, 1.0f / sum_[i]);
      } else {
        std::fill_n(out, v_dim_, 0.0f);
      }
      if (p_.prefix_out.data != nullptr) lse = merge_prefix(row, lse, out);
      from_float(
          out, v_dim_, p_.out.dtype,
          static_cast<std::byte*>(p_.out.data) +
              (row * p_.out.row_stride + head_ * p_.out.head_stride) * dtype_bytes(p_.out.dtype));
      if (p_.lse.data != nullptr) {
        p_.lse.data[head_ * p_.lse.head_stride + row * p_.lse.row_stride] = lse;
      }
    }
  }

  float merge_prefix(int64_t row, float lse, float* out) const {
    const auto* prefix = reinterpret_cast<const float*>(element(p_.prefix_out, row, head_));
    const MergeWeights weights = merge_weights(
        p_.prefix_lse.data[head_ * p_.prefix_lse.head_stride + row * p_.prefix_lse.row_stride],
        lse);
    if (weights.prefix == 0.0f) {
      for (int64_t d = 0; d < v_dim_; ++d) out[d] = merge_values(weights, 0.0f, out[d]);
    } else {
      for (int64_t d = 0; d < v_dim_; ++d) out[d] = merge_values(weights, prefix[d], out[d]);
    }
    return weights.lse;
  }

  const PrefillAttentionParams& p_;
  const AttentionItem& item_;
  const int64_t head_;
  const int64_t first_;  // first query of the tile, within the item
  const int64_t count_;  // queries of the tile
  const int64_t qk_dim_;
  const int64_t v_dim_;
  float* queries_;
  float* keys_;
  float* values_;
  float* scores_;
  float* out_;
  float* max_;
  float* sum_;
};

void check_range(int64_t item, int64_t begin, int64_t len, int64_t rows, int64_t max_len,
                 const char* name) {
  if (begin < 0 || len < 0 || (len > 0 && begin + len > rows) || len > max_len) {
    throw_error(ErrorCode::kInvalidArgument,
                "item {} has {} rows {} to {}, must lie within {} and number at most {}", item,
                name, begin, begin + len, rows, max_len);
  }
}

void check_items(const PrefillAttentionParams& p, int64_t items) {
  for (int64_t i = 0; i < items; ++i) {
    const AttentionItem& item = p.items[i];
    check_range(i, item.q_begin, item.q_len, p.q_rows, p.max_q_len, "query");
    check_range(i, item.k_begin, item.k_len, p.k_rows, p.max_k_len, "key");
    if (item.out_row < 0) {
      throw_error(ErrorCode::kInvalidArgument, "item {} has out_row {}, at least 0", i,
                  item.out_row);
    }
  }
}

size_t tile_starts_bytes(int64_t num_items) {
  return ((num_items + 1) * sizeof(int64_t) + 255) / 256 * 256;
}

}  // namespace

size_t attention_scratch_bytes(int64_t qk_head_dim, int64_t v_head_dim, int64_t num_items,
                               int num_workers) {
  return tile_starts_bytes(num_items) +
         static_cast<size_t>(Layout(qk_head_dim, v_head_dim).size) * sizeof(float) * num_workers;
}

void prefill_attention(const PrefillAttentionParams& p, Executor& executor,
                       std::span<std::byte> scratch) {
  const int64_t items = length(p.num_items);
  if (items == 0 || p.q_rows == 0 || p.max_q_len == 0) return;
  check_items(p, items);

  // Which item a tile belongs to: tiles of item i are tile_starts[i] to tile_starts[i + 1] - 1.
  auto* const tile_starts = reinterpret_cast<int64_t*>(scratch.data());
  tile_starts[0] = 0;
  for (int64_t i = 0; i < items; ++i) tile_starts[i + 1] = tile_starts[i] + num_tiles(p.items[i]);
  const int64_t tiles = tile_starts[items];

  auto* const worker_scratch =
      reinterpret_cast<float*>(scratch.data() + tile_starts_bytes(p.num_items.capacity));
  const int64_t worker_size = Layout(p.qk_nope_head_dim + p.qk_rope_head_dim, p.v_head_dim).size;
  parallel_for(executor, tiles * p.num_heads, [&](int64_t task, int worker) {
    // The last tiles of causal items see the most keys: they start first.
    const int64_t tile = tiles - 1 - task / p.num_heads;
    const int64_t item =
        std::upper_bound(tile_starts, tile_starts + items + 1, tile) - tile_starts - 1;
    TileTask(p, p.items[item], tile - tile_starts[item], task % p.num_heads,
             worker_scratch + worker * worker_size)
        .run();
  });
}

}  // namespace mla::cpu
