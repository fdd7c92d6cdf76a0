// Prefill attention for Hopper: one producer warp feeds K and V blocks through the copy engine,
// two consumer warpgroups of 64 query rows each multiply, exponentiate and merge.
//
// A block works on tiles (kQueryRows query rows of one head of one item) until none is left. Keys
// are walked from the last visible block to the first, so that masked blocks come first and the
// main loop has no masking code.
//
// What reaches a result: rows of K and V inside the item's key range only. Rows past the range that
// share its last block are zeroed (V) or masked (K) before use, so NaN there is harmless. A row of
// V inside the range but hidden from some query by causality is multiplied by 0: it must be finite.
#ifndef KERNELS_CUDA_SM90_PREFILL_ATTENTION_KERNEL_CUH_
#define KERNELS_CUDA_SM90_PREFILL_ATTENTION_KERNEL_CUH_

#include "kernels/cuda/sm90/consumer.cuh"
#include "kernels/cuda/sm90/kernel_args.h"
#include "kernels/cuda/sm90/producer.cuh"
#include "kernels/cuda/sm90/ptx.cuh"
#include "kernels/cuda/sm90/shared_memory.cuh"
#include "kernels/cuda/sm90/tile_config.h"

namespace mla::sm90 {

template <typename Config, typename Element>
__global__ void __launch_bounds__(Config::kThreads, 1)
    prefill_attention_kernel(const __grid_constant__ PrefillKernelArgs args) {
  const SharedMemory<Config> shared = shared_memory<Config>();
  if (threadIdx.x == 0) {
    Control& control = *shared.control;
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&control.q_full[i]), 1);
      barrier_init(shared_address(&control.q_empty[i]), kConsumerWarps / 2);
      barrier_init(shared_address(&control.k_full[i]), 1);
      barrier_init(shared_address(&control.k_empty[i]), kConsumerWarps);
      barrier_init(shared_address(&control.v_full[i]), 1);
      barrier_init(shared_address(&control.v_empty[i]), kConsumerWarps);
      barrier_init(shared_address(&control.tile_full[i]), 1);
      barrier_init(shared_address(&control.tile_empty[i]), 32 * kConsumerWarps);
    }
    barrier_init(shared_address(&control.value_tail_cleared), 32 * kConsumerWarps);
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_prior_launch();

  const int warpgroup = static_cast<int>(uniform(threadIdx.x / 128));
  if (warpgroup == 0) {
    lower_registers<Config::kProducerRegisters>();
    if (threadIdx.x < 32) Producer<Config>(args, shared).run();
  } else {
    raise_registers<Config::kConsumerRegisters>();
    Consumer<Config, Element>(args, shared, warpgroup - 1).run();
  }
}

/// Launches `blocks` persistent blocks behind prepare_tiles, which lets them start early.
template <typename Config, typename Element>
cudaError_t launch_prefill_attention(const PrefillKernelArgs& args, int blocks,
                                     cudaStream_t stream) {
  static_assert(sizeof(Control) <= Config::kControlBytes);
  const auto kernel = prefill_attention_kernel<Config, Element>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedMemoryBytes);
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute early_start{};
  early_start.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early_start.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = Config::kSharedMemoryBytes;
  config.stream = stream;
  config.attrs = &early_start;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace mla::sm90

#endif  // KERNELS_CUDA_SM90_PREFILL_ATTENTION_KERNEL_CUH_
