// Launchers of mask_empty_context and clear_partial: what makes rows empty.
#ifndef KERNELS_CUDA_EMPTY_ROWS_H_
#define KERNELS_CUDA_EMPTY_ROWS_H_

#include <cuda_runtime_api.h>

#include "kernels/merge_attn_states.h"

namespace mla::cuda {

/// One launch of at most 4 blocks a multiprocessor. `params` have been through kernels/validate.h.
void mask_empty_context(const MaskEmptyContextParams& params, int multiprocessors,
                        cudaStream_t stream);

void clear_partial(const ClearPartialParams& params, cudaStream_t stream);

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_EMPTY_ROWS_H_
