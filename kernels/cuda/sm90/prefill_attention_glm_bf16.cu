#include <cuda_bf16.h>

#include "kernels/cuda/sm90/prefill_attention_kernel.cuh"

namespace mla::sm90 {

cudaError_t launch_glm_bf16(const PrefillKernelArgs& args, int blocks, cudaStream_t stream) {
  return launch_prefill_attention<GlmTiles, __nv_bfloat16>(args, blocks, stream);
}

}  // namespace mla::sm90
