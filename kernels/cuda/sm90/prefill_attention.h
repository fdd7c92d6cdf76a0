// Prefill attention on Hopper (sm_90a) for (P, Rr, V) = (128, 64, 128) and (192, 64, 256).
#ifndef KERNELS_CUDA_SM90_PREFILL_ATTENTION_H_
#define KERNELS_CUDA_SM90_PREFILL_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/prefill_attention.h"

namespace mla::sm90 {

/// Whether there is a kernel for the dimensions and the dtype of q, k and v.
bool supports_prefill_attention(int32_t nope_dim, int32_t rope_dim, int32_t v_dim, DType dtype);

/// Whether it serves these params: besides, `out` and `prefix_out` must be 16-byte aligned, and no
/// stride so large that the copy engine cannot take it.
bool supports_prefill_attention(const PrefillAttentionParams& params);

/// Bytes of scratch for launches of up to `max_items` items whose key lengths add up to at most
/// `max_rows`. Items of few tiles and many keys are cut into ranges of keys, whose partial results
/// lie there; with less scratch (max_rows = 0 gives the least) those that do not fit stay whole,
/// and then the bits of a row depend on the items before its own.
size_t prefill_attention_scratch_bytes(int32_t num_heads, int32_t v_dim, int64_t max_items,
                                       int64_t max_rows);

/// Two launches on `stream`; no wait, no allocation, no copy. Occupies at most `max_blocks`
/// multiprocessors, each wholly. `params` have been through kernels/validate.h. Throws kUnsupported
/// where supports_prefill_attention says no and kInvalidArgument for too little scratch, before
/// anything is launched.
///
/// NaN in K or V rows outside an item's key range is harmless. A NaN or infinity in a V row that
/// causality hides may still reach queries of the same item whose block of keys holds that row.
void prefill_attention(const PrefillAttentionParams& params, std::span<std::byte> scratch,
                       int max_blocks, cudaStream_t stream);

}  // namespace mla::sm90

#endif  // KERNELS_CUDA_SM90_PREFILL_ATTENTION_H_
