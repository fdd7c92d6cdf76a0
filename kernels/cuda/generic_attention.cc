#include "kernels/cuda/generic_attention.h"

#include <optional>

#include "kernels/cuda/check.h"
#include "kernels/cuda/generic_attention_args.h"
#include "kernels/cuda/launch.h"
#include "metadata/error.h"

namespace mla::cuda {
namespace {

std::optional<AttentionVariant> find_variant(int32_t qk_dim, int32_t v_dim, DType dtype) {
  for (const auto& variants : {generic_attention_bf16(), generic_attention_fp16()}) {
    for (const AttentionVariant& variant : variants) {
      if (variant.dtype == dtype && qk_dim <= variant.qk_dim && v_dim <= variant.v_dim) {
        return variant;
      }
    }
  }
  return std::nullopt;
}

}  // namespace

bool supports_generic_attention(int32_t qk_head_dim, int32_t v_head_dim, DType dtype) {
  const bool in_units =
      qk_head_dim > 0 && qk_head_dim % 8 == 0 && v_head_dim > 0 && v_head_dim % 8 == 0;
  return in_units && find_variant(qk_head_dim, v_head_dim, dtype).has_value();
}

void generic_attention(const PrefillAttentionParams& p, cudaStream_t stream) {
  const int32_t qk_dim = p.qk_nope_head_dim + p.qk_rope_head_dim;
  const auto variant = find_variant(qk_dim, p.v_head_dim, p.q.dtype);
  if (!variant) {
    throw_error(ErrorCode::kUnsupported, "no CUDA attention for dims {} and {} in {}", qk_dim,
                p.v_head_dim, dtype_name(p.q.dtype));
  }
  const int64_t query_tiles = (p.max_q_len + kQueryTile - 1) / kQueryTile;
  const int64_t blocks = p.num_items.capacity * p.num_heads * query_tiles;
  if (blocks == 0) return;

  const auto* const kernel = reinterpret_cast<const void*>(variant->kernel);
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(variant->shared_bytes)) != cudaSuccess) {
    cudaGetLastError();
    throw_error(ErrorCode::kUnsupported,
                "attention for dims {} and {} needs {} bytes of shared memory a block, more than "
                "this device has",
                qk_dim, p.v_head_dim, variant->shared_bytes);
  }
  constexpr const char* kWhat = "launching generic_attention";
  const cudaLaunchConfig_t config =
      launch_config(kWhat, blocks, kAttentionThreads, variant->shared_bytes, stream);
  const void* arguments[] = {&p, &query_tiles};
  check_launch(cudaLaunchKernelExC(&config, kernel, const_cast<void**>(arguments)), kWhat);
}

}  // namespace mla::cuda
