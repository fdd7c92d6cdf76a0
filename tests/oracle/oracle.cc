#include "tests/oracle/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace mla::oracle {
namespace {

/// Nearest multiple of 2^(exponent - fraction_bits), ties to even; the exponent is x's own, but no
/// less than `min_exponent`, below which the format is subnormal. Scaling by powers of two is
/// exact, so this rounds once.
double round_to_format(double x, int min_exponent, int fraction_bits) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), min_exponent) - fraction_bits;
  return std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
}

/// What one value reads back as: divided, stored as e4m3 and multiplied, both in float32.
float through_e4m3(float x, float scale) {
  const float quotient = x / scale;
  const float value = round_to_e4m3(quotient) * scale;
  return round_to_bf16(value);
}

void require_size(size_t size, int64_t expected, const char* what) {
  if (expected < 0 || size != static_cast<size_t>(expected)) {
    throw std::invalid_argument(std::string("oracle: wrong size of ") + what);
  }
}

// Columns of a block: the accumulators of one pass stay in the first-level cache.
constexpr int64_t kBlock = 64;

/// Vectors of any machine, chosen at load time. Not under a sanitizer: its run time is not up yet
/// when the choice is made.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define MLA_ORACLE_CLONES \
  __attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#else
#define MLA_ORACLE_CLONES
#endif

/// sum[j] += sum over i < count of a[i] * x[i][j]; x is [count, width]. Four rows of x a pass, so
/// that the sums are loaded and stored a quarter as often.
MLA_ORACLE_CLONES
void accumulate(double* __restrict sum, const double* __restrict a, const double* __restrict x,
                int64_t count, int64_t width) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const double* __restrict x0 = x + i * width;
    const double* __restrict x1 = x0 + width;
    const double* __restrict x2 = x1 + width;
    const double* __restrict x3 = x2 + width;
    for (int64_t j = 0; j < width; ++j) {
      sum[j] += (a[i] * x0[j] + a[i + 1] * x1[j]) + (a[i + 2] * x2[j] + a[i + 3] * x3[j]);
    }
  }
  for (; i < count; ++i) {
    for (int64_t j = 0; j < width; ++j) sum[j] += a[i] * x[i * width + j];
  }
}

/// Writes columns 0 to count - 1 of `block`, [columns, kBlock], from `count` rows of `matrix`.
void transpose(const float* matrix, int64_t columns, int64_t count, double* block) {
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < columns; ++c) block[c * kBlock + r] = matrix[r * columns + c];
  }
}

}  // namespace

float round_to_bf16(double x) { return static_cast<float>(round_to_format(x, -126, 7)); }

float round_to_e4m3(double x) {
  return static_cast<float>(std::clamp(round_to_format(x, -6, 3), -448.0, 448.0));
}

std::vector<float> through_fp8_e4m3(std::span<const float> row, float scale) {
  std::vector<float> result;
  for (const float x : row) result.push_back(through_e4m3(x, scale));
  return result;
}

std::vector<float> through_fp8_ds_mla(std::span<const float> row) {
  require_size(row.size(), 512 + 64, "an fp8_ds_mla row");
  std::vector<float> result(row.begin(), row.end());
  for (size_t tile = 0; tile < 512; tile += 128) {
    float largest = 0.0f;
    for (size_t i = tile; i < tile + 128; ++i) largest = std::max(largest, std::fabs(row[i]));
    const float scale = largest == 0.0f ? 1.0f : largest / 448.0f;
    for (size_t i = tile; i < tile + 128; ++i) result[i] = through_e4m3(row[i], scale);
  }
  return result;
}

HeadKeys expand_head(std::span<const float> latent, std::span<const float> weight, int64_t p,
                     int64_t v, int64_t l, bool round) {
  const int64_t rows = static_cast<int64_t>(latent.size()) / l;
  require_size(latent.size(), rows * l, "latent");
  require_size(weight.size(), (p + v) * l, "weight");

  HeadKeys keys{std::vector<float>(static_cast<size_t>(rows * p)),
                std::vector<float>(static_cast<size_t>(rows * v))};
  std::vector<double> row(static_cast<size_t>(l));
  std::vector<double> weight_block(static_cast<size_t>(l * kBlock));
  for (int64_t begin = 0; begin < p + v; begin += kBlock) {
    const int64_t count = std::min(kBlock, p + v - begin);
    transpose(weight.data() + begin * l, l, count, weight_block.data());
    for (int64_t s = 0; s < rows; ++s) {
      std::copy_n(latent.data() + s * l, l, row.data());
      double sums[kBlock] = {};
      accumulate(sums, row.data(), weight_block.data(), l, kBlock);
      for (int64_t j = 0; j < count; ++j) {
        const int64_t column = begin + j;
        float& result = column < p ? keys.k_nope[s * p + column] : keys.v[s * v + column - p];
        result = round ? round_to_bf16(sums[j]) : static_cast<float>(sums[j]);
      }
    }
  }
  return keys;
}

