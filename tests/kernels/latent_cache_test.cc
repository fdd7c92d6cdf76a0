// write_latent_cache and gather_latent in the three formats, byte by byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "tests/kernels/cache_harness.h"
#include "tests/oracle/oracle.h"
#include "tests/support/compare.h"
#include "tests/support/device_tensor.h"
#include "tests/support/sparse_memory.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

constexpr DType kBf16 = DType::kBFloat16;
constexpr KvCacheFormat kFormats[] = {KvCacheFormat::kBf16, KvCacheFormat::kFp8E4M3,
                                      KvCacheFormat::kFp8DsMla};

struct Span {
  int32_t start = 0;
  int32_t length = 0;
};

class LatentCacheTest : public BackendTest {
 protected:
  /// Requests of the spans on pages in random order. Only rows inside the spans hold values: page
  /// tails, earlier positions and other pages are NaN, and ids past a span are garbage.
  void check_gather(CacheShape shape, const std::vector<Span>& spans, bool with_actual = false) {
    int32_t max_pages = 1;
    int32_t used_pages = 0;
    for (const Span& span : spans) {
      const int32_t pages = (span.start + span.length + shape.page_size - 1) / shape.page_size;
      max_pages = std::max(max_pages, pages);
      used_pages += pages;
    }
    shape.num_pages = used_pages + 3;
    std::vector<int32_t> ids(shape.num_pages);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random());

    HostCache host(shape);
    const int64_t table_stride = max_pages + 2;
    constexpr int32_t kGarbage[] = {-1, std::numeric_limits<int32_t>::max(),
                                    std::numeric_limits<int32_t>::min()};
    std::vector<int32_t> table(spans.size() * table_stride);
    for (size_t i = 0; i < table.size(); ++i) table[i] = kGarbage[i % 3];
    std::vector<int32_t> starts, cu_seq_lens = {0};
    std::vector<float> expected;
    size_t next_id = 0;
    for (size_t r = 0; r < spans.size(); ++r) {
      const int32_t end = spans[r].start + spans[r].length;
      for (int32_t page = 0; page * shape.page_size < end; ++page) {
        table[r * table_stride + page] = ids[next_id++];
      }
      for (int32_t t = spans[r].start; t < end; ++t) {
        const int64_t slot =
            int64_t{table[r * table_stride + t / shape.page_size]} * shape.page_size +
            t % shape.page_size;
        host.randomize_row(slot, random());
        const std::vector<float> row = host.read_row(slot);
        expected.insert(expected.end(), row.begin(), row.end());
      }
      starts.push_back(spans[r].start);
      cu_seq_lens.push_back(cu_seq_lens.back() + spans[r].length);
    }

    const int32_t rows = cu_seq_lens.back();
    const int32_t span_count = static_cast<int32_t>(spans.size());
    const int64_t extra = with_actual ? 37 : 0;
    const DeviceTensor latent(
        backend(), kBf16,
        {.rows = rows + extra, .dim = shape.row_values(), .row_stride = shape.row_values() + 8});
    const DeviceCache cache(backend(), host);
    const DeviceArray<int32_t> device_table(backend(), table);
    const DeviceArray<int32_t> device_starts(backend(), starts);
    const DeviceArray<int32_t> device_cu(backend(), cu_seq_lens);
    const DeviceArray<int32_t> counts(backend(), std::vector<int32_t>{span_count, rows});
    GatherLatentParams params;
    params.kv_lora_rank = shape.lora;
    params.qk_rope_head_dim = shape.rope;
    params.kv_cache = as_const(cache.view());
    params.block_table = device_table.data();
    params.block_table_stride = table_stride;
    params.starts = device_starts.data();
    params.cu_seq_lens = device_cu.data();
    params.num_spans = {span_count + extra, with_actual ? counts.data() : nullptr};
    params.num_rows = {rows + extra, with_actual ? counts.data() + 1 : nullptr};
    params.latent = latent.rows();
    backend().gather_latent(params, op_context());
    backend().synchronize({});

    // Rows behind the last stay poison.
    const std::vector<float> found = latent.download();
    expected.resize(found.size());
    const DeviceTensor untouched(backend(), kBf16, {.rows = extra, .dim = shape.row_values()});
    const std::vector<float> poison = untouched.download();
    std::copy(poison.begin(), poison.end(), expected.end() - extra * shape.row_values());
    EXPECT_TRUE(same_bits(found, expected)) << kv_cache_format_name(shape.format);
    EXPECT_TRUE(latent.padding_is_poison());
  }

  CacheShape shape_of(KvCacheFormat format, int32_t page_size) {
    CacheShape shape{.format = format, .page_size = page_size};
    if (format == KvCacheFormat::kFp8E4M3) shape.scale = 0.037f;
    return shape;
  }
};

