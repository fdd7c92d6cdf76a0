#include "kernels/cuda/generic_attention_kernel.cuh"

namespace mla::cuda {

std::array<AttentionVariant, 4> generic_attention_fp16() {
  return {attention_variant<__half, 64, 64>(DType::kFloat16),
          attention_variant<__half, 192, 128>(DType::kFloat16),
          attention_variant<__half, 256, 256>(DType::kFloat16),
          attention_variant<__half, 320, 256>(DType::kFloat16)};
}

}  // namespace mla::cuda
