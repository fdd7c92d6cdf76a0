// What a layer call owes to CUDA: it can be captured, a captured call serves every plan of its
// class, plans are built while earlier ones are still being copied, and page offsets are 64 bits.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "kernels/cuda/check.h"
#include "tests/support/compare.h"
#include "tests/support/device_tensor.h"
#include "tests/support/test_backend.h"

namespace mla::test {
namespace {

constexpr ModelDims kDims = {5, 128, 64, 128, 512};
constexpr int32_t kPageSize = 16;
constexpr int32_t kPages = 400;

class CudaStream {
 public:
  CudaStream() { check_cuda(cudaStreamCreate(&stream_), "creating a stream"); }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cudaStream_t get() const { return stream_; }
  operator Stream() const { return {stream_}; }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_), "waiting for a stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// The launches of one call, to be made again.
class Graph {
 public:
  template <typename Call>
  Graph(cudaStream_t stream, const Call& call) : stream_(stream) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing");
    call();
    check_cuda(cudaStreamEndCapture(stream, &graph_), "ending the capture");
    check_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "instantiating the graph");
  }
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch() const { check_cuda(cudaGraphLaunch(executable_, stream_), "launching the graph"); }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

/// A batch whose requests hold pages of their own.
struct TestBatch {
  std::vector<int32_t> query_start_loc = {0};
  std::vector<int32_t> context_lens;
  std::vector<int32_t> table;
  int32_t max_pages = 0;

  int64_t tokens() const { return query_start_loc.back(); }

  TestBatch(const std::vector<int32_t>& query_lens, std::vector<int32_t> contexts,
            std::mt19937_64& random)
      : context_lens(std::move(contexts)) {
    for (int32_t length : query_lens) query_start_loc.push_back(query_start_loc.back() + length);
    std::vector<int32_t> ids(kPages);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    for (int32_t length : context_lens) {
      max_pages = std::max(max_pages, (length + kPageSize - 1) / kPageSize);
    }
    table.assign(ids.begin(), ids.begin() + max_pages * static_cast<int32_t>(context_lens.size()));
  }

  StepInputs step() const {
    StepInputs step;
    step.batch = {query_start_loc, context_lens};
    step.num_pages = kPages;
    step.host_block_table = {table.data(), static_cast<int32_t>(context_lens.size()), max_pages,
                             max_pages};
    step.reject_duplicate_pages = true;
    return step;
  }
};

class CudaLayerCallTest : public BackendTest {
 protected:
  void SetUp() override {
    BackendTest::SetUp();
    if (!IsSkipped() && on_cpu()) GTEST_SKIP() << "streams and graphs are the CUDA backend's";
  }

  EngineConfig config(int32_t workspace_tokens) const {
    EngineConfig config;
    config.dims = kDims;
    config.page_size = kPageSize;
    config.workspace_tokens = workspace_tokens;
    config.max_query_tokens = 96;
    config.max_requests = 8;
    return config;
  }

  /// One layer's tensors for up to `rows` new tokens; a cache of random rows. No new row is
  /// written to it.
  struct Tensors {
    DeviceTensor q, latent, weight, cache, out, lse;

    LayerParams layer() const {
      LayerParams layer;
      layer.q = q.const_heads();
      layer.kv_c = latent.const_rows();
      layer.k_pe = latent.const_rows(kDims.kv_lora_rank);
      layer.kv_b_proj = weight.const_rows().data;
      layer.kv_cache = {cache.rows().data,
                        KvCacheFormat::kBf16,
                        1.0f,
                        kPages,
                        kPageSize,
                        int64_t{kPageSize} * kDims.latent_dim() * 2};
      layer.out = out.heads();
      layer.lse = lse.lse();
      return layer;
    }
  };

