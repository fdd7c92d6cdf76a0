// Times the ops of the CUDA backend that move memory, and the expansion, against the device's own
// copy bandwidth, measured in the same run.
//
//   ops_gpu_bench [--json ops.json] [--commit HASH] [--filter merge]
//
// Each op is checked on sampled values before it is timed; exit code 1 where a check fails. Long
// ops: median of single launches with the L2 flushed before each. Short ops: median over replays of
// a CUDA graph of 20 calls, divided by 20; the calls go round several sets of buffers, or, "in L2",
// find their data where the attention before would have left it.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/convert.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/lse.h"
#include "metadata/error.h"

namespace mla::bench {
namespace {

constexpr int kRepetitions = 21;
constexpr int kGraphCalls = 20;
constexpr size_t kFlushBytes = size_t{256} << 20;  // several times the L2

struct Result {
  std::string name;
  std::string shape;
  double bytes = 0;    // read and written, each once
  double flops = 0;    // 0: bandwidth is what counts
  double peer_ms = 0;  // 0: no figure of a peer
  bool short_op = false;
};

/// Device memory with random contents: a host block of normal values, repeated.
class Inputs {
 public:
  explicit Inputs(Backend& backend) : backend_(backend) {
    std::mt19937_64 random{std::random_device{}()};
    std::normal_distribution<float> normal;
    floats_.resize(1 << 20);
    for (float& x : floats_) x = normal(random);
    for (const float x : floats_) bf16_.push_back(float_to_bf16(x));
  }
  DeviceBuffer bf16(int64_t count) { return filled(count, bf16_); }
  DeviceBuffer floats(int64_t count) { return filled(count, floats_); }
  template <typename T>
  DeviceBuffer copy(const std::vector<T>& values) {
    DeviceBuffer buffer(backend_, values.size() * sizeof(T));
    backend_.copy_to_device(buffer.data(), values.data(), buffer.bytes(), {});
    backend_.synchronize({});
    return buffer;
  }

 private:
  template <typename T>
  DeviceBuffer filled(int64_t count, const std::vector<T>& block) {
    DeviceBuffer buffer(backend_, count * sizeof(T));
    const int64_t size = static_cast<int64_t>(block.size());
    for (int64_t at = 0; at < count; at += size) {
      backend_.copy_to_device(static_cast<T*>(buffer.data()) + at, block.data(),
                              std::min(size, count - at) * sizeof(T), {});
    }
    backend_.synchronize({});
    return buffer;
  }

  Backend& backend_;
  std::vector<float> floats_;
  std::vector<uint16_t> bf16_;
};

class Bench {
 public:
  Bench(Backend& backend, std::string filter)
      : backend_(backend), inputs_(backend), filter_(std::move(filter)) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
    check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
    flush_ = DeviceBuffer(backend, kFlushBytes);
    measure_copy();
  }

  Backend& backend() { return backend_; }
  Inputs& inputs() { return inputs_; }
  OpContext context() { return {Stream{stream_}, {}}; }
  bool wanted(std::string_view name) const { return name.find(filter_) != std::string_view::npos; }
  const nlohmann::json& results() const { return results_; }
  bool failed() const { return failed_; }

  template <typename T>
  std::vector<T> download(const void* data, int64_t count) {
    std::vector<T> values(count);
    backend_.synchronize(Stream{stream_});
    backend_.copy_to_host(values.data(), data, count * sizeof(T), {});
    backend_.synchronize({});
    return values;
  }

  void expect(bool right, const std::string& what) {
    if (right) return;
    failed_ = true;
    fmt::print("WRONG: {}\n", what);
  }

  /// `call(i)` enqueues call i on context()'s stream, with the i-th set of buffers in turn.
  void time(const Result& result, const std::function<void(int)>& call) {
    for (int i = 0; i < 3; ++i) call(i);
    const double ms = result.short_op ? graph_ms(call) : flushed_ms(call);
    const double gbps = result.bytes / ms / 1e6;
    const auto or_null = [](double wanted, double value) {
      return wanted == 0 ? nlohmann::json() : nlohmann::json(value);
    };
    results_.push_back({{"name", result.name},
                        {"shape", result.shape},
                        {"ms", ms},
                        {"tflops", or_null(result.flops, result.flops / ms / 1e9)},
                        {"gbps", or_null(result.bytes, gbps)},
                        {"floor_fraction", or_null(result.bytes, gbps / copy_gbps_)},
                        {"peer_ratio", or_null(result.peer_ms, result.peer_ms / ms)}});
    fmt::print("{:<22} {:<44} {:>9.2f} us  {:>6.0f} GB/s  {:>5.2f} of copy  {:>5.0f} TFLOP/s\n",
               result.name, result.shape, ms * 1e3, gbps, gbps / copy_gbps_,
               result.flops / ms / 1e9);
  }

