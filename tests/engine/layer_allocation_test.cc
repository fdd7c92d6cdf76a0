// A layer call on the CPU takes no heap memory once its ops have run. A binary of its own: it
// counts every allocation of the program.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>

#include "tests/engine/scenario.h"
#include "tests/support/test_backend.h"

namespace {
std::atomic<int64_t> allocations = 0;
}

void* operator new(size_t bytes) {
  ++allocations;
  if (void* data = std::malloc(bytes)) return data;
  throw std::bad_alloc();
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace mla::test {
namespace {

class LayerAllocationTest : public BackendTest {};

TEST_F(LayerAllocationTest, SteadyStateAllocatesNothing) {
  if (!on_cpu()) GTEST_SKIP() << "of the CPU backend";
  const Scenario scenario = make_scenario({5, 24, 8, 40, 48}, {{90, 20}, {0, 33}, {40, 1}}, 64,
                                          random(), /*num_layers=*/2);
  for (const KvCacheFormat format : {KvCacheFormat::kBf16, KvCacheFormat::kFp8E4M3}) {
    for (const MergeMode merge : {MergeMode::kFused, MergeMode::kDiscrete}) {
      for (const PathPolicy path : {PathPolicy::kExpand, PathPolicy::kAbsorb}) {
        EngineConfig config = config_for(scenario, 32, 16);
        config.kv_cache_format = format;
        config.merge = merge;
        config.path = path;
        SCOPED_TRACE(describe(config));
        int64_t last = -1;
        RunOptions options;
        options.around_layer = [&](const std::function<void()>& run) {
          const int64_t before = allocations;
          run();
          last = allocations - before;
        };
        run_scenario(backend(), config, scenario, options);
        EXPECT_EQ(last, 0);
      }
    }
  }
}

}  // namespace
}  // namespace mla::test