TEST_F(LatentCacheTest, GathersEightRequestsOf512) {
  for (const KvCacheFormat format : kFormats) {
    check_gather(shape_of(format, 16), std::vector<Span>(8, {0, 512}));
  }
}

TEST_F(LatentCacheTest, GathersSpansThatStartAnywhere) {
  const std::vector<std::vector<int32_t>> lengths = {{1}, {64}, {128}, {512}, {256, 128, 384}};
  for (const KvCacheFormat format : kFormats) {
    for (const int32_t page_size : {1, 16, 64, 128}) {
      for (const std::vector<int32_t>& batch : lengths) {
        if (page_size != 16 && batch.size() == 1) continue;
        std::vector<Span> spans;
        spans.reserve(batch.size());
        for (const int32_t length : batch) spans.push_back({random_int(1, 3 * page_size), length});
        SCOPED_TRACE("page size " + std::to_string(page_size) + ", first start " +
                     std::to_string(spans[0].start));
        check_gather(shape_of(format, page_size), spans);
      }
    }
  }
}

TEST_F(LatentCacheTest, GathersBatchesWithEmptySpans) {
  for (const KvCacheFormat format : kFormats) {
    for (const bool with_actual : {false, true}) {
      CacheShape shape = shape_of(format, 16);
      shape.page_gap = 4096 + 16;  // one layer of several, interleaved by the page
      check_gather(shape, {{0, 0}, {5, 33}, {7, 0}, {0, 0}, {16, 1}, {31, 2}, {100, 0}},
                   with_actual);
      check_gather(shape, {{0, 0}, {3, 0}}, with_actual);
    }
  }
}

TEST_F(LatentCacheTest, GathersOtherDims) {
  for (const KvCacheFormat format : {KvCacheFormat::kBf16, KvCacheFormat::kFp8E4M3}) {
    for (const int32_t page_size : {1, 3, 16}) {
      CacheShape shape = shape_of(format, page_size);
      shape.lora = 56;
      shape.rope = 16;  // 72 bytes a row in fp8: rows aren't aligned to 16 bytes
      check_gather(shape, {{1, 30}, {0, 0}, {17, 5}}, true);
    }
  }
}

