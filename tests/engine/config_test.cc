#include "engine/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <iterator>
#include <string>

#include "engine/engine.h"
#include "kernels/forwarding_backend.h"
#include "metadata/error.h"
#include "tests/engine/engine_harness.h"

namespace mla::test {
namespace {

class ConfigTest : public EngineHarnessTest {};

class ExpandOnlyBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  bool supports_path(const ModelDims&, Path path) const override { return path == Path::kExpand; }
};

TEST_F(ConfigTest, MergeModesHaveNames) {
  EXPECT_EQ(find_merge_mode("fused"), MergeMode::kFused);
  EXPECT_EQ(find_merge_mode(merge_mode_name(MergeMode::kDiscrete)), MergeMode::kDiscrete);
  expect_refused([] { find_merge_mode("Fused"); }, "an unknown merge mode");
}

TEST_F(ConfigTest, WorkspaceIsTheSumOfItsParts) {
  EngineConfig c = config();
  c.workspace_tokens = 33;
  c.path = PathPolicy::kExpand;
  // H 3, P 24, Rr 8, V 40, L 48; W 33; T 48. Each part is rounded up to 256.
  WorkspaceLayout layout = workspace_layout(c, backend());
  EXPECT_EQ(layout.latent, 3840u);        // 33 * 56 * 2 = 3,696
  EXPECT_EQ(layout.expanded, 12800u);     // 33 * 192 * 2 = 12,672
  EXPECT_EQ(layout.partial_out, 23040u);  // 48 * 120 * 4
  EXPECT_EQ(layout.partial_lse, 768u);    // 48 * 3 * 4 = 576
  EXPECT_EQ(layout.chunk_out + layout.chunk_lse + layout.absorbed, 0u);
  EXPECT_EQ(layout.scratch % 256, 0u);
  EXPECT_EQ(layout.total, 3840 + 12800 + 23040 + 768 + layout.scratch);
  EXPECT_EQ(workspace_bytes(c, backend()), layout.total);

  c.path = PathPolicy::kAuto;  // 256 rows of 3 * 56 * 2, 3 * 48 * 4, 3 * 40 * 4, 3 * 4 bytes
  layout = workspace_layout(c, backend());
  EXPECT_EQ(layout.absorbed, 172032u + 147456u + 122880u + 3072u);
  c.merge = MergeMode::kDiscrete;
  layout = workspace_layout(c, backend());
  EXPECT_EQ(layout.chunk_out, layout.partial_out);
  EXPECT_EQ(layout.chunk_lse, layout.partial_lse);
  EXPECT_EQ(layout.absorbed, 172032u + 147456u);
  EXPECT_EQ(layout.total, 3840 + 12800 + 2 * (23040 + 768) + layout.absorbed + layout.scratch);
}

TEST_F(ConfigTest, AWorkspaceOneByteShortIsRefused) {
  const size_t bytes = workspace_bytes(config(), backend());
  const DeviceBuffer workspace(backend(), bytes + 256);
  Engine(config(), backend(), workspace.span().first(bytes));
  expect_refused([&] { Engine(config(), backend(), workspace.span().first(bytes - 1)); },
                 "a short workspace");
  expect_refused([&] { Engine(config(), backend(), workspace.span().subspan(16)); },
                 "a workspace off by 16 bytes");
}

TEST_F(ConfigTest, AnEngineStartsNoThread) {
  if (!on_cpu()) GTEST_SKIP() << "a CUDA driver has threads of its own";
  const auto count_threads = [] {
    return std::ranges::distance(std::filesystem::directory_iterator("/proc/self/task"));
  };
  const auto before = count_threads();
  const Tensors tensors(*this);
  const DeviceBuffer workspace(backend(), workspace_bytes(config(), backend()));
  Engine engine(config(), backend(), workspace.span());
  const Step step(backend(), {5, 7}, {40, 16});
  engine.begin_step(step.inputs);
  engine.run_layer(tensors.params());
  EXPECT_EQ(count_threads(), before);
}

TEST_F(ConfigTest, BadConfigsAreRefusedByName) {
  struct Bad {
    std::string word;
    std::function<void(EngineConfig&)> spoil;
  };
  const std::vector<Bad> all = {
      {"heads", [](EngineConfig& c) { c.dims.num_heads = 0; }},
      {"v_head_dim", [](EngineConfig& c) { c.dims.v_head_dim = 41; }},
      {"nan", [](EngineConfig& c) { c.softmax_scale = NAN; }},
      {"-1", [](EngineConfig& c) { c.softmax_scale = -1.0f; }},
      {"fp8_ds_mla", [](EngineConfig& c) { c.kv_cache_format = KvCacheFormat::kFp8DsMla; }},
      {"page_size", [](EngineConfig& c) { c.page_size = 0; }},
      {"15", [](EngineConfig& c) { c.workspace_tokens = 15; }},
      {"split_tokens", [](EngineConfig& c) { c.split_tokens = 17; }},
      {"split_tokens", [](EngineConfig& c) { c.split_tokens = 48; }},
      {"max_query_tokens", [](EngineConfig& c) { c.max_query_tokens = 0; }},
      {"max_requests", [](EngineConfig& c) { c.max_requests = 0; }},
      {"rank", [](EngineConfig& c) { c.shard.rank = 1; }},
      {"9",
       [](EngineConfig& c) {
         c.shape_class = {9, 48, 4, 4};
       }},
      {"49",
       [](EngineConfig& c) {
         c.shape_class = {8, 49, 4, 4};
       }},
      {"-2",
       [](EngineConfig& c) {
         c.shape_class = {8, 48, -2, 4};
       }},
      {"absorb",
       [](EngineConfig& c) {
         c.shape_class = {8, 48, 4, 4};
         c.path = PathPolicy::kAbsorb;
       }},
      {"48",
       [](EngineConfig& c) {
         c.shape_class = {8, 48, 4, 4};
         c.schedule = Schedule::kFixed;
       }},
  };
  for (const Bad& bad : all) {
    EngineConfig c = config();
    bad.spoil(c);
    try {
      workspace_bytes(c, backend());
      ADD_FAILURE() << "accepted: " << bad.word;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(bad.word), std::string::npos) << error.what();
    }
  }
}

TEST_F(ConfigTest, AutoExpandsWhereAbsorbingIsNotServed) {
  ExpandOnlyBackend expand_only(backend());
  EngineConfig c = config();
  EXPECT_EQ(plan_config(c, backend()).path, PathPolicy::kAuto);
  EXPECT_EQ(plan_config(c, expand_only).path, PathPolicy::kExpand);
  EXPECT_EQ(workspace_layout(c, expand_only).absorbed, 0u);
  c.path = PathPolicy::kAbsorb;
  expect_refused([&] { validate_config(c, expand_only); }, "absorb without a kernel");
  c.path = PathPolicy::kAuto;
  c.shape_class = {8, 48, 4, 4};
  EXPECT_EQ(plan_config(c, backend()).path, PathPolicy::kExpand);
}

}  // namespace
}  // namespace mla::test
