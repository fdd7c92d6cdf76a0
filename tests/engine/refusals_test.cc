// Bad input: refused by name, with outputs, cache and workspace as they were.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "metadata/error.h"
#include "tests/engine/engine_harness.h"
#include "tests/support/compare.h"

namespace mla::test {
namespace {

class RefusalsTest : public EngineHarnessTest {
 protected:
  void SetUp() override {
    EngineHarnessTest::SetUp();
    if (IsSkipped()) return;
    tensors_.emplace(*this);
    workspace_ = DeviceBuffer(backend(), workspace_bytes(config(), backend()));
    backend().fill_bytes(workspace_.data(), kPoison, workspace_.bytes(), {});
    engine_.emplace(config(), backend(), workspace_.span());
  }
  Tensors& tensors() { return *tensors_; }
  Engine& engine() { return *engine_; }

  /// The call's message has `words`, and nothing in memory has changed.
  void expect_untouched_refusal(const std::function<void()>& call,
                                const std::vector<std::string>& words) {
    const std::vector<std::byte> out = tensors().out.image(), lse = tensors().lse.image(),
                                 cache = tensors().cache_image(backend()), work = workspace_image();
    try {
      call();
      ADD_FAILURE() << "accepted: " << words.front();
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::kInvalidArgument ||
                  error.code() == ErrorCode::kUnsupported);
      for (const std::string& word : words) {
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
            << '"' << error.what() << "\" lacks " << word;
      }
    }
    EXPECT_TRUE(same_bits(out, tensors().out.image())) << words.front();
    EXPECT_TRUE(same_bits(lse, tensors().lse.image())) << words.front();
    EXPECT_TRUE(same_bits(cache, tensors().cache_image(backend()))) << words.front();
    EXPECT_TRUE(same_bits(work, workspace_image())) << words.front();
  }

 private:
  std::vector<std::byte> workspace_image() const {
    std::vector<std::byte> bytes(workspace_.bytes());
    backend().copy_to_host(bytes.data(), workspace_.data(), bytes.size(), {});
    backend().synchronize({});
    return bytes;
  }

