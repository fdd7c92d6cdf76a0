// What producer and consumers share: the tiles, and the barriers that hand them over.
#ifndef KERNELS_CUDA_SM90_SHARED_MEMORY_CUH_
#define KERNELS_CUDA_SM90_SHARED_MEMORY_CUH_

#include <cstdint>

#include "kernels/cuda/sm90/ptx.cuh"
#include "kernels/cuda/sm90/tile_config.h"
#include "kernels/cuda/sm90/tile_schedule.cuh"

namespace mla::sm90 {

constexpr int kTileSlots = 2;

/// Barriers and tile slots, at kControlOffset.
struct Control {
  uint64_t q_full[2], q_empty[2];  // one a consumer warpgroup, which reads its own rows alone
  uint64_t k_full[2], k_empty[2];
  uint64_t v_full[2], v_empty[2];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  uint64_t value_tail_cleared;  // by all consumers
  TileWork tile[kTileSlots];
};

/// Place in a ring of two stages, and the parity of the pass over it.
struct RingPosition {
  uint32_t stage = 0;
  uint32_t parity = 0;

  __device__ void step() {
    stage ^= 1;
    parity ^= stage == 0;
  }
};

template <typename Config>
struct SharedMemory {
  uint32_t base;
  Control* control;

  __device__ uint32_t q(int warpgroup) const {
    return base + Config::kQueryOffset + warpgroup * Config::kQueryBytes;
  }
  __device__ uint32_t k(uint32_t stage) const {
    return base + Config::kKeyOffset + stage * Config::kKeyBytes;
  }
  __device__ uint32_t v(uint32_t stage) const {
    return base + Config::kValueOffset + stage * Config::kValueBytes;
  }
};

template <typename Config>
__device__ __forceinline__ SharedMemory<Config> shared_memory() {
  extern __shared__ __align__(Config::kAlignment) uint8_t dynamic_shared[];
  return {shared_address(dynamic_shared),
          reinterpret_cast<Control*>(dynamic_shared + Config::kControlOffset)};
}

}  // namespace mla::sm90

#endif  // KERNELS_CUDA_SM90_SHARED_MEMORY_CUH_
