// Shape classes: every step of a class makes the same launches, and the same results as without.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/forwarding_backend.h"
#include "tests/engine/engine_harness.h"
#include "tests/engine/scenario.h"
#include "tests/support/compare.h"

namespace mla::test {
namespace {

class ShapeClassTest : public EngineHarnessTest {};

TEST_F(ShapeClassTest, SameBitsAsWithoutAndEmptyPadding) {
  // The second step ends early: its prompts leave rows of the class unused.
  const Scenario scenario =
      make_scenario(kDims, {{70, 30}, {0, 25}, {33, 1}, {20, 0}, {64, 40}}, 60, random());
  ASSERT_EQ(scenario.steps.size(), 2u);
  for (const Schedule schedule : {Schedule::kPacked, Schedule::kUniform, Schedule::kFixed}) {
    for (const MergeMode merge : {MergeMode::kFused, MergeMode::kDiscrete}) {
      for (const int32_t w : {48, 128}) {
        if (schedule == Schedule::kFixed && w < 64) continue;  // see EngineConfig::shape_class
        EngineConfig config = config_for(scenario, w, 16);
        config.max_query_tokens = 80;
        config.max_requests = 9;
        config.schedule = schedule;
        config.merge = merge;
        config.path = PathPolicy::kExpand;
        SCOPED_TRACE(describe(config));
        const ScenarioResult eager = run_scenario(backend(), config, scenario);
        config.shape_class = {
            .max_requests = 7, .max_query_tokens = 64, .max_chunks = 14, .max_pages = 12};
        ScenarioResult in_class = run_scenario(backend(), config, scenario);

        for (size_t s = 0; s < in_class.size(); ++s) {
          LayerResult& result = in_class[s][0];
          const size_t rows = scenario.num_tokens(s) * kDims.num_heads;
          ASSERT_EQ(result.lse.size(), 64u * kDims.num_heads);
          for (size_t i = rows; i < result.lse.size(); ++i) {
            ASSERT_EQ(result.lse[i], -INFINITY);
            for (int32_t d = 0; d < kDims.v_head_dim; ++d) {
              ASSERT_EQ(result.out[i * kDims.v_head_dim + d], 0.0f);
            }
          }
          result.lse.resize(rows);
          result.out.resize(rows * kDims.v_head_dim);
        }
        EXPECT_TRUE(same_bits(in_class, eager));
        config.shape_class.max_chunks = 1;  // the first step needs more
        expect_refused([&] { run_scenario(backend(), config, scenario); }, "too many chunks");
      }
    }
  }
}

/// Writes down what a graph would capture: ops, pointers, capacities and bounds.
class RecordingBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;

  void write_latent_cache(const WriteLatentCacheParams& p, const OpContext& c) override {
    note("write", p.kv_c.data, p.k_pe.data, p.slot_mapping, p.num_tokens);
    backend_.write_latent_cache(p, c);
  }
  void gather_latent(const GatherLatentParams& p, const OpContext& c) override {
    note("gather", p.block_table, p.block_table_stride, p.starts, p.cu_seq_lens, p.num_spans,
         p.num_rows, p.latent.data);
    backend_.gather_latent(p, c);
  }
  void expand(const ExpandParams& p, const OpContext& c) override {
    note("expand", p.latent.data, p.expanded.data, p.num_rows);
    backend_.expand(p, c);
  }
  void prefill_attention(const PrefillAttentionParams& p, const OpContext& c) override {
    note("attend", p.q.data, p.k_nope.data, p.k_pe.data, p.v.data, p.q_rows, p.k_rows, p.items,
         p.num_items, p.max_q_len, p.max_k_len, p.prefix_out.data, p.out.data, p.lse.data);
    backend_.prefill_attention(p, c);
  }
  void mask_empty_context(const MaskEmptyContextParams& p, const OpContext& c) override {
    note("mask", p.query_start_loc, p.context_start_loc, p.num_requests, p.first_token,
         p.max_query_len, p.output.data, p.lse.data);
    backend_.mask_empty_context(p, c);
  }
  void merge_attn_states(const MergeAttnStatesParams& p, const OpContext& c) override {
    note("merge", p.num_tokens, p.prefix_out.data, p.suffix_out.data, p.output.data,
         p.output_lse.data);
    backend_.merge_attn_states(p, c);
  }
  void clear_partial(const ClearPartialParams& p, const OpContext& c) override {
    note("clear", p.num_tokens, p.lse.data);
    backend_.clear_partial(p, c);
  }

  std::vector<std::string> take() { return std::exchange(launches_, {}); }

 private:
  template <typename... Values>
  void note(const char* op, const Values&... values) {
    std::string line = op;
    ((line += " " + text(values)), ...);
    launches_.push_back(line);
  }
  static std::string text(const void* pointer) { return fmt::format("{}", pointer); }
  static std::string text(int64_t value) { return std::to_string(value); }
  static std::string text(const Count& count) {
    return text(count.capacity) + "@" + text(static_cast<const void*>(count.actual));
  }

  std::vector<std::string> launches_;
};

TEST_F(ShapeClassTest, EveryStepMakesTheSameLaunches) {
  RecordingBackend recording(backend());
  const Tensors tensors(*this);
  const Step large(backend(), {20, 1, 0, 25}, {100, 40, 16, 7});
  const Step small(backend(), {3}, {33});
  const Step no_context(backend(), {40, 2}, {0, 0});
  for (const Schedule schedule : {Schedule::kPacked, Schedule::kUniform}) {
    for (const MergeMode merge : {MergeMode::kFused, MergeMode::kDiscrete}) {
      EngineConfig c = config();
      c.schedule = schedule;
      c.merge = merge;
      c.shape_class = {
          .max_requests = 4, .max_query_tokens = kRows, .max_chunks = 8, .max_pages = 7};
      SCOPED_TRACE(describe(c));
      const DeviceBuffer workspace(backend(), workspace_bytes(c, backend()));
      backend().fill_bytes(workspace.data(), kPoison, workspace.bytes(), {});
      Engine engine(c, recording, workspace.span());
      LayerParams params = tensors.params();
      std::vector<std::string> captured;
      for (const Step* step : {&small, &large, &no_context, &small}) {
        StepInputs inputs = step->inputs;
        inputs.slot_mapping = large.inputs.slot_mapping;  // a graph's buffers stay where they are
        inputs.host_slot_mapping = {};
        engine.begin_step(inputs);
        engine.run_layer(params);
        backend().synchronize({});
        const std::vector<std::string> launches = recording.take();
        if (captured.empty()) captured = launches;
        ASSERT_EQ(launches.size(), captured.size());
        for (size_t i = 0; i < launches.size(); ++i) EXPECT_EQ(launches[i], captured[i]);
      }
      EXPECT_GT(captured.size(), 8u * 3);
    }
  }
}

}  // namespace
}  // namespace mla::test
