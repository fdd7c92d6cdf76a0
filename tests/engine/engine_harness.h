// One engine with small tensors at hand, for suites that call it directly.
#ifndef TESTS_ENGINE_ENGINE_HARNESS_H_
#define TESTS_ENGINE_ENGINE_HARNESS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/paged_cache.h"
#include "tests/support/device_tensor.h"
#include "tests/support/test_backend.h"

namespace mla::test {

class EngineHarnessTest : public BackendTest {
 protected:
  static constexpr ModelDims kDims{3, 24, 8, 40, 48};
  static constexpr int32_t kRows = 48;  // of every tensor
  static constexpr int32_t kPages = 40;
  static constexpr int32_t kPageSize = 16;

  /// Tensors for at most kRows tokens; outputs are poison.
  struct Tensors {
    explicit Tensors(EngineHarnessTest& test)
        : q(make(test, kDims.num_heads, kDims.qk_head_dim())),
          kv_c(make(test, 1, kDims.kv_lora_rank)),
          k_pe(make(test, 1, kDims.qk_rope_head_dim)),
          weight(make(test, 1, kDims.kv_lora_rank, kDims.num_heads * kDims.kv_head_dim())),
          out(test.backend(), DType::kBFloat16,
              {.rows = kRows, .heads = kDims.num_heads, .dim = kDims.v_head_dim}),
          lse(DeviceTensor::lse(test.backend(), kRows, kDims.num_heads)),
          storage(test.backend(), kDims, KvCacheFormat::kBf16, 1.0f, kPages, kPageSize, 1) {
      // All cached rows hold values, so that any page will do as context.
      const LatentCache cache = storage.layer(0);
      const std::vector<uint16_t> rows(kPages * cache.page_stride / 2, 0x3e80);  // 0.25
      test.backend().copy_to_device(cache.data, rows.data(), rows.size() * 2, {});
      test.backend().synchronize({});
    }
    static DeviceTensor make(EngineHarnessTest& test, int64_t heads, int64_t dim,
                             int64_t rows = kRows) {
      return DeviceTensor(test.backend(), DType::kBFloat16,
                          {.rows = rows, .heads = heads, .dim = dim},
                          test.random_values(rows * heads * dim, DType::kBFloat16));
    }
    LayerParams params() const {
      LayerParams params;
      params.q = q.const_heads();
      params.kv_c = kv_c.const_rows();
      params.k_pe = k_pe.const_rows();
      params.kv_b_proj = weight.rows().data;
      params.kv_cache = storage.layer(0);
      params.out = out.heads();
      params.lse = lse.lse();
      return params;
    }
    std::vector<std::byte> cache_image(Backend& backend) const {
      const LatentCache cache = storage.layer(0);
      std::vector<std::byte> bytes(kPages * cache.page_stride);
      backend.copy_to_host(bytes.data(), cache.data, bytes.size(), {});
      backend.synchronize({});
      return bytes;
    }

    DeviceTensor q, kv_c, k_pe, weight, out, lse;
    LatentCacheStorage storage;
  };

  /// A step's inputs; slots and pages are consecutive.
  struct Step {
    Step(Backend& backend, std::vector<int32_t> query_lens, std::vector<int32_t> contexts)
        : context_lens(std::move(contexts)) {
      int32_t max_pages = 1;
      for (const int32_t context : context_lens) {
        max_pages = std::max(max_pages, (context + kPageSize - 1) / kPageSize);
      }
      int32_t next_page = 0;
      for (size_t r = 0; r < query_lens.size(); ++r) {
        query_start_loc.push_back(query_start_loc.back() + query_lens[r]);
        for (int32_t i = 0; i < max_pages; ++i) {
          table.push_back(i * kPageSize < context_lens[r] ? next_page++ : -1);
        }
      }
      for (int32_t i = 0; i < kRows; ++i) slots.push_back((kPages - 4) * kPageSize + i);
      slots.resize(query_start_loc.back());
      device_slots.emplace(backend, slots);
      inputs.batch = {query_start_loc, context_lens};
      inputs.num_pages = kPages;
      inputs.host_block_table = {table.data(), static_cast<int32_t>(query_lens.size()), max_pages,
                                 max_pages};
      inputs.reject_duplicate_pages = true;
      inputs.slot_mapping = device_slots->data();
      inputs.host_slot_mapping = slots;
    }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

    std::vector<int32_t> query_start_loc = {0};
    std::vector<int32_t> context_lens, table;
    std::vector<int64_t> slots;
    std::optional<DeviceArray<int64_t>> device_slots;
    StepInputs inputs;
  };

  static EngineConfig config() {
    EngineConfig config;
    config.dims = kDims;
    config.page_size = kPageSize;
    config.workspace_tokens = 32;
    config.max_query_tokens = kRows;
    config.max_requests = 8;
    return config;
  }
};

}  // namespace mla::test

#endif  // TESTS_ENGINE_ENGINE_HARNESS_H_