HeadResult attend_head(std::span<const float> q, const HeadKeys& keys, std::span<const float> k_pe,
                       std::span<const int64_t> visible, int64_t p, int64_t rr, int64_t v,
                       double softmax_scale) {
  const int64_t n = static_cast<int64_t>(visible.size());
  const int64_t s = static_cast<int64_t>(keys.v.size()) / v;
  const int64_t d = p + rr;
  require_size(q.size(), n * d, "q");
  require_size(keys.k_nope.size(), s * p, "k_nope");
  require_size(keys.v.size(), s * v, "v");
  require_size(k_pe.size(), s * rr, "k_pe");
  for (const int64_t keys_of_row : visible) {
    if (keys_of_row < 0 || keys_of_row > s) throw std::invalid_argument("oracle: visible keys");
  }

  HeadResult result{std::vector<double>(static_cast<size_t>(n * v)),
                    std::vector<double>(static_cast<size_t>(n))};
  std::vector<double> key_block(static_cast<size_t>(d * kBlock));
  std::vector<double> value_block(static_cast<size_t>(kBlock * v));
  std::vector<double> weights;  // [rows of a block, padded]: scores, then exp(score - maximum)

  // A block of rows at a time, so that converting a block of keys is shared by many rows.
  for (int64_t row_begin = 0; row_begin < n; row_begin += kBlock) {
    const int64_t row_end = std::min(row_begin + kBlock, n);
    const int64_t num_keys =
        *std::max_element(visible.begin() + row_begin, visible.begin() + row_end);
    const int64_t padded = (num_keys + kBlock - 1) / kBlock * kBlock;
    weights.assign(static_cast<size_t>((row_end - row_begin) * padded), 0.0);
    const std::vector<double> queries(q.begin() + row_begin * d, q.begin() + row_end * d);

    for (int64_t k = 0; k < num_keys; k += kBlock) {
      const int64_t count = std::min(kBlock, num_keys - k);
      transpose(keys.k_nope.data() + k * p, p, count, key_block.data());
      transpose(k_pe.data() + k * rr, rr, count, key_block.data() + p * kBlock);
      for (int64_t i = row_begin; i < row_end; ++i) {
        if (visible[i] <= k) continue;
        accumulate(&weights[(i - row_begin) * padded + k], &queries[(i - row_begin) * d],
                   key_block.data(), d, kBlock);
      }
    }

    for (int64_t i = row_begin; i < row_end; ++i) {
      if (visible[i] == 0) {
        result.lse[i] = -std::numeric_limits<double>::infinity();
        continue;
      }
      double* row = &weights[(i - row_begin) * padded];
      double maximum = -std::numeric_limits<double>::infinity();
      for (int64_t k = 0; k < visible[i]; ++k) {
        row[k] *= softmax_scale;
        maximum = std::max(maximum, row[k]);
      }
      double sum = 0.0;
      for (int64_t k = 0; k < visible[i]; ++k) {
        row[k] = std::exp(row[k] - maximum);
        sum += row[k];
      }
      for (int64_t k = 0; k < visible[i]; ++k) row[k] /= sum;
      result.lse[i] = maximum + std::log(sum);
    }

    for (int64_t k = 0; k < num_keys; k += kBlock) {
      const int64_t count = std::min(kBlock, num_keys - k);
      std::copy_n(keys.v.data() + k * v, count * v, value_block.data());
      for (int64_t i = row_begin; i < row_end; ++i) {
        if (visible[i] <= k) continue;
        accumulate(&result.out[i * v], &weights[(i - row_begin) * padded + k], value_block.data(),
                   std::min(count, visible[i] - k), v);
      }
    }
  }
  return result;
}

}  // namespace mla::oracle
