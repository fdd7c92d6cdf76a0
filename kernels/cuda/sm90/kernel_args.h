// What the host hands to the kernels of the Hopper prefill attention, and their launchers.
#ifndef KERNELS_CUDA_SM90_KERNEL_ARGS_H_
#define KERNELS_CUDA_SM90_KERNEL_ARGS_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"
#include "metadata/attention_item.h"

namespace mla::sm90 {

/// An item as the tiles see it. With more than one split, tile t of the item (head * query tiles +
/// query tile) leaves the state of split s in partial tile first_partial + t * splits + s.
struct ScheduledItem {
  AttentionItem item;
  int32_t splits = 1;
  int32_t first_partial = 0;
};

/// The work of one launch, in scratch memory: made by prepare_tiles, handed out by next_tile. Items
/// stand in the order they are worked on, those with the longest tiles first.
struct TileList {
  int32_t* next_tile = nullptr;    // [1]
  int32_t* num_items = nullptr;    // [1]
  int32_t* first_tile = nullptr;   // [num_items + 1] tiles before the item; the last is the total.
                                   // Fits: each tile has output rows of its own in memory.
  ScheduledItem* items = nullptr;  // [num_items]

  int32_t max_partials = 0;
  float* partial_lse = nullptr;  // [max_partials, kQueryRows]
  float* partial_out = nullptr;  // [max_partials, kQueryRows, V]
  uint32_t* arrivals = nullptr;  // [max_partials, consumer warps] splits that are done; those of a
                                 // tile's first split count
};

struct PrepareTilesArgs {
  const AttentionItem* items = nullptr;
  Count num_items;
  int32_t num_heads = 0;
  int32_t num_blocks = 0;  // attention blocks: block b starts with tile b
  TileList tiles;
};

struct PrefillKernelArgs {
  CUtensorMap q;       // {P + Rr, heads, rows}
  CUtensorMap k_nope;  // {P, heads, rows}
  CUtensorMap k_pe;    // {Rr, rows}
  CUtensorMap v;       // {V, heads, rows}
  // 1, or 0 where a head stride of 0 shares one row among the heads.
  int32_t q_head_step = 1;
  int32_t k_head_step = 1;
  int32_t v_head_step = 1;

  int32_t num_heads = 0;
  float softmax_scale = 0.0f;
  TileList tiles;

  ConstHeadRows prefix_out;
  ConstLse prefix_lse;
  HeadRows out;
  Lse lse;
};

cudaError_t launch_prepare_tiles(const PrepareTilesArgs& args, cudaStream_t stream);

// One a file, since each takes the compiler long.
cudaError_t launch_deepseek_bf16(const PrefillKernelArgs& args, int blocks, cudaStream_t stream);
cudaError_t launch_deepseek_fp16(const PrefillKernelArgs& args, int blocks, cudaStream_t stream);
cudaError_t launch_glm_bf16(const PrefillKernelArgs& args, int blocks, cudaStream_t stream);
cudaError_t launch_glm_fp16(const PrefillKernelArgs& args, int blocks, cudaStream_t stream);

}  // namespace mla::sm90

#endif  // KERNELS_CUDA_SM90_KERNEL_ARGS_H_
