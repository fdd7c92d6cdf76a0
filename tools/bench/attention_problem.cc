#include "tools/bench/attention_problem.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cuda/check.h"
#include "kernels/cuda/sm90/prefill_attention.h"

namespace mla::bench {
namespace {

constexpr uint8_t kNanByte = 0xFF;     // NaN in every floating-point type
constexpr double kRounding = 0x1p-8;   // of the output's dtype, bf16 at worst
constexpr double kSmallest = 0x1p-25;  // half of fp16's least subnormal
constexpr float kInfinity = std::numeric_limits<float>::infinity();

float to_float(const uint8_t* bytes, DType dtype) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(uint32_t{bits} << 16);
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? std::nanf("") : sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

}  // namespace

DeviceArray::DeviceArray(size_t bytes) : bytes_(bytes) {
  if (bytes > 0) check_cuda(cudaMalloc(&data_, bytes), "cudaMalloc");
}
DeviceArray::~DeviceArray() { cudaFree(data_); }
void DeviceArray::fill(uint8_t value) {
  check_cuda(cudaMemset(data_, value, bytes_), "cudaMemset");
}
void DeviceArray::upload(const void* host, size_t bytes) {
  check_cuda(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice), "copy to the device");
}
void DeviceArray::download(void* host, size_t bytes) const {
  check_cuda(cudaMemcpy(host, data_, bytes, cudaMemcpyDeviceToHost), "copy to the host");
}

AttentionProblem::AttentionProblem(const ProblemOptions& options) : options_(options) {
  const ModelDims& d = options.dims;
  int32_t max_q = 0, max_k = 0;
  for (const AttentionItem& item : options.items) {
    q_rows_ = std::max<int64_t>(q_rows_, item.q_begin + item.q_len);
    k_rows_ = std::max<int64_t>(k_rows_, item.k_begin + item.k_len);
    out_rows_ = std::max<int64_t>(out_rows_, item.out_row + item.q_len);
    max_q = std::max(max_q, item.q_len);
    max_k = std::max(max_k, item.k_len);
  }
  q_rows_ += options.spare_rows;
  k_rows_ += options.spare_rows;
  out_rows_ += options.spare_rows;

  const size_t element = static_cast<size_t>(dtype_bytes(options.dtype));
  const int64_t heads = d.num_heads;
  const int64_t q_width = heads * d.qk_head_dim();
  const int64_t kv_width = heads * d.kv_head_dim();
  q_ = DeviceArray(q_rows_ * q_width * element);
  expanded_ = DeviceArray(k_rows_ * kv_width * element);
  latent_ = DeviceArray(k_rows_ * d.latent_dim() * element);
  q_.fill(kNanByte);
  expanded_.fill(kNanByte);
  latent_.fill(kNanByte);
  const auto fill = [&](const DeviceArray& array, int64_t row, int64_t rows, int64_t width,
                        uint64_t stream) {
    const Rows view{array.as<std::byte>() + row * width * element, options.dtype, width};
    check_cuda(fill_normal(view, rows, width, options.seed * 1000003 + stream + row * 3, nullptr),
               "fill_normal");
  };
  for (const AttentionItem& item : options.items) {
    fill(q_, item.q_begin, item.q_len, q_width, 0);
    fill(expanded_, item.k_begin, item.k_len, kv_width, 1);
    fill(latent_, item.k_begin, item.k_len, d.latent_dim(), 2);
  }

  const int64_t num_items = static_cast<int64_t>(options.items.size());
  items_ = DeviceArray(std::max<size_t>(1, options.items.size()) * sizeof(AttentionItem));
  items_.upload(options.items.data(), options.items.size() * sizeof(AttentionItem));
  count_ = DeviceArray(sizeof(int32_t));
  const int32_t count = static_cast<int32_t>(num_items);
  count_.upload(&count, sizeof(count));

  const DType out_dtype = options.float32_out ? DType::kFloat32 : options.dtype;
  out_ = DeviceArray(out_rows_ * heads * d.v_head_dim * dtype_bytes(out_dtype));
  lse_ = DeviceArray(out_rows_ * heads * sizeof(float));

  const int64_t capacity = num_items + (options.device_count ? 13 : 0);
  int64_t key_rows = 0;
  for (const AttentionItem& item : options.items) key_rows += item.k_len;
  scratch_ = DeviceArray(
      sm90::prefill_attention_scratch_bytes(d.num_heads, d.v_head_dim, capacity, key_rows));

  PrefillAttentionParams& p = params_;
  p.num_heads = d.num_heads;
  p.qk_nope_head_dim = d.qk_nope_head_dim;
  p.qk_rope_head_dim = d.qk_rope_head_dim;
  p.v_head_dim = d.v_head_dim;
  p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(d.qk_head_dim()));
  p.q = {q_.as<void>(), options.dtype, q_width, d.qk_head_dim()};
  p.k_nope = {expanded_.as<void>(), options.dtype, kv_width, d.kv_head_dim()};
  p.k_pe = {latent_.as<std::byte>() + d.kv_lora_rank * element, options.dtype, d.latent_dim()};
  p.v = {expanded_.as<std::byte>() + d.qk_nope_head_dim * element, options.dtype, kv_width,
         d.kv_head_dim()};
  p.q_rows = q_rows_;
  p.k_rows = k_rows_;
  p.items = items_.as<AttentionItem>();
  p.num_items = {capacity, options.device_count ? count_.as<int32_t>() : nullptr};
  p.max_q_len = max_q;
  p.max_k_len = max_k;
  p.out = {out_.as<void>(), out_dtype, heads * d.v_head_dim, d.v_head_dim};
  const int64_t lse_head = options.lse_by_row ? 1 : out_rows_;
  const int64_t lse_row = options.lse_by_row ? heads : 1;
  p.lse = {lse_.as<float>(), lse_head, lse_row};
  if (options.prefix) {
    make_prefix();
    DeviceArray& prior_out = options.in_place ? out_ : prefix_out_;
    DeviceArray& prior_lse = options.in_place ? lse_ : prefix_lse_;
    p.prefix_out = {prior_out.as<void>(), DType::kFloat32, heads * d.v_head_dim, d.v_head_dim};
    p.prefix_lse = {prior_lse.as<float>(), lse_head, lse_row};
  }
  reset();
}

