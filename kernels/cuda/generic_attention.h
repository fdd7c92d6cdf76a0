// Prefill attention on mma.sync, for every device from sm_80 on and any dims up to a bound.
#ifndef KERNELS_CUDA_GENERIC_ATTENTION_H_
#define KERNELS_CUDA_GENERIC_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/prefill_attention.h"

namespace mla::cuda {

/// Whether a variant takes P + Rr and V, which must be multiples of 8, in bf16 or fp16.
bool supports_generic_attention(int32_t qk_head_dim, int32_t v_head_dim, DType dtype);

/// One launch. `params` have been through kernels/validate.h; throws kUnsupported where
/// supports_generic_attention says no, or where the device has too little shared memory.
///
/// Splits nothing: a row's bits depend on its item alone. Infinities among visible values come out
/// as NaN where the mask cuts through their block of keys.
void generic_attention(const PrefillAttentionParams& params, cudaStream_t stream);

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_GENERIC_ATTENTION_H_
