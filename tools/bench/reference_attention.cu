#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tools/bench/reference_attention.h"

namespace mla::bench {
namespace {

constexpr int kThreads = 256;

__device__ double load(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(data)[index]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
__device__ uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

__global__ void fill_normal_kernel(Rows rows, int64_t num_rows, int64_t num_columns,
                                   uint64_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_rows * num_columns;
       i += step) {
    const uint64_t bits = mix(mix(seed) + static_cast<uint64_t>(i));
    const float u = (static_cast<float>(bits >> 40) + 1.0f) * 0x1p-24f;  // (0, 1]
    const float angle = static_cast<float>(bits & 0xFFFFFF) * 0x1p-23f;  // of a half turn
    const float value = sqrtf(-2.0f * logf(u)) * cospif(angle);
    const int64_t index = i / num_columns * rows.row_stride + i % num_columns;
    if (rows.dtype == DType::kFloat32) {
      static_cast<float*>(rows.data)[index] = value;
    } else if (rows.dtype == DType::kFloat16) {
      static_cast<__half*>(rows.data)[index] = __float2half_rn(value);
    } else {
      static_cast<__nv_bfloat16*>(rows.data)[index] = __float2bfloat16_rn(value);
    }
  }
}

template <typename Combine>
__device__ double reduce(double value, Combine combine) {
  __shared__ double shared[kThreads];
  __syncthreads();
  shared[threadIdx.x] = value;
  __syncthreads();
  for (unsigned step = kThreads / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) {
      shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + step]);
    }
    __syncthreads();
  }
  return shared[0];
}

__global__ void reference_kernel(PrefillAttentionParams p, const SampledRow* samples,
                                 int num_samples, double* scores, double* out, double* lse) {
  double* const row_scores = scores + int64_t{blockIdx.x} * p.max_k_len;
  for (int64_t work = blockIdx.x; work < int64_t{num_samples} * p.num_heads; work += gridDim.x) {
    const SampledRow sample = samples[work / p.num_heads];
    const int64_t head = work % p.num_heads;
    const AttentionItem item = p.items[sample.item];
    const int64_t bound = int64_t{sample.query} + item.causal_offset + 1;
    const int64_t keys = max(int64_t{0}, min(int64_t{item.k_len}, bound));
    const int64_t q =
        (int64_t{item.q_begin} + sample.query) * p.q.row_stride + head * p.q.head_stride;

    double most = -INFINITY;
    for (int64_t k = threadIdx.x; k < keys; k += kThreads) {
      const int64_t row = item.k_begin + k;
      double dot = 0;
      for (int64_t d = 0; d < p.qk_nope_head_dim; ++d) {
        dot += load(p.q.data, q + d, p.q.dtype) *
               load(p.k_nope.data, row * p.k_nope.row_stride + head * p.k_nope.head_stride + d,
                    p.k_nope.dtype);
      }
      for (int64_t d = 0; d < p.qk_rope_head_dim; ++d) {
        dot += load(p.q.data, q + p.qk_nope_head_dim + d, p.q.dtype) *
               load(p.k_pe.data, row * p.k_pe.row_stride + d, p.k_pe.dtype);
      }
      row_scores[k] = dot * p.softmax_scale;
      most = fmax(most, row_scores[k]);
    }
    most = reduce(most, [](double a, double b) { return fmax(a, b); });
    double sum = 0;
    for (int64_t k = threadIdx.x; k < keys; k += kThreads) {
      row_scores[k] = exp(row_scores[k] - most);
      sum += row_scores[k];
    }
    sum = reduce(sum, [](double a, double b) { return a + b; });

    for (int64_t d = threadIdx.x; d < p.v_head_dim; d += kThreads) {
      double value = 0;
      for (int64_t k = 0; k < keys; ++k) {
        value += row_scores[k] *
                 load(p.v.data, (item.k_begin + k) * p.v.row_stride + head * p.v.head_stride + d,
                      p.v.dtype);
      }
      out[work * p.v_head_dim + d] = keys == 0 ? 0.0 : value / sum;
    }
    if (threadIdx.x == 0) lse[work] = keys == 0 ? -INFINITY : most + log(sum);
    __syncthreads();
  }
}

}  // namespace

cudaError_t fill_normal(const Rows& rows, int64_t num_rows, int64_t num_columns, uint64_t seed,
                        cudaStream_t stream) {
  fill_normal_kernel<<<2048, kThreads, 0, stream>>>(rows, num_rows, num_columns, seed);
  return cudaGetLastError();
}

cudaError_t reference_attention(const PrefillAttentionParams& params, const SampledRow* samples,
                                int num_samples, double* scores, double* out, double* lse,
                                cudaStream_t stream) {
  reference_kernel<<<kReferenceBlocks, kThreads, 0, stream>>>(params, samples, num_samples, scores,
                                                              out, lse);
  return cudaGetLastError();
}

}  // namespace mla::bench
