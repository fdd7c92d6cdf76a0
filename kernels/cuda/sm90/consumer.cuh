// A consumer: one warpgroup that multiplies, exponentiates and writes its 64 rows of each tile.
//
// The product S = Q K(n)^T is under way while O += P V(n+1) is, and the softmax of block n runs
// beside the latter.
#ifndef KERNELS_CUDA_SM90_CONSUMER_CUH_
#define KERNELS_CUDA_SM90_CONSUMER_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/sm90/kernel_args.h"
#include "kernels/cuda/sm90/ptx.cuh"
#include "kernels/cuda/sm90/row_softmax.cuh"
#include "kernels/cuda/sm90/shared_memory.cuh"
#include "kernels/cuda/sm90/tile_config.h"
#include "kernels/cuda/sm90/tile_schedule.cuh"
#include "kernels/cuda/sm90/wgmma.cuh"
#include "kernels/lse.h"

namespace mla::sm90 {

__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16*) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half*) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename Config, typename Element>
class Consumer {
 public:
  __device__ Consumer(const PrefillKernelArgs& args, const SharedMemory<Config>& shared,
                      int warpgroup)
      : args_(args),
        shared_(shared),
        control_(*shared.control),
        lane_(static_cast<int>(threadIdx.x) % 32),
        row_(kWarpgroupRows * warpgroup + static_cast<int>(threadIdx.x) % 128 / 32 * 16 +
             lane_ / 4),
        scale_(args.softmax_scale * 1.44269504f),
        warpgroup_(warpgroup) {}

  __device__ void run() {
    RingPosition slot;
    for (;;) {
      barrier_wait(shared_address(&control_.tile_full[slot.stage]), slot.parity);
      // Read where needed, since registers are dear.
      const TileWork& work = control_.tile[slot.stage];
      const int32_t rows = work.rows;
      if (rows > kWarpgroupRows * warpgroup_) {
        attend(work);
        store(work);
      } else if (rows > 0) {
        skip(work);
      }
      barrier_arrive(shared_address(&control_.tile_empty[slot.stage]));
      slot.step();
      if (rows == 0) return;
    }
  }

 private:
  static constexpr int kScores = Config::kKeyRows / 2;  // registers a thread
  static constexpr int kOutputs = Config::kValueDim / 2;
  using QkProduct = Wgmma<Config::kKeyRows, Element>;
  using PvProduct = Wgmma<Config::kValueDim, Element>;

  /// One arrival a warp: its lanes are past their last access.
  __device__ void release(uint64_t* barrier) {
    if (lane_ == 0) barrier_arrive(shared_address(barrier));
  }

  __device__ __forceinline__ void attend(const TileWork& work) {
    softmax_.reset();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o_[i] = 0.0f;
    if (work.block_begin == work.block_end) return;

    barrier_wait(shared_address(&control_.q_full[warpgroup_]), q_parity_);
    q_parity_ ^= 1;
    const int32_t begin = work.block_begin;
    int32_t block = work.block_end - 1;
    start_scores();
    wgmma_wait<0>();
    pin_registers(s_);
    release_keys();
    if (block == begin) release(&control_.q_empty[warpgroup_]);
    mask_scores(work, block);
    softmax_.apply(s_, scale_);
    pack_powers();
    clear_value_tail(work);

    const int32_t masked_end = max(full_key_blocks<Config>(work.limit, work.k_len), begin);
    for (--block; block >= masked_end; --block) step<true>(work, block, begin);
    for (; block >= begin; --block) step<false>(work, block, begin);

    start_output();
    wgmma_wait<0>();
    pin_registers(o_);
    release_values();
  }

  /// What attend does to the barriers, for a warpgroup without valid rows.
  __device__ __forceinline__ void skip(const TileWork& work) {
    if (work.block_begin == work.block_end) return;
    for (int32_t block = work.block_end; block > work.block_begin; --block) {
      wait_for_keys();
      release_keys();
      if (block == work.block_end) clear_value_tail(work);
      wait_for_values();
      release_values();
    }
  }

