#include "tools/cli/workload.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>

#include "metadata/error.h"
#include "tests/oracle/oracle.h"

namespace mla::cli {
namespace {

/// Sebastiano Vigna's splitmix64 (public domain): a good 64-bit mix of a counter.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

enum class Tensor : uint64_t { kQuery = 1, kLatent, kWeight, kLengths };

uint64_t place(uint64_t seed, Tensor tensor, int64_t layer, int64_t request, int64_t position) {
  uint64_t state = mix(seed ^ (static_cast<uint64_t>(tensor) << 56));
  for (const int64_t part : {layer, request, position}) {
    state = mix(state ^ static_cast<uint64_t>(part));
  }
  return state;
}

/// Even on [range.least, range.most]; a 64-bit number modulo a 32-bit one has no bias to speak of.
int32_t draw_length(const LengthRange& range, uint64_t random) {
  const uint64_t count = static_cast<uint64_t>(range.most) - range.least + 1;
  return static_cast<int32_t>(range.least + random % count);
}

constexpr size_t kMaxSteps = 1'000'000;

constexpr size_t kTableSize = size_t{1} << 16;

/// Quantiles (i + 1/2) / kTableSize of the normal distribution, by Newton's method from each one to
/// the next, starting in the middle.
std::vector<double> normal_quantiles() {
  std::vector<double> quantiles(kTableSize);
  double x = 0.0;
  for (size_t i = kTableSize / 2; i < kTableSize; ++i) {
    const double upper_tail = 1.0 - (static_cast<double>(i) + 0.5) / kTableSize;
    for (int step = 0; step < 4; ++step) {
      const double density = std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
      x += (std::erfc(x / std::numbers::sqrt2) / 2 - upper_tail) / density;
    }
    quantiles[i] = x;
    quantiles[kTableSize - 1 - i] = -x;
  }
  return quantiles;
}

/// Four values a random number.
void fill(const std::vector<uint16_t>& table, uint64_t state, std::span<uint16_t> row) {
  uint64_t random = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    if (i % 4 == 0) random = mix(state + i);
    row[i] = table[random & (kTableSize - 1)];
    random >>= 16;
  }
}

void add_single_step(const Options& options, Workload& workload) {
  Step step;
  for (size_t r = 0; r < options.query_lens.size(); ++r) {
    const auto id = static_cast<int32_t>(r);
    workload.requests.push_back(
        {.id = id, .prefix_len = options.context_lens[r], .prompt_len = options.query_lens[r]});
    step.push_back({.id = id,
                    .context_len = options.context_lens[r],
                    .query_len = options.query_lens[r],
                    .last = true});
  }
  workload.steps.push_back(std::move(step));
}

void add_scheduled_steps(const Options& options, Workload& workload) {
  StepScheduler scheduler(options.max_num_batched_tokens, options.config.max_requests);
  for (int32_t id = 0; id < options.num_requests; ++id) {
    const uint64_t random = place(options.seed, Tensor::kLengths, 0, id, 0);
    const PrefillRequest request{.id = id,
                                 .prefix_len = draw_length(options.prefix_lens, mix(random)),
                                 .prompt_len = draw_length(options.prompt_lens, random)};
    workload.requests.push_back(request);
    scheduler.add(request);
  }
  while (!scheduler.done()) {
    if (workload.steps.size() == kMaxSteps) {
      throw_error(ErrorCode::kInvalidArgument,
                  "--max-num-batched-tokens {} cuts the prompts into more than {} steps",
                  options.max_num_batched_tokens, kMaxSteps);
    }
    Step step;
    scheduler.next_step(step);
    workload.steps.push_back(std::move(step));
  }
}

}  // namespace

int64_t Workload::num_pages(int32_t page_size) const {
  int64_t pages = 0;
  for (const PrefillRequest& request : requests) {
    pages += (int64_t{request.prefix_len} + request.prompt_len + page_size - 1) / page_size;
  }
  return pages;
}

Workload make_workload(const Options& options) {
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  Workload workload;
  options.single_step ? add_single_step(options, workload) : add_scheduled_steps(options, workload);
  for (size_t s = 0; s < workload.steps.size(); ++s) {
    int64_t query_tokens = 0;
    int64_t context_tokens = 0;
    for (const ScheduledRequest& request : workload.steps[s]) {
      query_tokens += request.query_len;
      context_tokens += request.context_len;
      if (query_tokens + context_tokens > kMaxInt32) {
        throw_error(ErrorCode::kInvalidArgument,
                    "step {}: context and new tokens come to {} with request {}, the limit is {}",
                    s, query_tokens + context_tokens, request.id, kMaxInt32);
      }
    }
    workload.max_query_tokens =
        std::max(workload.max_query_tokens, static_cast<int32_t>(query_tokens));
    workload.max_requests =
        std::max(workload.max_requests, static_cast<int32_t>(workload.steps[s].size()));
    workload.num_query_tokens += query_tokens;
    workload.num_context_tokens += context_tokens;
  }
  const int64_t pages = workload.num_pages(options.config.page_size);
  if (pages > kMaxInt32) {
    throw_error(ErrorCode::kInvalidArgument, "the requests need {} pages, the limit is {}", pages,
                kMaxInt32);
  }
  return workload;
}

StepBatch::StepBatch(const Step& step) : query_start_loc{0} {
  for (const ScheduledRequest& request : step) {
    query_start_loc.push_back(query_start_loc.back() + request.query_len);
    context_lens.push_back(request.context_len);
  }
}

SyntheticValues::SyntheticValues(uint64_t seed, const ModelDims& dims) : seed_(seed) {
  const double weight_scale = 1.0 / std::sqrt(static_cast<double>(dims.kv_lora_rank));
  const auto bits = [](double x) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(oracle::round_to_bf16(x)) >> 16);
  };
  for (const double x : normal_quantiles()) {
    unit_.push_back(bits(x));
    weight_.push_back(bits(x * weight_scale));
  }
}

void SyntheticValues::query_row(int32_t layer, int32_t request, int64_t position,
                                std::span<uint16_t> row) const {
  fill(unit_, place(seed_, Tensor::kQuery, layer, request, position), row);
}
void SyntheticValues::latent_row(int32_t layer, int32_t request, int64_t position,
                                 std::span<uint16_t> row) const {
  fill(unit_, place(seed_, Tensor::kLatent, layer, request, position), row);
}
void SyntheticValues::weight_row(int32_t layer, int64_t index, std::span<uint16_t> row) const {
  fill(weight_, place(seed_, Tensor::kWeight, layer, 0, index), row);
}

float bf16_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

}  // namespace mla::cli