  DeviceBuffer workspace_;
  std::optional<Tensors> tensors_;
  std::optional<Engine> engine_;
};

TEST_F(RefusalsTest, StepsAndNoLayerUntilTheNextGoodOne) {
  struct Bad {
    std::vector<std::string> words;
    std::function<void(Step&)> spoil;
  };
  const std::vector<Bad> all = {
      {{"41", "40"}, [](Step& s) { s.table[1] = 41; }},
      {{"-7"}, [](Step& s) { s.table[0] = -7; }},
      {{"0"}, [](Step& s) { s.table[1] = s.table[0]; }},  // twice in one request
      {{"2", "3"}, [](Step& s) { s.inputs.host_block_table.max_pages = 2; }},
      {{"block table"}, [](Step& s) { s.inputs.host_block_table = {}; }},
      {{"give one"}, [](Step& s) { s.inputs.device_block_table = s.table.data(); }},
      {{"49", "48"},
       [](Step& s) {
         s.query_start_loc.back() = 49;
         s.inputs.host_slot_mapping = {};
       }},
      {{"9", "8"},
       [](Step& s) {
         s.query_start_loc.resize(10, s.query_start_loc.back());
         s.context_lens.resize(9, 0);
         s.inputs.batch = {s.query_start_loc, s.context_lens};
       }},
      {{"640"}, [](Step& s) { s.slots[3] = 640; }},
      {{"11", "12"},
       [](Step& s) { s.inputs.host_slot_mapping = std::span<const int64_t>(s.slots).first(11); }},
      {{"-1"}, [](Step& s) { s.context_lens[0] = -1; }},
      {{"1"}, [](Step& s) { s.query_start_loc[0] = 1; }},
      {{"1"}, [](Step& s) { s.query_start_loc[1] = 99; }},  // then decreasing
      {{"context"}, [](Step& s) { s.context_lens[0] = std::numeric_limits<int32_t>::max(); }},
      {{"-3"}, [](Step& s) { s.inputs.num_pages = -3; }},
      {{""}, [](Step& s) { s.inputs.batch.context_lens = s.inputs.batch.context_lens.first(1); }},
  };
  expect_untouched_refusal([&] { engine().run_layer(tensors().params()); }, {"begin_step"});
  for (const Bad& bad : all) {
    Step step(backend(), {5, 7}, {40, 16});
    engine().begin_step(step.inputs);
    bad.spoil(step);
    expect_untouched_refusal([&] { engine().begin_step(step.inputs); }, bad.words);
    expect_untouched_refusal([&] { engine().run_layer(tensors().params()); }, {"begin_step"});
  }
  const Step good(backend(), {5, 7}, {40, 16});
  engine().begin_step(good.inputs);
  engine().run_layer(tensors().params());
  EXPECT_TRUE(std::isfinite(tensors().out.download()[0]));
}

// The field's case: a span from 128 of length 65 over a table of two pages of 64.
TEST_F(RefusalsTest, ATableOfTwoPagesUnderAContextOf193) {
  EngineConfig c = config();
  c.page_size = c.workspace_tokens = 64;
  const DeviceBuffer workspace(backend(), workspace_bytes(c, backend()));
  Engine other(c, backend(), workspace.span());
  Step step(backend(), {5}, {128 + 65});
  const std::vector<int32_t> table = {1, 2};
  step.inputs.host_block_table = {table.data(), 1, 2, 2};
  expect_untouched_refusal([&] { other.begin_step(step.inputs); },
                           {"request 0", "193", "4 pages", "has 2"});
  expect_untouched_refusal([&] { other.run_layer(tensors().params()); }, {"begin_step"});
}

TEST_F(RefusalsTest, Layers) {
  struct Bad {
    std::vector<std::string> words;
    std::function<void(LayerParams&)> spoil;
  };
  const auto shift = [](auto& pointer, int bytes) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(
        reinterpret_cast<uintptr_t>(pointer) + bytes);
  };
  const std::vector<Bad> all = {
      {{"q", "null"}, [](LayerParams& p) { p.q.data = nullptr; }},
      {{"q", "float16"}, [](LayerParams& p) { p.q.dtype = DType::kFloat16; }},
      {{"q", "16"}, [&](LayerParams& p) { shift(p.q.data, 2); }},
      {{"q", "97", "8"}, [](LayerParams& p) { p.q.row_stride = 97; }},
      {{"q", "24", "32"}, [](LayerParams& p) { p.q.head_stride = 24; }},
      {{"kv_c", "null"}, [](LayerParams& p) { p.kv_c.data = nullptr; }},
      {{"kv_c", "float32"}, [](LayerParams& p) { p.kv_c.dtype = DType::kFloat32; }},
      {{"kv_c", "40", "48"}, [](LayerParams& p) { p.kv_c.row_stride = 40; }},
      {{"kv_c", "16"}, [&](LayerParams& p) { shift(p.kv_c.data, 2); }},
      {{"k_pe", "float16"}, [](LayerParams& p) { p.k_pe.dtype = DType::kFloat16; }},
      {{"k_pe", "null"}, [](LayerParams& p) { p.k_pe.data = nullptr; }},
      {{"k_pe", "9", "8"}, [](LayerParams& p) { p.k_pe.row_stride = 9; }},
      {{"k_pe", "16"}, [&](LayerParams& p) { shift(p.k_pe.data, 8); }},
      {{"kv_b_proj", "null"}, [](LayerParams& p) { p.kv_b_proj = nullptr; }},
      {{"kv_b_proj", "16"}, [&](LayerParams& p) { shift(p.kv_b_proj, 2); }},
      {{"out", "null"}, [](LayerParams& p) { p.out.data = nullptr; }},
      {{"out", "float8"}, [](LayerParams& p) { p.out.dtype = DType::kFloat8E4M3; }},
      {{"out", "32", "40"}, [](LayerParams& p) { p.out.head_stride = 32; }},
      {{"out", "112"}, [](LayerParams& p) { p.out.row_stride = 112; }},
      {{"lse", "row"}, [](LayerParams& p) { p.lse.row_stride = 0; }},
      {{"lse", "4"}, [&](LayerParams& p) { shift(p.lse.data, 2); }},
      {{"kv_cache", "null"}, [](LayerParams& p) { p.kv_cache.data = nullptr; }},
      {{"fp8_e4m3", "bf16"}, [](LayerParams& p) { p.kv_cache.format = KvCacheFormat::kFp8E4M3; }},
      {{"64", "16"}, [](LayerParams& p) { p.kv_cache.page_size = 64; }},
      {{"39", "40"}, [](LayerParams& p) { p.kv_cache.num_pages = 39; }},
      {{"page", "1776"}, [](LayerParams& p) { p.kv_cache.page_stride = 1776; }},
      {{"page", "1800"}, [](LayerParams& p) { p.kv_cache.page_stride = 1800; }},
  };
  const Step step(backend(), {5, 7}, {40, 16});
  engine().begin_step(step.inputs);
  for (const Bad& bad : all) {
    LayerParams params = tensors().params();
    bad.spoil(params);
    expect_untouched_refusal([&] { engine().run_layer(params); }, bad.words);
  }
  engine().run_layer(tensors().params());  // a refused layer costs no more than itself
  EXPECT_TRUE(std::isfinite(tensors().out.download()[0]));
}

TEST_F(RefusalsTest, AScaleOfNan) {
  EngineConfig fp8 = config();
  fp8.kv_cache_format = KvCacheFormat::kFp8E4M3;
  const DeviceBuffer workspace(backend(), workspace_bytes(fp8, backend()));
  Engine other(fp8, backend(), workspace.span());
  const Step step(backend(), {5, 7}, {40, 16});
  other.begin_step(step.inputs);
  for (const float scale : {NAN, INFINITY, 0.0f, -1.0f}) {
    LayerParams params = tensors().params();
    params.kv_cache.format = KvCacheFormat::kFp8E4M3;
    params.kv_cache.scale = scale;
    expect_untouched_refusal([&] { other.run_layer(params); }, {"scale"});
  }
}

TEST_F(RefusalsTest, LegalStepsThatDoLittle) {
  const Step none(backend(), {}, {});
  engine().begin_step(none.inputs);
  engine().run_layer({});  // no tokens: no tensors either
  const Step no_tokens(backend(), {0, 0}, {0, 33});
  engine().begin_step(no_tokens.inputs);
  engine().run_layer({});
  EXPECT_TRUE(std::isnan(tensors().out.download()[0]));

  Step unwritten(backend(), {3}, {0});
  unwritten.inputs.slot_mapping = nullptr;
  unwritten.inputs.num_pages = 0;
  unwritten.inputs.host_slot_mapping = {};
  unwritten.inputs.host_block_table = {};
  engine().begin_step(unwritten.inputs);
  LayerParams params = tensors().params();
  params.kv_cache = {};
  engine().run_layer(params);
  EXPECT_TRUE(std::isfinite(tensors().out.download()[0]));
}

}  // namespace
}  // namespace mla::test
