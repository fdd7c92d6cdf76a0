// What the launcher of the generic attention knows of its kernels.
#ifndef KERNELS_CUDA_GENERIC_ATTENTION_ARGS_H_
#define KERNELS_CUDA_GENERIC_ATTENTION_ARGS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/prefill_attention.h"

namespace mla::cuda {

inline constexpr int kQueryTile = 64;
inline constexpr int kKeyTile = 64;
inline constexpr int kAttentionThreads = 128;

/// A kernel for P + Rr up to qk_dim and V up to v_dim.
struct AttentionVariant {
  int32_t qk_dim = 0;
  int32_t v_dim = 0;
  DType dtype = DType::kBFloat16;
  size_t shared_bytes = 0;
  void (*kernel)(PrefillAttentionParams, int64_t query_tiles) = nullptr;
};

// Narrow ones first. A file each, since they take the compiler long.
std::array<AttentionVariant, 4> generic_attention_bf16();
std::array<AttentionVariant, 4> generic_attention_fp16();

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_GENERIC_ATTENTION_ARGS_H_
