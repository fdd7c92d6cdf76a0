#include <cuda_fp16.h>

#include "kernels/cuda/sm90/prefill_attention_kernel.cuh"

namespace mla::sm90 {

cudaError_t launch_deepseek_fp16(const PrefillKernelArgs& args, int blocks, cudaStream_t stream) {
  return launch_prefill_attention<DeepSeekTiles, __half>(args, blocks, stream);
}

}  // namespace mla::sm90
