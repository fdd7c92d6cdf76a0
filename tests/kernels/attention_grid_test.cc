// prefill_attention against float64 over dims, heads, types, layouts and kinds of items.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/kernels/attention_harness.h"

namespace mla::test {
namespace {

struct Dims {
  int32_t p, rr, v;
};

class AttentionGridTest : public AttentionTest {
 protected:
  // One of each kind; lengths around the tiles of all kernels (64, 128, 256), rows of q in order,
  // output rows in another, spare rows between them, key ranges that overlap.
  std::vector<AttentionItem> random_items() {
    constexpr int32_t kLengths[] = {1, 2, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257};
    const auto length = [&] { return kLengths[random_int(0, 11)]; };
    std::vector<AttentionItem> items;
    int32_t q_end = 0;
    int32_t keys = 0;
    for (int kind = 0; kind < 9; ++kind) {
      AttentionItem item;
      item.q_len = length();
      item.k_begin = std::max(0, keys - random_int(-3, 60));
      item.k_len = length();
      switch (kind) {
        case 0:  // new tokens
          item.k_len = item.q_len;
          item.causal_offset = 0;
          break;
        case 1:  // new tokens behind a context
          item.causal_offset = item.k_len;
          item.k_len += item.q_len;
          break;
        case 2:  // a later piece of the context: first rows without keys
          item.causal_offset = -random_int(1, item.q_len);
          break;
        case 3:  // the mask reaches past the keys
          item.causal_offset = item.k_len - item.q_len / 2;
          break;
        case 4:
          item.k_len = 0;
          break;
        case 5:
          item.q_len = 0;
          break;
        case 6:
          item.k_len = 1;
          break;
        case 7:  // few queries before many keys
          item.q_len = random_int(1, 20);
          item.k_len = random_int(2000, 4500);
          item.causal_offset = random_chance(0.5) ? kUnmasked : item.k_len - item.q_len;
          break;
        default:  // a chunk of a context
          item.k_len = 2 * length() + random_int(0, 300);
      }
      item.q_begin = q_end + random_int(0, 3);
      q_end = item.q_begin + item.q_len;
      keys = item.k_begin + item.k_len;
      items.push_back(item);
    }
    std::shuffle(items.begin(), items.end(), random());
    int32_t out_end = 0;
    for (AttentionItem& item : items) {
      item.out_row = out_end + random_int(0, 3);
      out_end = item.out_row + item.q_len;
    }
    std::shuffle(items.begin(), items.end(), random());
    return items;
  }

  /// False where the backend doesn't serve the case.
  bool check_random(AttentionCase c, bool with_prefix) {
    if (!supports(backend(), c)) return false;
    c.items = random_items();
    fill(c, with_prefix);
    SCOPED_TRACE(std::to_string(c.heads) + " heads, dims " + std::to_string(c.p) + ", " +
                 std::to_string(c.rr) + ", " + std::to_string(c.v) + ", layout " +
                 std::to_string(static_cast<int>(c.layout)) + ", " +
                 std::string(dtype_name(c.dtype)) + " to " + std::string(dtype_name(c.out_dtype)));
    check(c);
    return true;
  }

  // Every dims with every number of heads; layouts, types and prefixes take turns, and the larger
  // numbers of heads share the types among them.
  void check_grid(const Dims& dims) {
    int checked = 0;
    int cell = 0;
    for (const int32_t heads : {1, 5, 12, 16}) {
      for (int variant = 0; variant < 4; ++variant, ++cell) {
        if ((heads == 12 && variant < 2) || (heads == 16 && variant >= 2)) continue;
        AttentionCase c{.heads = heads, .p = dims.p, .rr = dims.rr, .v = dims.v};
        c.layout = (cell + cell / 4) % 2 == 0 ? KeyLayout::kExpanded : KeyLayout::kSeparate;
        c.dtype = variant == 3 ? DType::kFloat16 : DType::kBFloat16;
        c.out_dtype = variant % 2 == 0 ? DType::kFloat32 : c.dtype;
        c.lse_rows_first = heads % 2 == 0;
        c.prefix_in_place = c.out_dtype == DType::kFloat32;
        c.items_capacity = variant == 1 ? 20 : 0;
        checked += check_random(c, /*with_prefix=*/cell % 3 == 0) ? 1 : 0;
        if (HasFailure()) return;
      }
    }
    if (checked == 0) GTEST_SKIP() << "not served by " << backend().name();
  }
};

TEST_F(AttentionGridTest, DeepSeek) { check_grid({128, 64, 128}); }
TEST_F(AttentionGridTest, Glm5) { check_grid({192, 64, 256}); }
TEST_F(AttentionGridTest, SmallAndOdd) { check_grid({24, 8, 40}); }
TEST_F(AttentionGridTest, NoRope) { check_grid({64, 0, 64}); }

TEST_F(AttentionGridTest, Absorbed) {
  for (const int32_t heads : {1, 5, 16}) {
    AttentionCase c{.heads = heads, .p = 512, .rr = 64, .v = 512};
    c.layout = KeyLayout::kLatent;
    c.out_dtype = DType::kFloat32;
    c.softmax_scale = 0.0721688f;  // that of the expanded form, 1 / sqrt(192)
    if (!check_random(c, false)) GTEST_SKIP() << "not served by " << backend().name();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace mla::test