void AttentionProblem::make_prefix() {
  const int64_t heads = options_.dims.num_heads, v = options_.dims.v_head_dim;
  std::mt19937_64 random(options_.seed + 77);
  std::normal_distribution<float> normal;
  host_prefix_out_.resize(out_rows_ * heads * v);
  host_prefix_lse_.resize(out_rows_ * heads);
  for (int64_t i = 0; i < out_rows_ * heads; ++i) {
    const uint64_t kind = random() % 8;  // a quarter of the rows is empty, their values NaN
    host_prefix_lse_[i] = kind == 0 ? -kInfinity : kind == 1 ? kInfinity : 3.0f + normal(random);
    for (int64_t c = 0; c < v; ++c) {
      host_prefix_out_[i * v + c] = kind < 2 ? std::nanf("") : normal(random);
    }
  }
  if (!options_.in_place) {
    prefix_out_ = DeviceArray(host_prefix_out_.size() * sizeof(float));
    prefix_lse_ = DeviceArray(host_prefix_lse_.size() * sizeof(float));
  }
}

void AttentionProblem::reset() {
  out_.fill(kNanByte);
  lse_.fill(kNanByte);
  scratch_.fill(kNanByte);
  if (!options_.prefix) return;
  const int64_t heads = options_.dims.num_heads;
  std::vector<float> lse(host_prefix_lse_.size());
  for (int64_t i = 0; i < out_rows_ * heads; ++i) {
    lse[i / heads * params_.lse.row_stride + i % heads * params_.lse.head_stride] =
        host_prefix_lse_[i];
  }
  (options_.in_place ? out_ : prefix_out_)
      .upload(host_prefix_out_.data(), host_prefix_out_.size() * sizeof(float));
  (options_.in_place ? lse_ : prefix_lse_).upload(lse.data(), lse.size() * sizeof(float));
}

void AttentionProblem::run(int max_blocks, cudaStream_t stream) const {
  sm90::prefill_attention(params_, scratch(), max_blocks, stream);
}

double AttentionProblem::flops() const {
  double scores = 0;
  for (const AttentionItem& item : options_.items) {
    if (item.causal_offset == kUnmasked) {
      scores += static_cast<double>(item.q_len) * item.k_len;
      continue;
    }
    for (int64_t i = 0; i < item.q_len; ++i) {
      scores += static_cast<double>(std::clamp<int64_t>(i + item.causal_offset + 1, 0, item.k_len));
    }
  }
  return 2.0 * options_.dims.num_heads * (options_.dims.qk_head_dim() + options_.dims.v_head_dim) *
         scores;
}

