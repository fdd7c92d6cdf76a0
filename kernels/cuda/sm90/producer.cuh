// The producer: one warp that takes tiles and starts the copies of Q, K and V.
#ifndef KERNELS_CUDA_SM90_PRODUCER_CUH_
#define KERNELS_CUDA_SM90_PRODUCER_CUH_

#include "kernels/cuda/sm90/kernel_args.h"
#include "kernels/cuda/sm90/ptx.cuh"
#include "kernels/cuda/sm90/shared_memory.cuh"
#include "kernels/cuda/sm90/tile_config.h"
#include "kernels/cuda/sm90/tile_schedule.cuh"

namespace mla::sm90 {

template <typename Config>
class Producer {
 public:
  __device__ Producer(const PrefillKernelArgs& args, const SharedMemory<Config>& shared)
      : args_(args), shared_(shared) {}

  /// One warp; its lanes search for tiles together and lane 0 starts the copies.
  __device__ void run() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Control& control = *shared_.control;
    TileLocator<Config> locator(args_.tiles, args_.num_heads, lane);
    RingPosition slot;
    int32_t tile = static_cast<int32_t>(blockIdx.x);
    for (;;) {
      if (!locator.contains(tile)) {
        if (lane == 0) {
          barrier_wait(shared_address(&control.tile_empty[slot.stage]), slot.parity ^ 1);
          control.tile[slot.stage].rows = 0;
          barrier_arrive(shared_address(&control.tile_full[slot.stage]));
        }
        return;
      }
      int32_t next = 0;
      if (lane == 0) next = atomicAdd(args_.tiles.next_tile, 1);
      const TileWork work = locator.locate(tile);
      if (lane == 0) {
        barrier_wait(shared_address(&control.tile_empty[slot.stage]), slot.parity ^ 1);
        control.tile[slot.stage] = work;
        barrier_arrive(shared_address(&control.tile_full[slot.stage]));
        if (work.block_begin < work.block_end) load_tile(work);
      }
      slot.step();
      tile = __shfl_sync(~0u, next, 0);
    }
  }

 private:
  /// K runs one block ahead of V, as the consumers use them.
  __device__ __forceinline__ void load_tile(const TileWork& work) {
#pragma unroll 1
    for (int32_t block = work.block_end; block >= work.block_begin; --block) {
      if (block > work.block_begin) load_keys(work, block - 1);
      if (block == work.block_end) {
        load_queries(work);
      } else {
        load_values(work, block);
      }
    }
  }

  __device__ __forceinline__ void load_queries(const TileWork& work) {
#pragma unroll
    for (int warpgroup = 0; warpgroup < Config::kConsumerWarpgroups; ++warpgroup) {
      const int row = warpgroup * kWarpgroupRows;
      if (row >= work.rows) return;
      const uint32_t full = shared_address(&shared_.control->q_full[warpgroup]);
      barrier_wait(shared_address(&shared_.control->q_empty[warpgroup]), q_parity_[warpgroup] ^ 1);
      q_parity_[warpgroup] ^= 1;
      barrier_arrive_expect(full, Config::kQueryBytes);
#pragma unroll
      for (int panel = 0; panel < Config::kQkDim / kPanelColumns; ++panel) {
        load_box(shared_.q(warpgroup) + panel * Config::kQueryPanelBytes, &args_.q,
                 panel * kPanelColumns, work.head * args_.q_head_step, work.q_row + row, full,
                 policy_evict_first());
      }
    }
  }

  __device__ __forceinline__ void load_keys(const TileWork& work, int32_t block) {
    const uint32_t full = shared_address(&shared_.control->k_full[k_.stage]);
    barrier_wait(shared_address(&shared_.control->k_empty[k_.stage]), k_.parity ^ 1);
    barrier_arrive_expect(full, Config::kKeyBytes);
    const int32_t row = work.k_begin + block * Config::kKeyRows;
    uint32_t destination = shared_.k(k_.stage);
#pragma unroll
    for (int column = 0; column < Config::kNopeDim; column += kPanelColumns) {
      load_box(destination, &args_.k_nope, column, work.head * args_.k_head_step, row, full,
               policy_evict_last());
      destination += Config::kKeyPanelBytes;
    }
#pragma unroll
    for (int column = 0; column < Config::kRopeDim; column += kPanelColumns) {
      load_box(destination, &args_.k_pe, column, row, full, policy_evict_last());
      destination += Config::kKeyPanelBytes;
    }
    k_.step();
  }

  __device__ __forceinline__ void load_values(const TileWork& work, int32_t block) {
    const uint32_t full = shared_address(&shared_.control->v_full[v_.stage]);
    barrier_wait(shared_address(&shared_.control->v_empty[v_.stage]), v_.parity ^ 1);
    barrier_arrive_expect(full, Config::kValueBytes);
    const int32_t row = work.k_begin + block * Config::kKeyRows;
#pragma unroll
    for (int panel = 0; panel < Config::kValueDim / kPanelColumns; ++panel) {
      load_box(shared_.v(v_.stage) + panel * Config::kKeyPanelBytes, &args_.v,
               panel * kPanelColumns, work.head * args_.v_head_step, row, full,
               policy_evict_last());
    }
    v_.step();
  }

  const PrefillKernelArgs& args_;
  const SharedMemory<Config> shared_;
  RingPosition k_, v_;
  uint32_t q_parity_[Config::kConsumerWarpgroups] = {};
};

}  // namespace mla::sm90

#endif  // KERNELS_CUDA_SM90_PRODUCER_CUH_
