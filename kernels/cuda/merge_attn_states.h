// Launcher of merge_attn_states.
#ifndef KERNELS_CUDA_MERGE_ATTN_STATES_H_
#define KERNELS_CUDA_MERGE_ATTN_STATES_H_

#include <cuda_runtime_api.h>

#include "kernels/merge_attn_states.h"

namespace mla::cuda {

/// One launch of at most 3 blocks a multiprocessor. `params` have been through kernels/validate.h.
void merge_attn_states(const MergeAttnStatesParams& params, int multiprocessors,
                       cudaStream_t stream);

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_MERGE_ATTN_STATES_H_
