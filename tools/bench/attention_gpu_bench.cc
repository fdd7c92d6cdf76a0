// Checks and times the Hopper prefill attention by itself, on the GPU that is there.
//
//   attention_gpu_bench --check                  small shapes against a float64 reference
//   attention_gpu_bench --time [--filter h128]   large shapes; each is checked on some rows first
//   attention_gpu_bench --check --time --json figures.json
//
// Times are medians of launches with the L2 flushed before each. Exit code 1 where a check fails.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/check.h"
#include "metadata/error.h"
#include "tools/bench/attention_problem.h"

namespace mla::bench {
namespace {

constexpr ModelDims kDeepSeek{0, 128, 64, 128, 512};
constexpr ModelDims kGlm{0, 192, 64, 256, 512};

// Output rounded to 8 bits of mantissa (or 11), powers rounded likewise before the second product.
constexpr double kRelativeLimit = 4e-3;
constexpr double kLseLimit = 1e-5;

ModelDims with_heads(ModelDims dims, int32_t heads) {
  dims.num_heads = heads;
  return dims;
}

/// One causal or unmasked item for each request, its keys and queries behind those of the last.
AttentionItem item_after(const std::vector<AttentionItem>& items, int32_t q_len, int32_t k_len,
                         int32_t causal_offset, int32_t gap) {
  AttentionItem item;
  if (!items.empty()) {
    const AttentionItem& last = items.back();
    item.q_begin = last.q_begin + last.q_len + gap;
    item.k_begin = last.k_begin + last.k_len + gap;
    item.out_row = last.out_row + last.q_len + gap;
  }
  item.q_len = q_len;
  item.k_len = k_len;
  item.causal_offset = causal_offset;
  return item;
}

std::vector<AttentionItem> random_items(std::mt19937_64& random) {
  const auto pick = [&](auto... values) {
    const int32_t list[] = {values...};
    return list[random() % std::size(list)];
  };
  std::vector<AttentionItem> items;
  const int count = 1 + static_cast<int>(random() % 9);
  for (int i = 0; i < count; ++i) {
    const int32_t q_len = pick(0, 1, 2, 63, 64, 65, 127, 128, 129, 200, 256, 300);
    const int32_t k_len = pick(0, 1, 2, 79, 80, 81, 127, 128, 129, 160, 255, 256, 257, 500, 700);
    const int32_t offset = pick(kUnmasked, kUnmasked, 0, k_len - q_len, -5, -150, 40, k_len);
    items.push_back(item_after(items, q_len, k_len, offset, static_cast<int32_t>(random() % 4)));
    if (i > 0 && random() % 4 == 0) {  // the keys of the item before
      items.back().k_begin = items[items.size() - 2].k_begin;
      items.back().k_len = items[items.size() - 2].k_len;
      items.push_back(item_after(items, 33, 65, 0, 500));
    }
  }
  return items;
}

/// Few queries and many keys: what the kernel cuts into ranges of keys.
std::vector<AttentionItem> long_items(std::mt19937_64& random) {
  std::vector<AttentionItem> items;
  const int count = 1 + static_cast<int>(random() % 3);
  for (int i = 0; i < count; ++i) {
    const int32_t q_len = 1 + static_cast<int32_t>(random() % 140);
    const int32_t k_len = 8000 + static_cast<int32_t>(random() % 20000);
    const int32_t offsets[] = {kUnmasked, k_len - q_len, 9000, 8192 - q_len, -q_len};
    items.push_back(item_after(items, q_len, k_len, offsets[random() % 5], 2));
    items.push_back(item_after(items, 70, 50, kUnmasked, 2));
  }
  return items;
}

bool check_random(int cases, uint64_t seed, int max_blocks) {
  std::mt19937_64 random(seed);
  int failures = 0;
  double worst = 0, worst_lse = 0;
  for (int i = 0; i < cases; ++i) {
    ProblemOptions options;
    const int32_t heads[] = {1, 2, 5, 12};
    options.dims = with_heads(random() % 3 ? kDeepSeek : kGlm, heads[random() % 4]);
    options.dtype = random() % 3 ? DType::kBFloat16 : DType::kFloat16;
    options.items = i % 10 == 9 ? long_items(random) : random_items(random);
    options.prefix = random() % 2;
    options.in_place = options.prefix && random() % 2;
    options.float32_out = options.in_place || random() % 2;
    options.lse_by_row = random() % 2;
    options.device_count = random() % 2;
    options.spare_rows = static_cast<int32_t>(random() % 300);
    options.seed = random();
    AttentionProblem problem(options);
    problem.run(1 + static_cast<int>(random() % max_blocks), nullptr);
    const ProblemErrors errors = problem.compare(1 << 30);
    const std::vector<uint8_t> bits = problem.output_bits();
    problem.reset();
    problem.run(max_blocks, nullptr);
    const bool same = bits == problem.output_bits();
    worst = std::max(worst, errors.relative);
    worst_lse = std::max(worst_lse, errors.worst_lse);
    if (errors.relative <= kRelativeLimit && errors.worst_lse <= kLseLimit &&
        errors.wrong_rows == 0 && same) {
      continue;
    }
    ++failures;
    fmt::print("FAILED case {} of seed {}: relative {:.3g}, lse {:.3g}, wrong rows {}, {}\n", i,
               seed, errors.relative, errors.worst_lse, errors.wrong_rows,
               same ? "same bits" : "other bits in the second run");
    fmt::print("  P {} H {} {} prefix {} in_place {} f32 {}\n", options.dims.qk_nope_head_dim,
               options.dims.num_heads, dtype_name(options.dtype), options.prefix, options.in_place,
               options.float32_out);
    for (const AttentionItem& item : options.items) {
      fmt::print("  q {}+{} k {}+{} offset {} out {}\n", item.q_begin, item.q_len, item.k_begin,
                 item.k_len, item.causal_offset, item.out_row);
    }
  }
  fmt::print("{} random cases of seed {}: {} failed; worst relative error {:.3g}, lse {:.3g}\n",
             cases, seed, failures, worst, worst_lse);
  return failures == 0;
}

struct Shape {
  std::string name;
  ModelDims dims;
  std::vector<AttentionItem> items;
};

Shape make_shape(std::string name, ModelDims dims, int32_t heads, int32_t requests, int32_t q_len,
                 int32_t k_len, bool causal) {
  Shape shape{std::move(name), with_heads(dims, heads), {}};
  for (int32_t r = 0; r < requests; ++r) {
    shape.items.push_back(
        item_after(shape.items, q_len, k_len, causal ? k_len - q_len : kUnmasked, 0));
  }
  return shape;
}

std::vector<Shape> timed_shapes() {
  std::vector<Shape> shapes = {
      make_shape("h128_q4096_causal", kDeepSeek, 128, 1, 4096, 4096, true),
      make_shape("h128_q8192_causal", kDeepSeek, 128, 1, 8192, 8192, true),
      make_shape("h128_q16384_causal", kDeepSeek, 128, 1, 16384, 16384, true),
      make_shape("h16_q16384_causal", kDeepSeek, 16, 1, 16384, 16384, true),
      make_shape("h128_q4096_k16384", kDeepSeek, 128, 1, 4096, 16384, false),
      make_shape("h128_q2048_k32768", kDeepSeek, 128, 1, 2048, 32768, false),
      make_shape("h128_q512_k32768", kDeepSeek, 128, 1, 512, 32768, false),
      make_shape("h16_q8192_k65536", kDeepSeek, 16, 1, 8192, 65536, false),
      make_shape("h16_q128_k65536", kDeepSeek, 16, 1, 128, 65536, false),
      make_shape("h16_q512_k65536", kDeepSeek, 16, 1, 512, 65536, false),
      make_shape("h16_8xq512_k8192", kDeepSeek, 16, 8, 512, 8192, false),
      make_shape("h128_q128_k65536", kDeepSeek, 128, 1, 128, 65536, false),
      make_shape("h16_32xq513_k60000_31xk16", kDeepSeek, 16, 1, 513, 60000, false),
      make_shape("glm_h64_q4096_causal", kGlm, 64, 1, 4096, 4096, true),
      make_shape("glm_h64_q8192_causal", kGlm, 64, 1, 8192, 8192, true),
      make_shape("glm_h64_q4096_k16384", kGlm, 64, 1, 4096, 16384, false),
      make_shape("glm_h64_q512_k32768", kGlm, 64, 1, 512, 32768, false),
      make_shape("glm_h8_q8192_causal", kGlm, 8, 1, 8192, 8192, true),
      make_shape("glm_h8_q4096_k16384", kGlm, 8, 1, 4096, 16384, false),
      make_shape("glm_h8_q512_k65536", kGlm, 8, 1, 512, 65536, false),
  };
  for (Shape& shape : shapes) {
    if (shape.name != "h16_32xq513_k60000_31xk16") continue;
    for (int i = 0; i < 31; ++i)
      shape.items.push_back(item_after(shape.items, 513, 16, kUnmasked, 0));
  }
  return shapes;
}

/// Overwritten before each timed launch; several times the L2.
constexpr size_t kFlushBytes = size_t{256} << 20;

double median_ms(const AttentionProblem& problem, int max_blocks, int repeats, DeviceArray& flush) {
  cudaEvent_t start, stop;
  check_cuda(cudaEventCreate(&start), "cudaEventCreate");
  check_cuda(cudaEventCreate(&stop), "cudaEventCreate");
  std::vector<float> times;
  for (int i = 0; i < repeats + 2; ++i) {  // two to warm up
    check_cuda(cudaMemsetAsync(flush.as<void>(), i, flush.bytes(), nullptr), "cudaMemsetAsync");
    check_cuda(cudaEventRecord(start, nullptr), "cudaEventRecord");
    problem.run(max_blocks, nullptr);
    check_cuda(cudaEventRecord(stop, nullptr), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(stop), "prefill attention");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, start, stop), "cudaEventElapsedTime");
    if (i >= 2) times.push_back(ms);
  }
  check_cuda(cudaEventDestroy(start), "cudaEventDestroy");
  check_cuda(cudaEventDestroy(stop), "cudaEventDestroy");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

int run(int argc, char** argv) {
  CLI::App app{"Checks and times the Hopper prefill attention"};
  bool check = false, time = false;
  int cases = 60, repeats = 10;
  uint64_t seed = std::random_device{}();
  std::string filter, json_file, commit;
  app.add_flag("--check", check, "compare small random problems with a float64 reference");
  app.add_flag("--time", time, "time large shapes");
  app.add_option("--cases", cases, "random problems to check")->capture_default_str();
  app.add_option("--seed", seed, "of the random problems; printed");
  app.add_option("--repeats", repeats, "timed launches a shape")->capture_default_str();
  app.add_option("--filter", filter, "time only shapes whose name contains this");
  app.add_option("--commit", commit, "written to the JSON");
  app.add_option("--json", json_file, "write figures here");
  CLI11_PARSE(app, argc, argv);

  cudaDeviceProp device{};
  int driver = 0;
  check_cuda(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  const int max_blocks = device.multiProcessorCount;
  bool ok = true;
  if (check) ok = check_random(cases, seed, max_blocks);

  nlohmann::json results = nlohmann::json::array();
  if (time) {
    DeviceArray flush(kFlushBytes);
    for (const Shape& shape : timed_shapes()) {
      if (shape.name.find(filter) == std::string::npos) continue;
      ProblemOptions options;
      options.dims = shape.dims;
      options.items = shape.items;
      options.seed = seed;
      AttentionProblem problem(options);
      problem.run(max_blocks, nullptr);
      const ProblemErrors errors = problem.compare(16);
      const bool right = errors.relative <= kRelativeLimit && errors.worst_lse <= kLseLimit &&
                         errors.wrong_rows == 0;
      ok = ok && right;
      const double ms = median_ms(problem, max_blocks, repeats, flush);
      const double tflops = problem.flops() / ms * 1e-9;
      fmt::print("{:<28} {:9.3f} ms {:7.1f} TFLOP/s  error {:.2e} lse {:.1e}{}\n", shape.name, ms,
                 tflops, errors.relative, errors.worst_lse, right ? "" : "  WRONG");
      std::fflush(stdout);
      results.push_back({{"name", shape.name},
                         {"ms", ms},
                         {"tflops", tflops},
                         {"rel_err", errors.relative},
                         {"lse_err", errors.worst_lse}});
    }
  }
  if (!json_file.empty()) {
    std::ofstream out(json_file);
    out << nlohmann::json{{"device", device.name}, {"driver", driver}, {"commit", commit},
                          {"seed", seed},          {"checks_ok", ok},  {"results", results}}
               .dump(1)
        << "\n";
    if (!out) throw_error(ErrorCode::kInvalidArgument, "cannot write {}", json_file);
  }
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) {
  try {
    return mla::bench::run(argc, argv);
  } catch (const mla::Error& error) {
    fmt::print(stderr, "attention_gpu_bench: {}\n", error.what());
    return error.code() == mla::ErrorCode::kDevice ? 3 : 2;
  }
}
