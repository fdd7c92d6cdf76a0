// What the Hopper attention accepts, and the scratch it asks for; nothing is launched.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>

#include "kernels/cuda/sm90/prefill_attention.h"
#include "metadata/error.h"

namespace mla::sm90 {
namespace {

/// Memory for addresses only.
alignas(16) std::array<std::byte, 4096> memory;

PrefillAttentionParams valid_params() {
  PrefillAttentionParams p;
  p.num_heads = 16;
  p.qk_nope_head_dim = 128;
  p.qk_rope_head_dim = 64;
  p.v_head_dim = 128;
  p.softmax_scale = 0.1f;
  p.q = {memory.data(), DType::kBFloat16, 16 * 192, 192};
  p.k_nope = {memory.data(), DType::kBFloat16, 16 * 256, 256};
  p.k_pe = {memory.data(), DType::kBFloat16, 576};
  p.v = {memory.data() + 256, DType::kBFloat16, 16 * 256, 256};
  p.q_rows = 10;
  p.k_rows = 20;
  p.items = reinterpret_cast<const AttentionItem*>(memory.data());
  p.num_items.capacity = 1;
  p.max_q_len = 10;
  p.max_k_len = 20;
  p.out = {memory.data(), DType::kBFloat16, 16 * 128, 128};
  return p;
}

TEST(Sm90PrefillAttentionTest, ServesBothModelFamiliesInBothDtypes) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    EXPECT_TRUE(supports_prefill_attention(128, 64, 128, dtype));
    EXPECT_TRUE(supports_prefill_attention(192, 64, 256, dtype));
    EXPECT_FALSE(supports_prefill_attention(128, 64, 64, dtype));
    EXPECT_FALSE(supports_prefill_attention(512, 64, 512, dtype));
  }
  EXPECT_FALSE(supports_prefill_attention(128, 64, 128, DType::kFloat32));
}

TEST(Sm90PrefillAttentionTest, RefusesWhatTheCopyEngineCannotRead) {
  EXPECT_TRUE(supports_prefill_attention(valid_params()));
  PrefillAttentionParams p = valid_params();
  p.q.row_stride += 4;
  EXPECT_FALSE(supports_prefill_attention(p));
  p = valid_params();
  p.v.data = memory.data() + 8;
  EXPECT_FALSE(supports_prefill_attention(p));
  p = valid_params();
  p.k_pe.row_stride = 0;
  EXPECT_FALSE(supports_prefill_attention(p));
  p = valid_params();
  p.k_nope.row_stride = int64_t{1} << 39;
  EXPECT_FALSE(supports_prefill_attention(p));
  p = valid_params();
  p.k_rows = 0;  // no keys: their views may be absent
  p.k_nope = p.v = {};
  p.k_pe = {};
  EXPECT_TRUE(supports_prefill_attention(p));
}

TEST(Sm90PrefillAttentionTest, RefusesOutputsOff16Bytes) {
  PrefillAttentionParams p = valid_params();
  p.out.head_stride = 132;  // 264 bytes
  EXPECT_FALSE(supports_prefill_attention(p));
  p.out.dtype = DType::kFloat32;  // 528 bytes
  EXPECT_TRUE(supports_prefill_attention(p));
  p.prefix_out = {memory.data() + 8, DType::kFloat32, 16 * 128, 128};
  EXPECT_FALSE(supports_prefill_attention(p));
}

TEST(Sm90PrefillAttentionTest, ThrowsBeforeAnyLaunch) {
  PrefillAttentionParams p = valid_params();
  try {
    prefill_attention(p, {memory.data(), 16}, 132, nullptr);
    FAIL() << "16 bytes of scratch were accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  }
  p.v_head_dim = 64;
  try {
    prefill_attention(p, memory, 132, nullptr);
    FAIL() << "V = 64 was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  }
}

TEST(Sm90PrefillAttentionTest, ScratchGrowsWithItemsAndSplitRows) {
  const size_t least = prefill_attention_scratch_bytes(16, 128, 1, 0);
  EXPECT_EQ(prefill_attention_scratch_bytes(128, 128, 1, 65536), least);  // heads fill the device
  EXPECT_GT(prefill_attention_scratch_bytes(16, 128, 1000, 0), least);
  // 65,536 rows: 8 ranges of 8,192 keys for at most 96 tiles, each 128 rows of V and lse in float32
  // and 8 counters.
  EXPECT_EQ(prefill_attention_scratch_bytes(16, 128, 1, 65536) - least,
            8u * 96 * (128 * 128 * 4 + 128 * 4 + 8 * 4));
}

}  // namespace
}  // namespace mla::sm90
