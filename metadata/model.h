// Dimensions of a multi-head latent attention (MLA) layer, the storage types, and the presets.
#ifndef METADATA_MODEL_H_
#define METADATA_MODEL_H_

#include <cstdint>
#include <span>
#include <string_view>

namespace mla {

/// Element types of the tensors that cross the API.
enum class DType { kFloat32, kFloat16, kBFloat16, kFloat8E4M3 };

/// Bytes of one element.
int dtype_bytes(DType dtype);
std::string_view dtype_name(DType dtype);

/// One layer's dimensions on one rank. Symbols in brackets are those of the documentation.
struct ModelDims {
  int32_t num_heads = 0;         // [H] after tensor parallelism, any H >= 1
  int32_t qk_nope_head_dim = 0;  // [P]
  int32_t qk_rope_head_dim = 0;  // [Rr]
  int32_t v_head_dim = 0;        // [V]
  int32_t kv_lora_rank = 0;      // [L]

  int32_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  int32_t latent_dim() const { return kv_lora_rank + qk_rope_head_dim; }
  /// Columns of one head in the expansion: W_UK's P, then W_UV's V.
  int32_t kv_head_dim() const { return qk_nope_head_dim + v_head_dim; }

  bool operator==(const ModelDims&) const = default;
};

/// Throws kInvalidArgument unless every dimension is positive, a multiple of 8 (heads apart) and
/// at most 1,024.
void validate_dims(const ModelDims& dims);

/// 1 / sqrt(P + Rr). Models with YaRN pass their own scale instead.
float default_softmax_scale(const ModelDims& dims);
/// Throws kInvalidArgument unless `scale` is finite and positive.
void validate_softmax_scale(float scale);

struct ModelPreset {
  std::string_view name;
  ModelDims dims;
};
std::span<const ModelPreset> model_presets();
/// Throws kInvalidArgument, listing the known names.
ModelDims find_preset(std::string_view name);

/// How one latent row (L values, then Rr RoPE values) is stored in the cache.
enum class KvCacheFormat {
  kBf16,      // (L + Rr) bf16
  kFp8E4M3,   // (L + Rr) e4m3, one float scale for the whole cache: value = stored * scale
  kFp8DsMla,  // 656 bytes: 512 e4m3; 4 float32 scales, one per 128 values, at byte 512; 64 bf16
              // RoPE values at byte 528. Only L = 512, Rr = 64.
};
std::string_view kv_cache_format_name(KvCacheFormat format);  // "bf16", "fp8_e4m3", "fp8_ds_mla"
KvCacheFormat find_kv_cache_format(std::string_view name);    // throws kInvalidArgument
/// Bytes of one row; throws kInvalidArgument where the format does not serve the dimensions.
int32_t kv_cache_row_bytes(KvCacheFormat format, const ModelDims& dims);

}  // namespace mla

#endif  // METADATA_MODEL_H_
