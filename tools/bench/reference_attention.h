// Device helpers of the attention benchmark: random inputs, and attention by its definition in
// float64 for chosen rows.
#ifndef TOOLS_BENCH_REFERENCE_ATTENTION_H_
#define TOOLS_BENCH_REFERENCE_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/prefill_attention.h"

namespace mla::bench {

/// rows x columns standard normal values, a function of (seed, row, column) alone.
cudaError_t fill_normal(const Rows& rows, int64_t num_rows, int64_t num_columns, uint64_t seed,
                        cudaStream_t stream);

/// A query row: `query` of params.items[item], all heads.
struct SampledRow {
  int32_t item = 0;
  int32_t query = 0;
};

/// out [num_samples, H, V] and lse [num_samples, H] of the rows, before any merge. `scores` holds
/// kReferenceBlocks * max_k_len doubles.
inline constexpr int kReferenceBlocks = 1024;
cudaError_t reference_attention(const PrefillAttentionParams& params, const SampledRow* samples,
                                int num_samples, double* scores, double* out, double* lse,
                                cudaStream_t stream);

}  // namespace mla::bench

#endif  // TOOLS_BENCH_REFERENCE_ATTENTION_H_
