#include "kernels/cuda/generic_attention_kernel.cuh"

namespace mla::cuda {

std::array<AttentionVariant, 4> generic_attention_bf16() {
  return {attention_variant<__nv_bfloat16, 64, 64>(DType::kBFloat16),
          attention_variant<__nv_bfloat16, 192, 128>(DType::kBFloat16),
          attention_variant<__nv_bfloat16, 256, 256>(DType::kBFloat16),
          attention_variant<__nv_bfloat16, 320, 256>(DType::kBFloat16)};
}

}  // namespace mla::cuda