TEST_F(LatentCacheTest, GathersMoreSpansThanALaunchHasRowsOfBlocks) {
  CacheShape shape = shape_of(KvCacheFormat::kBf16, 1);
  shape.lora = 8;
  shape.rope = 8;
  check_gather(shape, std::vector<Span>(70'000, {0, 1}));
}

// NaN and zeros of either sign in the cache arrive as such.
TEST_F(LatentCacheTest, GathersNaNAndZero) {
  CacheShape shape = shape_of(KvCacheFormat::kFp8E4M3, 16);
  shape.num_pages = 1;
  HostCache host(shape);
  host.randomize_row(0, random());
  host.row(0)[0] = std::byte{0x7f};
  host.row(0)[1] = std::byte{0xff};
  host.row(0)[2] = std::byte{0x80};
  const DeviceCache cache(backend(), host);
  const DeviceTensor latent(backend(), kBf16, {.rows = 1, .dim = 576});
  const DeviceArray<int32_t> zeros(backend(), std::vector<int32_t>{0, 1});
  GatherLatentParams params;
  params.kv_lora_rank = 512;
  params.qk_rope_head_dim = 64;
  params.kv_cache = as_const(cache.view());
  params.block_table = zeros.data();
  params.block_table_stride = 1;
  params.starts = zeros.data();
  params.cu_seq_lens = zeros.data();
  params.num_spans = {1};
  params.num_rows = {1};
  params.latent = latent.rows();
  backend().gather_latent(params, op_context());
  const std::vector<float> found = latent.download();
  EXPECT_TRUE(std::isnan(found[0]));
  EXPECT_TRUE(std::isnan(found[1]));
  EXPECT_TRUE(found[2] == 0.0f && std::signbit(found[2]));
}

// Rows come back as the oracle says, and no other byte of the cache changes.
TEST_F(LatentCacheTest, WritesRowsAndNothingElse) {
  for (const KvCacheFormat format : kFormats) {
    for (const int32_t page_size : {1, 16, 64}) {
      CacheShape shape = shape_of(format, page_size);
      shape.num_pages = 200 / page_size + 5;
      shape.page_gap = page_size == 16 ? 48 : 0;
      constexpr int64_t kTokens = 150;
      std::vector<int64_t> slots(int64_t{shape.num_pages} * page_size);
      std::iota(slots.begin(), slots.end(), 0);
      std::shuffle(slots.begin(), slots.end(), random());
      slots.resize(kTokens);
      for (int64_t& slot : slots) {
        if (random_chance(0.2)) slot = random_chance(0.5) ? -1 : -(int64_t{1} << 40);
      }
      // Magnitudes from far below the smallest e4m3 to far above the largest.
      std::vector<float> rows = random_values(kTokens * 576, kBf16);
      for (float& value : rows) {
        if (random_chance(0.1)) value *= std::ldexp(1.0f, random_int(-20, 12));
      }
      std::fill_n(rows.begin(), 128, 0.0f);  // a tile whose scale can't be max / 448
      std::vector<float> kv_c, k_pe;
      for (int64_t t = 0; t < kTokens; ++t) {
        kv_c.insert(kv_c.end(), rows.begin() + t * 576, rows.begin() + t * 576 + 512);
        k_pe.insert(k_pe.end(), rows.begin() + t * 576 + 512, rows.begin() + (t + 1) * 576);
      }
      const DeviceTensor latents(backend(), kBf16,
                                 {.rows = kTokens, .dim = 512, .row_stride = 512 + 72}, kv_c);
      const DeviceTensor ropes(backend(), kBf16, {.rows = kTokens, .dim = 64, .row_stride = 88},
                               k_pe);
      HostCache host(shape);
      const DeviceCache cache(backend(), host);
      const DeviceArray<int64_t> slot_mapping(backend(), slots);
      WriteLatentCacheParams params;
      params.kv_lora_rank = 512;
      params.qk_rope_head_dim = 64;
      params.kv_c = latents.const_rows();
      params.k_pe = ropes.const_rows();
      params.slot_mapping = slot_mapping.data();
      params.num_tokens = {kTokens};
      params.kv_cache = cache.view();
      backend().write_latent_cache(params, op_context());
      backend().synchronize({});

      HostCache written(shape);
      cache.download_to(written);
      for (int64_t t = 0; t < kTokens; ++t) {
        if (slots[t] < 0) continue;
        const std::span<const float> row = std::span(rows).subspan(t * 576, 576);
        ASSERT_TRUE(same_bits(written.read_row(slots[t]), through_cache(shape, row)))
            << kv_cache_format_name(format) << ", token " << t;
        std::ranges::fill(written.row(slots[t]), std::byte{kPoison});
      }
      EXPECT_TRUE(same_bits(written.bytes(), host.bytes())) << kv_cache_format_name(format);
    }
  }
}

TEST_F(LatentCacheTest, WritesSaturateAndKeepNaN) {
  const CacheShape shape{.format = KvCacheFormat::kFp8E4M3,
                         .lora = 8,
                         .rope = 8,
                         .num_pages = 1,
                         .page_size = 4,
                         .scale = 0.5f};
  constexpr float kHuge = 3e38f;
  const std::vector<float> kv_c = {224.0f, 240.0f, -1e6f,    oracle::round_to_bf16(kHuge),
                                   -0.0f,  NAN,    INFINITY, -INFINITY};
  const std::vector<float> k_pe = {0.00048828125f, 0.000244140625f, 0.5f, 1.0f, 8.5f, 9.0f,
                                   0.0f,           -224.0f};
  const DeviceTensor latents(backend(), kBf16, {.rows = 1, .dim = 8}, kv_c);
  const DeviceTensor ropes(backend(), kBf16, {.rows = 1, .dim = 8}, k_pe);
  HostCache host(shape);
  const DeviceCache cache(backend(), host);
  const DeviceArray<int64_t> slots(backend(), std::vector<int64_t>{2});
  backend().write_latent_cache({.kv_lora_rank = 8,
                                .qk_rope_head_dim = 8,
                                .kv_c = latents.const_rows(),
                                .k_pe = ropes.const_rows(),
                                .slot_mapping = slots.data(),
                                .num_tokens = {1},
                                .kv_cache = cache.view()},
                               op_context());
  cache.download_to(host);
  const std::vector<float> found = host.read_row(2);
  EXPECT_EQ(found[0], 224.0f);
  EXPECT_EQ(found[1], 224.0f);
  EXPECT_EQ(found[2], -224.0f);
  EXPECT_EQ(found[3], 224.0f);
  EXPECT_TRUE(found[4] == 0.0f && std::signbit(found[4]));
  EXPECT_TRUE(std::isnan(found[5]));
  EXPECT_EQ(found[6], 224.0f);
  EXPECT_EQ(found[7], -224.0f);
  EXPECT_EQ(found[8], 0.0f);  // 2^-10, half the smallest: the tie goes to 0
  EXPECT_EQ(found[9], 0.0f);
  EXPECT_EQ(found[12], 8.0f);  // 17 between 16 and 18
  EXPECT_EQ(found[15], -224.0f);
}

TEST_F(LatentCacheTest, TheActualCountLimitsTheWrites) {
  CacheShape shape = shape_of(KvCacheFormat::kBf16, 16);
  shape.num_pages = 2;
  const std::vector<float> kv_c = random_values(20 * 512, kBf16);
  const std::vector<float> k_pe = random_values(20 * 64, kBf16);
  const DeviceTensor latents(backend(), kBf16, {.rows = 20, .dim = 512}, kv_c);
  const DeviceTensor ropes(backend(), kBf16, {.rows = 20, .dim = 64}, k_pe);
  std::vector<int64_t> slots(20);
  std::iota(slots.begin(), slots.end(), 0);
  const DeviceArray<int64_t> slot_mapping(backend(), slots);
  const DeviceArray<int32_t> actual(backend(), std::vector<int32_t>{7});
  HostCache host(shape);
  const DeviceCache cache(backend(), host);
  backend().write_latent_cache({.kv_lora_rank = 512,
                                .qk_rope_head_dim = 64,
                                .kv_c = latents.const_rows(),
                                .k_pe = ropes.const_rows(),
                                .slot_mapping = slot_mapping.data(),
                                .num_tokens = {20, actual.data()},
                                .kv_cache = cache.view()},
                               op_context());
  HostCache written(shape);
  cache.download_to(written);
  for (int64_t t = 0; t < 20; ++t) {
    EXPECT_EQ(std::isnan(written.read_row(t)[0]), t >= 7) << t;
  }
}

// Pages 4 GiB apart: a row that is written to page 2 comes back from there.
TEST_F(LatentCacheTest, OffsetsHave64Bits) {
  if (!on_cpu()) GTEST_SKIP() << "host memory";
  constexpr int64_t kPageStride = (int64_t{1} << 32) + 4096;
  const SparseMemory memory(2 * kPageStride + 4096);
  if (!memory.valid()) GTEST_SKIP() << "address space";
  const LatentCache cache{memory.data(), KvCacheFormat::kBf16, 1.0f, 3, 1, kPageStride};
  std::vector<float> row = random_values(576, kBf16);
  row[0] = 1.0f;
  const DeviceTensor given(backend(), kBf16, {.rows = 1, .dim = 576}, row);
  const DeviceTensor found(backend(), kBf16, {.rows = 1, .dim = 576});
  const std::vector<int64_t> slot = {2};
  backend().write_latent_cache({.kv_lora_rank = 512,
                                .qk_rope_head_dim = 64,
                                .kv_c = given.const_rows(),
                                .k_pe = given.const_rows(512),
                                .slot_mapping = slot.data(),
                                .num_tokens = {1},
                                .kv_cache = cache},
                               op_context());
  EXPECT_NE(*memory.at<uint16_t>(kPageStride), 0);  // elements of 2 bytes: the start of page 2
  const std::vector<int32_t> table = {2};
  const std::vector<int32_t> starts = {0, 1};
  backend().gather_latent({.kv_lora_rank = 512,
                           .qk_rope_head_dim = 64,
                           .kv_cache = as_const(cache),
                           .block_table = table.data(),
                           .block_table_stride = 1,
                           .starts = starts.data(),
                           .cu_seq_lens = starts.data(),
                           .num_spans = {1},
                           .num_rows = {1},
                           .latent = found.rows()},
                          op_context());
  EXPECT_TRUE(same_bits(found.download(), row));
}

TEST_F(LatentCacheTest, RefusesBadParams) {
  CacheShape shape = shape_of(KvCacheFormat::kFp8DsMla, 16);
  shape.num_pages = 2;
  HostCache host(shape);
  const DeviceCache cache(backend(), host);
  const DeviceTensor latents(backend(), kBf16, {.rows = 4, .dim = 576},
                             random_values(4 * 576, kBf16));
  const DeviceArray<int64_t> slots(backend(), std::vector<int64_t>{0, 1, 2, 3});
  const WriteLatentCacheParams write{.kv_lora_rank = 512,
                                     .qk_rope_head_dim = 64,
                                     .kv_c = latents.const_rows(),
                                     .k_pe = latents.const_rows(512),
                                     .slot_mapping = slots.data(),
                                     .num_tokens = {4},
                                     .kv_cache = cache.view()};
  const auto refuse_write = [&](const std::string& what, const auto& spoil) {
    WriteLatentCacheParams params = write;
    spoil(params);
    expect_refused([&] { backend().write_latent_cache(params, op_context()); }, "write, " + what);
  };
  using Write = WriteLatentCacheParams;
  refuse_write("no cache", [](Write& p) { p.kv_cache.data = nullptr; });
  refuse_write("no kv_c", [](Write& p) { p.kv_c.data = nullptr; });
  refuse_write("no k_pe", [](Write& p) { p.k_pe.data = nullptr; });
  refuse_write("no slots", [](Write& p) { p.slot_mapping = nullptr; });
  refuse_write("float32 kv_c", [](Write& p) { p.kv_c.dtype = DType::kFloat32; });
  refuse_write("negative tokens", [](Write& p) { p.num_tokens.capacity = -1; });
  refuse_write("lora rank of another format", [](Write& p) { p.kv_lora_rank = 256; });
  refuse_write("page stride 8 bytes off", [](Write& p) { p.kv_cache.page_stride += 8; });
  refuse_write("overlapping pages", [](Write& p) { p.kv_cache.page_stride -= 16; });
  refuse_write("page size 0", [](Write& p) { p.kv_cache.page_size = 0; });
  for (const float scale : {0.0f, -1.0f, std::nanf(""), INFINITY}) {
    refuse_write("scale " + std::to_string(scale), [&](Write& p) {
      p.kv_cache.format = KvCacheFormat::kFp8E4M3;
      p.kv_cache.scale = scale;
    });
  }
  HostCache after(shape);
  cache.download_to(after);
  EXPECT_TRUE(same_bits(after.bytes(), host.bytes()));

  const DeviceTensor latent(backend(), kBf16, {.rows = 4, .dim = 576});
  const std::vector<std::byte> before = latent.image();
  const DeviceArray<int32_t> table(backend(), std::vector<int32_t>{0, 4});
  GatherLatentParams gather;
  gather.kv_lora_rank = 512;
  gather.qk_rope_head_dim = 64;
  gather.kv_cache = as_const(cache.view());
  gather.block_table = table.data();
  gather.block_table_stride = 1;
  gather.starts = table.data();
  gather.cu_seq_lens = table.data();
  gather.num_spans = {1};
  gather.num_rows = {4};
  gather.latent = latent.rows();
  const auto refuse_gather = [&](const std::string& what, const auto& spoil) {
    GatherLatentParams params = gather;
    spoil(params);
    expect_refused([&] { backend().gather_latent(params, op_context()); }, "gather, " + what);
  };
  using Gather = GatherLatentParams;
  refuse_gather("no cache", [](Gather& p) { p.kv_cache.data = nullptr; });
  refuse_gather("no table", [](Gather& p) { p.block_table = nullptr; });
  refuse_gather("no starts", [](Gather& p) { p.starts = nullptr; });
  refuse_gather("no lengths", [](Gather& p) { p.cu_seq_lens = nullptr; });
  refuse_gather("no output", [](Gather& p) { p.latent.data = nullptr; });
  refuse_gather("fp16 output", [](Gather& p) { p.latent.dtype = DType::kFloat16; });
  refuse_gather("narrow output", [](Gather& p) { p.latent.row_stride = 568; });
  refuse_gather("negative rows", [](Gather& p) { p.num_rows.capacity = -1; });
  refuse_gather("negative spans", [](Gather& p) { p.num_spans.capacity = -1; });
  refuse_gather("page size 0", [](Gather& p) { p.kv_cache.page_size = 0; });
  refuse_gather("rope of another format", [](Gather& p) { p.qk_rope_head_dim = 32; });
  backend().synchronize({});
  EXPECT_TRUE(same_bits(latent.image(), before));
}

}  // namespace
}  // namespace mla::test
