// Launchers of the products with kv_b_proj.
#ifndef KERNELS_CUDA_EXPAND_H_
#define KERNELS_CUDA_EXPAND_H_

#include <cuda_runtime_api.h>

#include "kernels/expand.h"

namespace mla::cuda {

class Gemm;

// `params` have been through kernels/validate.h. The first two compute all rows of their capacity,
// whatever the actual count: cuBLAS takes its sizes from the host.
void expand(const ExpandParams& params, Gemm& gemm, cudaStream_t stream);
void absorb_query(const AbsorbQueryParams& params, Gemm& gemm, cudaStream_t stream);
void project_value(const ProjectValueParams& params, cudaStream_t stream);

/// absorbed[row, h, L:] = q[row, h, P:].
void copy_rope(const AbsorbQueryParams& params, cudaStream_t stream);

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_EXPAND_H_