 private:
  double elapsed_ms(const std::function<void()>& work) {
    check_cuda(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    work();
    check_cuda(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end_), "timed work");
    float ms = 0.0f;
    check_cuda(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return ms;
  }

  static double median(std::vector<double> times) {
    std::ranges::nth_element(times, times.begin() + times.size() / 2);
    return times[times.size() / 2];
  }

  double flushed_ms(const std::function<void(int)>& call) {
    std::vector<double> times;
    for (int i = 0; i < kRepetitions; ++i) {
      backend_.fill_bytes(flush_.data(), static_cast<uint8_t>(i), flush_.bytes(), Stream{stream_});
      times.push_back(elapsed_ms([&] { call(i); }));
    }
    return median(times);
  }

  double graph_ms(const std::function<void(int)>& call) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < kGraphCalls; ++i) call(i);
    check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    std::vector<double> times;
    for (int i = 0; i < kRepetitions + 3; ++i) {
      const double ms =
          elapsed_ms([&] { check_cuda(cudaGraphLaunch(executable, stream_), "cudaGraphLaunch"); });
      if (i >= 3) times.push_back(ms / kGraphCalls);
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    return median(times);
  }

  void measure_copy() {
    constexpr size_t kBytes = size_t{2} << 30;
    const DeviceBuffer from = inputs_.floats(kBytes / sizeof(float));
    const DeviceBuffer to(backend_, kBytes);
    const auto copy = [&](int) {
      check_cuda(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream_),
                 "copying on the device");
    };
    copy(0);
    copy_gbps_ = 2.0 * kBytes / flushed_ms(copy) / 1e6;
    time({.name = "device_copy", .shape = "2 GiB", .bytes = 2.0 * kBytes}, copy);
  }

  Backend& backend_;
  Inputs inputs_;
  std::string filter_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  DeviceBuffer flush_;
  double copy_gbps_ = 1.0;
  nlohmann::json results_ = nlohmann::json::array();
  bool failed_ = false;
};

/// Sets of buffers to go round, so that a short op's data does not stay in the L2.
int buffer_sets(double bytes) { return static_cast<int>(std::clamp(2e8 / bytes, 1.0, 10.0)); }

enum class Data { kFlushed, kRotated, kInCache };

void bench_merge(Bench& bench, int64_t tokens, int64_t heads, DType prefix_type, double peer_ms,
                 Data data) {
  constexpr int64_t kDim = 128;
  const int64_t values = tokens * heads * kDim;
  const double bytes = values * (dtype_bytes(prefix_type) + 4.0) + tokens * heads * 12.0;
  const int sets = data == Data::kRotated ? buffer_sets(bytes) : 1;
  const auto prefix_values = [&] {
    return prefix_type == DType::kFloat32 ? bench.inputs().floats(values)
                                          : bench.inputs().bf16(values);
  };
  std::vector<DeviceBuffer> prefix, suffix, output, prefix_lse, suffix_lse, output_lse;
  for (int i = 0; i < sets; ++i) {
    prefix.push_back(prefix_values());
    suffix.push_back(bench.inputs().bf16(values));
    output.emplace_back(bench.backend(), values * 2);
    prefix_lse.push_back(bench.inputs().floats(tokens * heads));
    suffix_lse.push_back(bench.inputs().floats(tokens * heads));
    output_lse.emplace_back(bench.backend(), tokens * heads * 4);
  }
  const auto call = [&](int i) {
    const int s = i % sets;
    MergeAttnStatesParams p;
    p.num_heads = static_cast<int32_t>(heads);
    p.head_dim = kDim;
    p.num_tokens = {tokens};
    p.prefix_out = {prefix[s].data(), prefix_type, heads * kDim, kDim};
    p.suffix_out = {suffix[s].data(), DType::kBFloat16, heads * kDim, kDim};
    p.output = {output[s].data(), DType::kBFloat16, heads * kDim, kDim};
    p.prefix_lse = {static_cast<float*>(prefix_lse[s].data()), tokens};
    p.suffix_lse = {static_cast<float*>(suffix_lse[s].data()), tokens};
    p.output_lse = {static_cast<float*>(output_lse[s].data()), tokens};
    bench.backend().merge_attn_states(p, bench.context());
  };
  call(0);
  const int64_t at = values - kDim;  // the last row
  const auto lse = [&](const DeviceBuffer& buffer) {
    return bench.download<float>(buffer.data(), tokens * heads).back();
  };
  const MergeWeights weights = merge_weights(lse(prefix_lse[0]), lse(suffix_lse[0]));
  const float p = prefix_type == DType::kFloat32
                      ? bench.download<float>(prefix[0].data(), values)[at]
                      : bf16_to_float(bench.download<uint16_t>(prefix[0].data(), values)[at]);
  const float s = bf16_to_float(bench.download<uint16_t>(suffix[0].data(), values)[at]);
  const float found = bf16_to_float(bench.download<uint16_t>(output[0].data(), values)[at]);
  const float exact = merge_values(weights, p, s);
  bench.expect(std::fabs(found - exact) <= 0.004f * std::fabs(exact) + 1e-6f, "merge_attn_states");
  bench.time(
      {.name = "merge_attn_states",
       .shape = fmt::format("T {} H {} V 128, {} prefix, bf16 suffix and output{}", tokens, heads,
                            dtype_name(prefix_type), data == Data::kInCache ? ", in L2" : ""),
       .bytes = bytes,
       .peer_ms = peer_ms,
       .short_op = data != Data::kFlushed},
      call);
}

