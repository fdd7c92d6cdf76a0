// Launchers of the ops that write and read the paged latent cache.
#ifndef KERNELS_CUDA_LATENT_CACHE_H_
#define KERNELS_CUDA_LATENT_CACHE_H_

#include <cuda_runtime_api.h>

#include "kernels/latent_cache.h"

namespace mla::cuda {

/// `params` have been through kernels/validate.h. Slots past the cache are skipped.
void write_latent_cache(const WriteLatentCacheParams& params, cudaStream_t stream);

/// `params` have been through kernels/validate.h.
void gather_latent(const GatherLatentParams& params, cudaStream_t stream);

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_LATENT_CACHE_H_