  /// Scores and softmax of `block`, beside the output of the block before. Block `begin` is the
  /// last to need Q.
  template <bool kMasked>
  __device__ __forceinline__ void step(const TileWork& work, int32_t block, int32_t begin) {
    start_scores();
    start_output();
    wgmma_wait<1>();
    pin_registers(s_);
    release_keys();
    if (block == begin) release(&control_.q_empty[warpgroup_]);
    if constexpr (kMasked) mask_scores(work, block);
    const bool rescale = softmax_.apply(s_, scale_);
    // A wait that is over already, in a branch that needs every power: so the compiler leaves the
    // powers beside the product instead of moving them behind it. All warps of the warpgroup must
    // come to the same wgmma_wait, so that cannot stand in the branch itself.
    if (rescale) wait_for_values();
    wgmma_wait<0>();
    pin_registers(o_);
    release_values();
    if (rescale) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o_[i] *= softmax_.factor[i / 2 % 2];
    }
    pack_powers();
  }

  __device__ __forceinline__ void wait_for_keys() {
    barrier_wait(shared_address(&control_.k_full[k_.stage]), k_.parity);
  }

  __device__ __forceinline__ void start_scores() {
    wait_for_keys();
    const uint64_t q = matrix_descriptor(shared_.q(uniform(warpgroup_)), 16, 8 * kPanelRowBytes);
    const uint64_t k = matrix_descriptor(shared_.k(uniform(k_.stage)), 16, 8 * kPanelRowBytes);
    pin_registers(s_);
    wgmma_fence();
#pragma unroll
    for (int column = 0; column < Config::kQkDim; column += 16) {
      const int panel = column / kPanelColumns;
      const int bytes = column % kPanelColumns * 2;
      QkProduct::multiply_shared(s_, advance(q, panel * Config::kQueryPanelBytes + bytes),
                                 advance(k, panel * Config::kKeyPanelBytes + bytes), column > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void wait_for_values() {
    barrier_wait(shared_address(&control_.v_full[v_.stage]), v_.parity);
  }

  __device__ __forceinline__ void start_output() {
    wait_for_values();
    const uint64_t v =
        matrix_descriptor(shared_.v(uniform(v_.stage)), Config::kKeyPanelBytes, 8 * kPanelRowBytes);
    pin_registers(o_);
    pin_registers(p_);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kKeyRows / 16; ++i) {
      PvProduct::multiply_registers(o_, p_ + 4 * i, advance(v, i * 16 * kPanelRowBytes));
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void release_keys() {
    release(&control_.k_empty[k_.stage]);
    k_.step();
  }
  __device__ __forceinline__ void release_values() {
    release(&control_.v_empty[v_.stage]);
    v_.step();
  }

  __device__ __forceinline__ void pack_powers() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      p_[i] = pack(s_[2 * i], s_[2 * i + 1], static_cast<Element*>(nullptr));
    }
  }

  __device__ __forceinline__ void mask_scores(const TileWork& work, int32_t block) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t visible = visible_keys(work.limit, row_ + 8 * r, work.k_len) -
                              block * Config::kKeyRows - 2 * (lane_ % 4);
#pragma unroll
      for (int i = 2 * r; i < kScores; i += 4) {
        if (2 * i - 4 * r >= visible) s_[i] = -INFINITY;
        if (2 * i - 4 * r + 1 >= visible) s_[i + 1] = -INFINITY;
      }
    }
  }

  /// Zeroes the rows of the last V block that lie past the item's keys: their weight is 0, but they
  /// belong to others and may hold NaN. Both warpgroups read the block, so both wait.
  __device__ __forceinline__ void clear_value_tail(const TileWork& work) {
    const int32_t valid = work.k_len - (work.block_end - 1) * Config::kKeyRows;
    if (valid >= Config::kKeyRows) return;
    wait_for_values();
    const uint32_t base = shared_.v(v_.stage);
    constexpr int kThreads = 128 * Config::kConsumerWarpgroups;
    constexpr int kChunks = kPanelRowBytes / 16;
    for (int i = static_cast<int>(threadIdx.x) - 128; i < (Config::kKeyRows - valid) * kChunks;
         i += kThreads) {
#pragma unroll
      for (int panel = 0; panel < Config::kValueDim / kPanelColumns; ++panel) {
        const uint32_t address = base + panel * Config::kKeyPanelBytes + valid * kPanelRowBytes;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address + 16 * i), "r"(0)
                     : "memory");
      }
    }
    fence_async_proxy();
    const uint32_t cleared = shared_address(&control_.value_tail_cleared);
    barrier_arrive(cleared);
    barrier_wait(cleared, cleared_parity_);
    cleared_parity_ ^= 1;
  }

  // ---- epilogue ----
  //
  // Warps work apart here; those without valid rows have nothing to do.

  static constexpr int kGroups = kOutputs / 16;  // of 32 columns
  static constexpr float kLn2 = 0.693147181f;

  __device__ __forceinline__ void store(const TileWork& work) {
    if (static_cast<int32_t>(uniform(row_ & ~15)) >= work.rows) return;
    transpose_quads();
    float lse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = softmax_.sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const bool empty =
          visible_keys(work.limit, row_ + 8 * r, work.k_len) <= work.block_begin * Config::kKeyRows;
      lse[r] = empty ? -INFINITY : (softmax_.offset(r, scale_) + log2f(sum)) * kLn2;
      scale_row(r, empty ? 0.0f : 1.0f / sum);
    }
    if (work.splits > 1) {
      store_partial(work, lse);
      if (!last_to_arrive(work)) return;
      merge_partials(work, lse);
    }
    store_rows(work, lse);
  }

  /// Exchanges o_ within quads, so that each lane holds 8 consecutive columns of every 32: those
  /// from 8 * (lane % 4) on. Before, pair j of a group holds columns 8j + 2 * (lane % 4) + {0, 1}:
  /// a 4 x 4 transposition over (j, lane % 4), which swaps, bit by bit, what is off the diagonal.
  __device__ __forceinline__ void transpose_quads() {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool upper = (lane_ & bit) != 0;
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        if (i / 4 & bit) continue;
        float& low = o_[i];
        float& high = o_[i + 4 * bit];
        const float received = __shfl_xor_sync(~0u, upper ? low : high, bit);
        (upper ? low : high) = received;
      }
    }
  }
  /// Column 32 * group + 8 * (lane % 4) + i of row row_ + 8r, after transpose_quads.
  __device__ __forceinline__ float& result(int r, int group, int i) {
    return o_[16 * group + i / 2 * 4 + 2 * r + i % 2];
  }
  __device__ __forceinline__ int32_t column(int group) const {
    return 32 * group + 8 * (lane_ % 4);
  }

  /// A factor of 0 selects 0: the values may be NaN.
  __device__ __forceinline__ void scale_row(int r, float factor) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& value = result(r, group, i);
        value = factor == 0.0f ? 0.0f : value * factor;
      }
    }
  }
  /// Adds weight * source, V contiguous floats, to a row. They may be another block's: no L1.
  __device__ __forceinline__ void add_row(int r, float weight, const float* source) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float4* chunk = reinterpret_cast<const float4*>(source + column(group));
      const float4 low = __ldcg(chunk), high = __ldcg(chunk + 1);
      const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        result(r, group, i) = fmaf(weight, values[i], result(r, group, i));
      }
    }
  }
  __device__ __forceinline__ void write_row(int r, float* destination) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float4* chunk = reinterpret_cast<float4*>(destination + column(group));
      chunk[0] = make_float4(result(r, group, 0), result(r, group, 1), result(r, group, 2),
                             result(r, group, 3));
      chunk[1] = make_float4(result(r, group, 4), result(r, group, 5), result(r, group, 6),
                             result(r, group, 7));
    }
  }
  __device__ __forceinline__ void write_row(int r, Element* destination) {
    Element* const tag = nullptr;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      *reinterpret_cast<uint4*>(destination + column(group)) =
          make_uint4(pack(result(r, group, 0), result(r, group, 1), tag),
                     pack(result(r, group, 2), result(r, group, 3), tag),
                     pack(result(r, group, 4), result(r, group, 5), tag),
                     pack(result(r, group, 6), result(r, group, 7), tag));
    }
  }

  __device__ __forceinline__ int64_t partial_row(const TileWork& work, int32_t split, int r) const {
    return int64_t{work.partial + split} * kQueryRows + row_ + 8 * r;
  }

  __device__ __forceinline__ void store_partial(const TileWork& work, const float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = partial_row(work, work.split, r);
      write_row(r, args_.tiles.partial_out + row * Config::kValueDim);
      if (lane_ % 4 == 0) args_.tiles.partial_lse[row] = lse[r];
    }
  }

  /// Counts this warp's split of the tile as done. The last one sees what all have written.
  __device__ __forceinline__ bool last_to_arrive(const TileWork& work) {
    __syncwarp();
    uint32_t before = 0;
    if (lane_ == 0) {
      before = count_arrival(&args_.tiles.arrivals[work.partial * kConsumerWarps + row_ / 16]);
    }
    return uniform(before) == static_cast<uint32_t>(work.splits) - 1;
  }

  /// Puts the splits' partials together, in their order whoever arrives last. Of a row's splits,
  /// each lane of a quad weighs every fourth.
  __device__ __forceinline__ void merge_partials(const TileWork& work, float (&lse)[2]) {
    constexpr int kShare = kMaxSplits / 4;
    float weights[2][kShare];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = -INFINITY;
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        const int32_t split = 4 * i + lane_ % 4;
        weights[r][i] = split < work.splits
                            ? __ldcg(&args_.tiles.partial_lse[partial_row(work, split, r)])
                            : -INFINITY;
        most = fmaxf(most, weights[r][i]);
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float offset = most == -INFINITY ? 0.0f : most;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        weights[r][i] = expf(weights[r][i] - offset);
        sum += weights[r][i];
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      lse[r] = sum == 0.0f ? -INFINITY : offset + logf(sum);
      const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
      for (int i = 0; i < kShare; ++i) weights[r][i] *= factor;
      scale_row(r, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
#pragma unroll 1
      for (int32_t split = 4 * i; split < min(4 * i + 4, work.splits); ++split) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          add_row(r, __shfl_sync(~0u, weights[r][i], lane_ / 4 * 4 + split % 4),
                  args_.tiles.partial_out + partial_row(work, split, r) * Config::kValueDim);
        }
      }
    }
  }

  /// Merges with the prefix, if any, and writes rows of out and lse.
  __device__ __forceinline__ void store_rows(const TileWork& work, const float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool valid = row_ + 8 * r < work.rows;
      const int64_t row = int64_t{work.out_row} + row_ + 8 * r;
      MergeWeights weights{0.0f, 1.0f, lse[r]};
      if (valid && args_.prefix_out.data != nullptr) {
        weights = merge_weights(
            args_.prefix_lse
                .data[work.head * args_.prefix_lse.head_stride + row * args_.prefix_lse.row_stride],
            lse[r]);
      }
      __syncwarp();  // lse may be the prefix's: all lanes of the quad have read it
      if (!valid) continue;
      if (lane_ % 4 == 0 && args_.lse.data != nullptr) {
        args_.lse.data[work.head * args_.lse.head_stride + row * args_.lse.row_stride] =
            weights.lse;
      }
      if (args_.prefix_out.data != nullptr) {
        scale_row(r, weights.suffix);
        if (weights.prefix != 0.0f) {
          add_row(r, weights.prefix,
                  static_cast<const float*>(args_.prefix_out.data) +
                      row * args_.prefix_out.row_stride + work.head * args_.prefix_out.head_stride);
        }
      }
      const int64_t offset = row * args_.out.row_stride + work.head * args_.out.head_stride;
      if (args_.out.dtype == DType::kFloat32) {
        write_row(r, static_cast<float*>(args_.out.data) + offset);
      } else {
        write_row(r, static_cast<Element*>(args_.out.data) + offset);
      }
    }
  }

  const PrefillKernelArgs& args_;
  const SharedMemory<Config> shared_;
  Control& control_;
  const int lane_;
  const int row_;  // of the tile; the thread also holds row_ + 8
  const float scale_;
  const int warpgroup_;
  RingPosition k_, v_;
  uint32_t q_parity_ = 0;
  uint32_t cleared_parity_ = 0;

  RowSoftmax softmax_;
  float s_[kScores];
  uint32_t p_[kScores / 2];
  float o_[kOutputs];
};

}  // namespace mla::sm90

#endif  // KERNELS_CUDA_SM90_CONSUMER_CUH_