/// Request `empty` alone has no context.
void bench_mask(Bench& bench, const std::vector<int32_t>& query_lens, size_t empty, int64_t heads,
                int64_t dim, double peer_ms) {
  std::vector<int32_t> queries(query_lens.size() + 1), contexts(query_lens.size() + 1);
  std::partial_sum(query_lens.begin(), query_lens.end(), queries.begin() + 1);
  for (size_t r = 0; r < query_lens.size(); ++r)
    contexts[r + 1] = contexts[r] + (r == empty ? 0 : 4);
  const int64_t tokens = queries.back();
  const DeviceBuffer query_start_loc = bench.inputs().copy(queries);
  const DeviceBuffer context_start_loc = bench.inputs().copy(contexts);
  const DeviceBuffer output = bench.inputs().bf16(tokens * heads * dim);
  const DeviceBuffer lse = bench.inputs().floats(tokens * heads);
  const auto before = bench.download<uint16_t>(output.data(), tokens * heads * dim);
  const auto call = [&](int) {
    MaskEmptyContextParams p;
    p.num_heads = static_cast<int32_t>(heads);
    p.head_dim = static_cast<int32_t>(dim);
    p.query_start_loc = static_cast<const int32_t*>(query_start_loc.data());
    p.context_start_loc = static_cast<const int32_t*>(context_start_loc.data());
    p.num_requests = {static_cast<int64_t>(query_lens.size())};
    p.max_query_len = *std::ranges::max_element(query_lens);
    p.output = {output.data(), DType::kBFloat16, heads * dim, dim};
    p.lse = {static_cast<float*>(lse.data()), tokens};
    bench.backend().mask_empty_context(p, bench.context());
  };
  call(0);
  std::vector<uint16_t> expected = before;
  std::fill(expected.begin() + queries[empty] * heads * dim,
            expected.begin() + queries[empty + 1] * heads * dim, 0);
  bench.expect(bench.download<uint16_t>(output.data(), tokens * heads * dim) == expected,
               "mask_empty_context");
  bench.time({.name = "mask_empty_context",
              .shape = fmt::format("T {} H {} dim {}, {} requests, {} rows emptied", tokens, heads,
                                   dim, query_lens.size(), query_lens[empty]),
              .bytes = query_lens[empty] * heads * (dim * 2.0 + 4.0),
              .peer_ms = peer_ms,
              .short_op = true},
             call);
}

std::vector<int32_t> shuffled(int32_t count) {
  std::vector<int32_t> ids(count);
  std::iota(ids.begin(), ids.end(), 0);
  std::ranges::shuffle(ids, std::mt19937_64{std::random_device{}()});
  return ids;
}

constexpr int32_t kLora = 512, kRope = 64, kPage = 64;

int64_t cache_row_bytes(KvCacheFormat format) {
  return format == KvCacheFormat::kBf16 ? 1152 : format == KvCacheFormat::kFp8E4M3 ? 576 : 656;
}

