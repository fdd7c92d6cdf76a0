// Why mask_empty_context exists: a chunk that holds no keys for some requests, on a backend that
// leaves rows of such requests undefined and reports a finite LSE for them.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/forwarding_backend.h"
#include "tests/engine/scenario.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

class CarelessBackend final : public ForwardingBackend {
 public:
  CarelessBackend(Backend& backend, bool mask) : ForwardingBackend(backend), mask_(mask) {}

  /// Calls that write a chunk's partial: NaN outputs with an LSE of 0.75 in every row, before the
  /// rows of the items get theirs.
  void prefill_attention(const PrefillAttentionParams& p, const OpContext& c) override {
    if (p.prefix_out.data == nullptr && p.out.dtype == DType::kFloat32) {
      backend_.fill_bytes(p.out.data, kPoison, p.q_rows * p.out.row_stride * sizeof(float),
                          c.stream);
      backend_.fill_bytes(p.lse.data, 0x3f, p.num_heads * p.lse.head_stride * sizeof(float),
                          c.stream);
    }
    backend_.prefill_attention(p, c);
  }
  void mask_empty_context(const MaskEmptyContextParams& p, const OpContext& c) override {
    ++num_masks;
    if (mask_) backend_.mask_empty_context(p, c);
  }

  int num_masks = 0;

 private:
  bool mask_;
};

class MaskMattersTest : public BackendTest {};

TEST_F(MaskMattersTest, WithoutTheMaskTheResultIsWrongWithItExact) {
  const ModelDims dims{5, 24, 8, 40, 48};
  // Uniform: 96 rows each over three requests, 32 a chunk; request 1 is empty from the second
  // chunk on, request 3 from the third, request 2 has no context at all.
  const Scenario scenario =
      make_scenario(dims, {{150, 17}, {20, 9}, {0, 5}, {60, 12}}, 64, random());
  const ScenarioExpectation expected = expect_scenario(scenario, KvCacheFormat::kBf16, 1.0f);
  EngineConfig config = config_for(scenario, 96, 16);
  config.path = PathPolicy::kExpand;
  config.schedule = Schedule::kUniform;
  config.merge = MergeMode::kDiscrete;
  const Tolerance tolerance =
      tolerance_of(unchunked_error(backend(), scenario, KvCacheFormat::kBf16, 1.0f, expected));

  const ScenarioResult careful = run_scenario(backend(), config, scenario);
  CarelessBackend masked(backend(), /*mask=*/true);
  const ScenarioResult with_mask = run_scenario(masked, config, scenario);
  EXPECT_GE(masked.num_masks, 3);
  EXPECT_TRUE(agrees(with_mask, expected, dims, tolerance));
  EXPECT_TRUE(same_bits(with_mask, careful));

  CarelessBackend unmasked(backend(), /*mask=*/false);
  const LayerResult without = run_scenario(unmasked, config, scenario)[0][0];
  const int64_t row_size = int64_t{dims.num_heads} * dims.v_head_dim;
  for (int64_t row = 0; row < scenario.num_tokens(0); ++row) {
    // Request 0 alone has keys in every chunk.
    const bool right = std::isfinite(without.out[row * row_size]);
    EXPECT_EQ(right, row < 17) << "row " << row;
  }
}

TEST_F(MaskMattersTest, FusedMergesNeedNoMask) {
  const Scenario scenario =
      make_scenario({5, 24, 8, 40, 48}, {{150, 17}, {20, 9}, {0, 5}}, 64, random());
  EngineConfig config = config_for(scenario, 96, 16);
  config.schedule = Schedule::kUniform;
  CarelessBackend careless(backend(), /*mask=*/false);
  const ScenarioResult result = run_scenario(careless, config, scenario);
  EXPECT_EQ(careless.num_masks, 0);
  EXPECT_TRUE(same_bits(result, run_scenario(backend(), config, scenario)));
}

}  // namespace
}  // namespace mla::test