ProblemErrors AttentionProblem::compare(int max_rows) const {
  const int64_t heads = options_.dims.num_heads, v = options_.dims.v_head_dim;
  std::vector<SampledRow> samples;
  std::vector<bool> owned(out_rows_, false);
  for (size_t i = 0; i < options_.items.size(); ++i) {
    for (int32_t q = 0; q < options_.items[i].q_len; ++q) {
      samples.push_back({static_cast<int32_t>(i), q});
      owned[options_.items[i].out_row + q] = true;
    }
  }
  if (static_cast<int>(samples.size()) > max_rows) {
    std::mt19937_64 random(options_.seed + 99);
    std::shuffle(samples.begin(), samples.end(), random);
    samples.resize(max_rows);
  }
  const int64_t n = static_cast<int64_t>(samples.size());

  DeviceArray device_samples(std::max<int64_t>(1, n) * sizeof(SampledRow));
  device_samples.upload(samples.data(), n * sizeof(SampledRow));
  DeviceArray scores(size_t{kReferenceBlocks} * std::max(1, params_.max_k_len) * sizeof(double));
  DeviceArray device_out(std::max<int64_t>(1, n * heads * v) * sizeof(double));
  DeviceArray device_lse(std::max<int64_t>(1, n * heads) * sizeof(double));
  check_cuda(reference_attention(params_, device_samples.as<SampledRow>(), static_cast<int>(n),
                                 scores.as<double>(), device_out.as<double>(),
                                 device_lse.as<double>(), nullptr),
             "reference_attention");
  std::vector<double> expected(n * heads * v), expected_lse(n * heads);
  device_out.download(expected.data(), expected.size() * sizeof(double));
  device_lse.download(expected_lse.data(), expected_lse.size() * sizeof(double));

  const size_t element = static_cast<size_t>(dtype_bytes(params_.out.dtype));
  std::vector<uint8_t> out(out_.bytes());
  std::vector<float> lse(lse_.bytes() / sizeof(float));
  out_.download(out.data(), out.size());
  lse_.download(lse.data(), lse_.bytes());
  const auto value = [&](int64_t row, int64_t head, int64_t c) {
    return to_float(out.data() + ((row * heads + head) * v + c) * element, params_.out.dtype);
  };

  ProblemErrors errors;
  double error_sum = 0, norm = 0;
  for (int64_t s = 0; s < n; ++s) {
    const int64_t row = options_.items[samples[s].item].out_row + samples[s].query;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t prior = row * heads + h;
      double weight = 1.0, prior_weight = 0.0, want_lse = expected_lse[s * heads + h];
      if (options_.prefix && std::isfinite(host_prefix_lse_[prior])) {
        const double most = std::max<double>(want_lse, host_prefix_lse_[prior]);
        const double sum = std::exp(want_lse - most) + std::exp(host_prefix_lse_[prior] - most);
        weight = std::exp(want_lse - most) / sum;
        prior_weight = std::exp(host_prefix_lse_[prior] - most) / sum;
        want_lse = most + std::log(sum);
      }
      const double got_lse = lse[row * params_.lse.row_stride + h * params_.lse.head_stride];
      const bool empty = expected_lse[s * heads + h] == -kInfinity;
      if (std::isinf(want_lse)) {
        errors.wrong_rows += !(got_lse == want_lse);
      } else {
        const double error = std::fabs(got_lse - want_lse) / std::max(1.0, std::fabs(want_lse));
        if (!(error <= errors.worst_lse)) errors.worst_lse = error;
      }
      bool exact = true;
      for (int64_t c = 0; c < v; ++c) {
        double want = weight * expected[(s * heads + h) * v + c];
        if (prior_weight != 0.0) want += prior_weight * host_prefix_out_[prior * v + c];
        const double got = value(row, h, c);
        exact = exact && (prior_weight == 0.0 ? got == 0.0
                          : options_.float32_out
                              ? got == host_prefix_out_[prior * v + c]
                              : std::fabs(got - want) <= kRounding * std::fabs(want) + kSmallest);
        error_sum += (got - want) * (got - want);
        norm += want * want;
      }
      errors.wrong_rows += empty && !exact;
    }
  }
  errors.relative = norm > 0 ? std::sqrt(error_sum / norm) : std::sqrt(error_sum);

  for (int64_t row = 0; row < out_rows_; ++row) {
    if (owned[row]) continue;
    for (int64_t h = 0; h < heads; ++h) {
      const float prior = options_.in_place ? host_prefix_lse_[row * heads + h] : std::nanf("");
      const float got = lse[row * params_.lse.row_stride + h * params_.lse.head_stride];
      bool kept = std::isnan(prior) ? std::isnan(got) : got == prior;
      for (int64_t c = 0; c < v && !options_.in_place; ++c) {
        kept = kept && std::isnan(value(row, h, c));
      }
      errors.wrong_rows += !kept;
    }
  }
  return errors;
}

std::vector<uint8_t> AttentionProblem::output_bits() const {
  std::vector<uint8_t> bits(out_.bytes() + lse_.bytes());
  out_.download(bits.data(), out_.bytes());
  lse_.download(bits.data() + out_.bytes(), lse_.bytes());
  return bits;
}

}  // namespace mla::bench