void bench_cache(Bench& bench, KvCacheFormat format, int32_t tokens, bool short_op) {
  const int64_t row_bytes = cache_row_bytes(format);
  const double bytes = tokens * (1152.0 + row_bytes);
  const int sets = short_op ? buffer_sets(bytes) : 1;
  const int32_t pages = tokens / kPage;
  const std::vector<int32_t> table = shuffled(pages);
  std::vector<int64_t> slots(tokens);
  for (int32_t t = 0; t < tokens; ++t) slots[t] = int64_t{table[t / kPage]} * kPage + t % kPage;
  const DeviceBuffer slot_mapping = bench.inputs().copy(slots);
  const DeviceBuffer block_table = bench.inputs().copy(table);
  const DeviceBuffer starts = bench.inputs().copy(std::vector<int32_t>{0});
  const DeviceBuffer cu_seq_lens = bench.inputs().copy(std::vector<int32_t>{0, tokens});
  std::vector<DeviceBuffer> kv_c, k_pe, cache, latent;
  for (int i = 0; i < sets; ++i) {
    kv_c.push_back(bench.inputs().bf16(int64_t{tokens} * kLora));
    k_pe.push_back(bench.inputs().bf16(int64_t{tokens} * kRope));
    cache.emplace_back(bench.backend(), tokens * row_bytes);
    latent.emplace_back(bench.backend(), tokens * int64_t{1152});
  }
  const auto view = [&](int s) {
    return LatentCache{cache[s].data(), format, 0.02f, pages, kPage, kPage * row_bytes};
  };
  const auto write = [&](int i) {
    WriteLatentCacheParams p;
    p.kv_lora_rank = kLora;
    p.qk_rope_head_dim = kRope;
    p.kv_c = {kv_c[i % sets].data(), DType::kBFloat16, kLora};
    p.k_pe = {k_pe[i % sets].data(), DType::kBFloat16, kRope};
    p.slot_mapping = static_cast<const int64_t*>(slot_mapping.data());
    p.num_tokens = {tokens};
    p.kv_cache = view(i % sets);
    bench.backend().write_latent_cache(p, bench.context());
  };
  const auto gather = [&](int i) {
    GatherLatentParams p;
    p.kv_lora_rank = kLora;
    p.qk_rope_head_dim = kRope;
    p.kv_cache = as_const(view(i % sets));
    p.block_table = static_cast<const int32_t*>(block_table.data());
    p.block_table_stride = pages;
    p.starts = static_cast<const int32_t*>(starts.data());
    p.cu_seq_lens = static_cast<const int32_t*>(cu_seq_lens.data());
    p.num_spans = {1};
    p.num_rows = {tokens};
    p.latent = {latent[i % sets].data(), DType::kBFloat16, kLora + kRope};
    bench.backend().gather_latent(p, bench.context());
  };
  for (int i = 0; i < sets; ++i) write(i);
  gather(0);
  const auto rows = bench.download<uint16_t>(latent[0].data(), int64_t{tokens} * 576);
  const auto given = bench.download<uint16_t>(kv_c[0].data(), int64_t{tokens} * kLora);
  // e4m3 keeps 4 bits of a value, down to 2^-9 times the scale.
  const float tolerance = format == KvCacheFormat::kBf16 ? 0.0f : 0.07f;
  for (int64_t t = 0; t < tokens; t += tokens / 97) {
    for (int64_t c = 0; c < kLora; ++c) {
      const float x = bf16_to_float(given[t * kLora + c]);
      if (std::fabs(bf16_to_float(rows[t * 576 + c]) - x) > tolerance * (std::fabs(x) + 0.02f)) {
        bench.expect(false, fmt::format("cache row {} value {}", t, c));
        return;
      }
    }
  }
  const std::string shape =
      fmt::format("{} tokens, {}, shuffled pages of 64", tokens, kv_cache_format_name(format));
  bench.time({.name = "write_latent_cache", .shape = shape, .bytes = bytes, .short_op = short_op},
             write);
  bench.time({.name = "gather_latent", .shape = shape, .bytes = bytes, .short_op = short_op},
             gather);
}