  Tensors make_tensors(int64_t rows, double q_scale = 1.0) {
    constexpr DType kBf16 = DType::kBFloat16;
    const int64_t latent = kDims.latent_dim();
    const auto tensor = [&](const DeviceTensor::Shape& shape, double scale) {
      return DeviceTensor(backend(), kBf16, shape,
                          random_values(shape.rows * shape.heads * shape.dim, kBf16, scale));
    };
    return {
        tensor({.rows = rows, .heads = kDims.num_heads, .dim = kDims.qk_head_dim()}, q_scale),
        tensor({.rows = rows, .dim = latent}, 1.0),
        tensor({.rows = int64_t{kDims.num_heads} * kDims.kv_head_dim(), .dim = kDims.kv_lora_rank},
               0.04),
        tensor({.rows = int64_t{kPages} * kPageSize, .dim = latent}, 1.0),
        DeviceTensor(backend(), kBf16,
                     {.rows = rows, .heads = kDims.num_heads, .dim = kDims.v_head_dim}),
        DeviceTensor::lse(backend(), rows, kDims.num_heads)};
  }
};

TEST_F(CudaLayerCallTest, ACapturedCallServesEveryPlanOfItsClass) {
  const CudaStream stream;
  constexpr int64_t kRows = 96;
  Tensors tensors = make_tensors(kRows);
  const std::vector<std::byte> empty_out = tensors.out.image();
  const std::vector<std::byte> empty_lse = tensors.lse.image();

  for (const MergeMode merge : {MergeMode::kFused, MergeMode::kDiscrete}) {
    SCOPED_TRACE(merge_mode_name(merge));
    EngineConfig eager_config = config(128);
    eager_config.path = PathPolicy::kExpand;
    eager_config.merge = merge;
    EngineConfig class_config = eager_config;
    class_config.shape_class = {
        .max_requests = 6, .max_query_tokens = kRows, .max_chunks = 9, .max_pages = 24};
    const DeviceBuffer eager_workspace(backend(), workspace_bytes(eager_config, backend()));
    const DeviceBuffer class_workspace(backend(), workspace_bytes(class_config, backend()));
    Engine eager(eager_config, backend(), eager_workspace.span());
    Engine captured(class_config, backend(), class_workspace.span());
    for (const DeviceBuffer* workspace : {&eager_workspace, &class_workspace}) {
      backend().fill_bytes(workspace->data(), kPoison, workspace->bytes(), stream);
    }

    // Loads and caches everything on the way, so that the capture itself meets nothing new.
    captured.begin_step(TestBatch({1}, {1}, random()).step(), stream);
    captured.run_layer(tensors.layer(), stream);
    const Graph graph(stream.get(), [&] { captured.run_layer(tensors.layer(), stream); });

    for (const auto& [query_lens, contexts] :
         std::vector<std::pair<std::vector<int32_t>, std::vector<int32_t>>>{
             {{7, 0, 33, 1}, {384, 17, 0, 130}},
             {{96}, {0}},
             {{1, 1, 1, 1, 1, 1}, {384, 384, 100, 1, 0, 200}},
             {{}, {}},
             {{0, 5, 64, 0, 20}, {3, 0, 127, 129, 128}}}) {
      SCOPED_TRACE(::testing::PrintToString(query_lens));
      const TestBatch batch(query_lens, contexts, random());
      const auto values = [&](int64_t row_values) { return batch.tokens() * row_values; };
      const auto run = [&](const auto& call) {
        tensors.out.restore(empty_out);
        tensors.lse.restore(empty_lse);
        call();
        stream.wait();
        return std::pair(tensors.out.download(), tensors.lse.download());
      };
      const auto expected = run([&] {
        eager.begin_step(batch.step(), stream);
        eager.run_layer(tensors.layer(), stream);
      });
      const auto found = run([&] {
        captured.begin_step(batch.step(), stream);
        graph.launch();
      });
      const int64_t out_values = values(int64_t{kDims.num_heads} * kDims.v_head_dim);
      const int64_t lse_values = values(kDims.num_heads);
      EXPECT_TRUE(same_bits(std::span(found.first).first(out_values),
                            std::span(expected.first).first(out_values)));
      EXPECT_TRUE(same_bits(std::span(found.second).first(lse_values),
                            std::span(expected.second).first(lse_values)));
      for (size_t i = out_values; i < found.first.size(); ++i) ASSERT_EQ(found.first[i], 0.0f);
      for (size_t i = lse_values; i < found.second.size(); ++i) {
        ASSERT_EQ(found.second[i], -INFINITY);
      }
    }
    expect_refused([&] { captured.begin_step(TestBatch({97}, {0}, random()).step(), stream); },
                   "a step outside the class");
  }
}

// With queries of 0 a row's LSE is the log of its number of keys, so that a step which read
// another step's plan shows.
TEST_F(CudaLayerCallTest, AThousandStepsBehindADelayedStream) {
  constexpr int kSteps = 1000;
  constexpr int64_t kRows = 8;
  const CudaStream stream;
  const Tensors tensors = make_tensors(kRows, /*q_scale=*/0.0);
  const DeviceTensor lse = DeviceTensor::lse(backend(), kSteps * kRows, kDims.num_heads);
  const EngineConfig engine_config = config(64);
  const DeviceBuffer workspace(backend(), workspace_bytes(engine_config, backend()));
  Engine engine(engine_config, backend(), workspace.span());
  const auto context_of = [](int step) {
    return std::vector<int32_t>{step % 7 * 31, step * 13 % 250};
  };
  const auto batch_of = [&](int step) { return TestBatch({5, 3}, context_of(step), random()); };
  engine.begin_step(batch_of(4).step(), stream);  // the ring grows to what these plans need
  stream.wait();

  static std::atomic<bool> delayed;
  delayed = true;
  check_cuda(cudaLaunchHostFunc(
                 stream.get(),
                 [](void*) {
                   std::this_thread::sleep_for(std::chrono::milliseconds(300));
                   delayed = false;
                 },
                 nullptr),
             "delaying the stream");
  for (int s = 0; s < kSteps; ++s) {
    LayerParams layer = tensors.layer();
    layer.lse = lse.lse();
    layer.lse.data += s * kRows * layer.lse.row_stride;
    engine.begin_step(batch_of(s).step(), stream);
    engine.run_layer(layer, stream);
    // The first plan's copy is still to come; the second is built all the same.
    if (s == 1) {
      EXPECT_TRUE(delayed);
    }
  }
  stream.wait();

  const std::vector<float> found = lse.download();
  for (int s = 0; s < kSteps; ++s) {
    const std::vector<int32_t> contexts = context_of(s);
    for (int64_t row = 0; row < kRows; ++row) {
      const int64_t keys = row < 5 ? contexts[0] + row + 1 : contexts[1] + row - 4;
      for (int64_t h = 0; h < kDims.num_heads; ++h) {
        ASSERT_NEAR(found[(s * kRows + row) * kDims.num_heads + h],
                    std::log(static_cast<double>(keys)), 1e-5)
            << "step " << s << " row " << row;
      }
    }
  }
}

// 2^33 elements of cache, of which a few pages past 2^31 and 2^32 are written and read.
TEST_F(CudaLayerCallTest, PagesPastTwoToTheThirtyTwoElements) {
  constexpr int64_t kLatent = 576;
  constexpr int32_t kBigPage = 64;
  constexpr int64_t kPageElements = kBigPage * kLatent;
  constexpr auto kNumPages = static_cast<int32_t>((int64_t{1} << 33) / kPageElements);
  const DeviceBuffer memory(backend(), size_t{kNumPages} * kPageElements * 2);
  const LatentCache cache = {memory.data(), KvCacheFormat::kBf16, 1.0f, kNumPages,
                             kBigPage,      kPageElements * 2};
  const std::vector<int32_t> pages = {
      static_cast<int32_t>((int64_t{1} << 31) / kPageElements) + 1, 3,
      static_cast<int32_t>((int64_t{1} << 32) / kPageElements) + 1, kNumPages - 1};
  const auto rows = static_cast<int64_t>(pages.size()) * kBigPage;
  const std::vector<float> values = random_values(rows * kLatent, DType::kBFloat16);
  const DeviceTensor latent(backend(), DType::kBFloat16, {.rows = rows, .dim = kLatent}, values);
  const DeviceTensor gathered(backend(), DType::kBFloat16, {.rows = rows, .dim = kLatent});

  std::vector<int64_t> slots;
  for (int32_t page : pages) {
    for (int32_t i = 0; i < kBigPage; ++i) slots.push_back(int64_t{page} * kBigPage + i);
  }
  const std::vector<int32_t> span = {0, 0, static_cast<int32_t>(rows)};  // a start, two offsets
  const auto upload = [&](const auto& host) {
    DeviceBuffer buffer(backend(), host.size() * sizeof(host[0]));
    backend().copy_to_device(buffer.data(), host.data(), buffer.bytes(), {});
    return buffer;
  };
  const DeviceBuffer device_slots = upload(slots);
  const DeviceBuffer device_pages = upload(pages);
  const DeviceBuffer device_span = upload(span);

  WriteLatentCacheParams write;
  write.kv_lora_rank = kDims.kv_lora_rank;
  write.qk_rope_head_dim = kDims.qk_rope_head_dim;
  write.kv_c = latent.const_rows();
  write.k_pe = latent.const_rows(kDims.kv_lora_rank);
  write.slot_mapping = static_cast<const int64_t*>(device_slots.data());
  write.num_tokens = {rows};
  write.kv_cache = cache;
  backend().write_latent_cache(write, op_context());

  GatherLatentParams gather;
  gather.kv_lora_rank = kDims.kv_lora_rank;
  gather.qk_rope_head_dim = kDims.qk_rope_head_dim;
  gather.kv_cache = as_const(cache);
  gather.block_table = static_cast<const int32_t*>(device_pages.data());
  gather.block_table_stride = static_cast<int64_t>(pages.size());
  gather.starts = static_cast<const int32_t*>(device_span.data());
  gather.cu_seq_lens = gather.starts + 1;
  gather.num_spans = {1};
  gather.num_rows = {rows};
  gather.latent = gathered.rows();
  backend().gather_latent(gather, op_context());
  backend().synchronize({});
  EXPECT_TRUE(same_bits(gathered.download(), values));
}

}  // namespace
}  // namespace mla::test