void bench_expand(Bench& bench, int32_t heads, std::initializer_list<int64_t> row_counts) {
  const ModelDims dims{heads, 128, kRope, 128, kLora};
  const int64_t columns = int64_t{heads} * dims.kv_head_dim();
  const int64_t most = std::max(row_counts);
  const DeviceBuffer latent = bench.inputs().bf16(most * (kLora + kRope));
  const DeviceBuffer weight = bench.inputs().bf16(columns * kLora);
  const DeviceBuffer expanded(bench.backend(), most * columns * 2);
  const auto expand = [&](int64_t rows) {
    bench.backend().expand({.dims = dims,
                            .latent = {latent.data(), DType::kBFloat16, kLora + kRope},
                            .kv_b_proj = weight.data(),
                            .expanded = {expanded.data(), DType::kBFloat16, columns},
                            .num_rows = {rows}},
                           bench.context());
  };
  std::vector<uint16_t> first_rows;
  for (const int64_t rows : row_counts) {
    expand(rows);
    const auto found =
        bench.download<uint16_t>(expanded.data(), std::min<int64_t>(rows, 128) * columns);
    if (first_rows.empty()) first_rows = found;
    const size_t common = std::min(first_rows.size(), found.size());
    bench.expect(std::memcmp(first_rows.data(), found.data(), common * 2) == 0,
                 fmt::format("rows of an expansion of {} rows depend on their number", rows));
  }
  for (const int64_t rows : row_counts) {
    bench.time({.name = "expand",
                .shape = fmt::format("{} rows, H {}, 512 to 256 a head", rows, heads),
                .flops = 2.0 * rows * columns * kLora},
               [&](int) { expand(rows); });
  }
}

void run(Bench& bench) {
  constexpr DType kBf16 = DType::kBFloat16, kFloat = DType::kFloat32;
  if (bench.wanted("merge")) {
    bench_merge(bench, 8192, 128, kBf16, 0.676, Data::kFlushed);
    bench_merge(bench, 8192, 128, kFloat, 0, Data::kFlushed);
    bench_merge(bench, 4096, 16, kBf16, 0.044, Data::kInCache);
    bench_merge(bench, 512, 16, kBf16, 0.0064, Data::kInCache);
    bench_merge(bench, 512, 16, kBf16, 0, Data::kRotated);
    bench_merge(bench, 512, 16, kFloat, 0, Data::kInCache);
  }
  if (bench.wanted("mask")) {
    std::vector<int32_t> small(34, 1);
    small[0] = 2;
    small[32] = 131;
    bench_mask(bench, small, 32, 4, 16, 0);
    bench_mask(bench, small, 32, 64, 128, 0);
    std::vector<int32_t> large(34, 240);
    large.back() = 8192 - 33 * 240;
    bench_mask(bench, large, 7, 128, 128, 0.356);
    bench_mask(bench, std::vector<int32_t>(16, 32), 7, 16, 128, 0.006);
  }
  if (bench.wanted("cache") || bench.wanted("gather")) {
    for (const KvCacheFormat format :
         {KvCacheFormat::kBf16, KvCacheFormat::kFp8E4M3, KvCacheFormat::kFp8DsMla}) {
      bench_cache(bench, format, 131072, false);
      bench_cache(bench, format, 65536, false);
      bench_cache(bench, format, 8192, true);
    }
  }
  if (bench.wanted("expand")) {
    bench_expand(bench, 128, {65536, 8192, 2048, 129, 1});
    bench_expand(bench, 16, {65536, 8192, 2048});
  }
}

int main_with(int argc, char** argv) {
  std::string json, commit, filter;
  CLI::App app{"Times the CUDA backend's ops against the device's copy bandwidth."};
  app.add_option("--json", json, "file for the results");
  app.add_option("--commit", commit, "commit that the program was built from");
  app.add_option("--filter", filter, "merge, mask, cache or expand (default: all)");
  CLI11_PARSE(app, argc, argv);

  const std::unique_ptr<Backend> backend = make_cuda_backend();
  Bench bench(*backend, filter);
  run(bench);
  if (!json.empty()) {
    cudaDeviceProp properties;
    int driver = 0;
    check_cuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    std::ofstream(json) << nlohmann::json{{"device", properties.name},
                                          {"driver", fmt::format("CUDA {}.{}", driver / 1000,
                                                                 driver % 1000 / 10)},
                                          {"commit", commit},
                                          {"results", bench.results()}}
                               .dump(1)
                        << '\n';
  }
  return bench.failed() ? 1 : 0;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) {
  try {
    return mla::bench::main_with(argc, argv);
  } catch (const mla::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 3;
  }
}
