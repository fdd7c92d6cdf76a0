#include "metadata/model.h"

#include <array>
#include <cmath>
#include <string>

#include "metadata/error.h"

namespace mla {
namespace {

// {H, P, Rr, V, L} as num_attention_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim and
// kv_lora_rank stand in the config.json that each model is published with.
constexpr std::array kPresets = {
    ModelPreset{"deepseek-v2", {128, 128, 64, 128, 512}},      // deepseek-ai/DeepSeek-V2
    ModelPreset{"deepseek-v2-lite", {16, 128, 64, 128, 512}},  // deepseek-ai/DeepSeek-V2-Lite
    ModelPreset{"deepseek-v3", {128, 128, 64, 128, 512}},      // deepseek-ai/DeepSeek-V3
    ModelPreset{"deepseek-r1", {128, 128, 64, 128, 512}},      // deepseek-ai/DeepSeek-R1
    ModelPreset{"kimi-k2", {64, 128, 64, 128, 512}},           // moonshotai/Kimi-K2-Instruct
    ModelPreset{"glm-5", {64, 192, 64, 256, 512}},             // zai-org/GLM-5
    ModelPreset{"glm-4.7-flash", {20, 192, 64, 256, 512}},     // zai-org/GLM-4.7-Flash
};

constexpr int32_t kMaxDim = 1024;

void validate_dim(std::string_view name, int32_t value) {
  if (value < 8 || value > kMaxDim || value % 8 != 0) {
    throw_error(ErrorCode::kInvalidArgument, "{} is {}; it must be a multiple of 8 from 8 to {}",
                name, value, kMaxDim);
  }
}

template <typename Range, typename Name>
std::string list_names(const Range& range, Name name) {
  std::string names;
  for (const auto& entry : range) names += (names.empty() ? "" : ", ") + std::string(name(entry));
  return names;
}

}  // namespace

int dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat8E4M3:
      return 1;
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown dtype {}", static_cast<int>(dtype));
}

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3";
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown dtype {}", static_cast<int>(dtype));
}

void validate_dims(const ModelDims& dims) {
  if (dims.num_heads < 1 || dims.num_heads > kMaxDim) {
    throw_error(ErrorCode::kInvalidArgument, "num_heads is {}; it must be from 1 to {}",
                dims.num_heads, kMaxDim);
  }
  validate_dim("qk_nope_head_dim", dims.qk_nope_head_dim);
  validate_dim("qk_rope_head_dim", dims.qk_rope_head_dim);
  validate_dim("v_head_dim", dims.v_head_dim);
  validate_dim("kv_lora_rank", dims.kv_lora_rank);
}

float default_softmax_scale(const ModelDims& dims) {
  return 1.0f / std::sqrt(static_cast<float>(dims.qk_head_dim()));
}

void validate_softmax_scale(float scale) {
  if (!std::isfinite(scale) || scale <= 0.0f) {
    throw_error(ErrorCode::kInvalidArgument, "softmax_scale is {}; it must be finite and above 0",
                scale);
  }
}

std::span<const ModelPreset> model_presets() { return kPresets; }

ModelDims find_preset(std::string_view name) {
  for (const ModelPreset& preset : kPresets) {
    if (preset.name == name) return preset.dims;
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown model '{}'; known: {}", name,
              list_names(kPresets, [](const ModelPreset& p) { return p.name; }));
}

std::string_view kv_cache_format_name(KvCacheFormat format) {
  switch (format) {
    case KvCacheFormat::kBf16:
      return "bf16";
    case KvCacheFormat::kFp8E4M3:
      return "fp8_e4m3";
    case KvCacheFormat::kFp8DsMla:
      return "fp8_ds_mla";
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown KV cache format {}", static_cast<int>(format));
}

KvCacheFormat find_kv_cache_format(std::string_view name) {
  constexpr std::array kFormats = {KvCacheFormat::kBf16, KvCacheFormat::kFp8E4M3,
                                   KvCacheFormat::kFp8DsMla};
  for (KvCacheFormat format : kFormats) {
    if (kv_cache_format_name(format) == name) return format;
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown KV cache format '{}'; known: {}", name,
              list_names(kFormats, kv_cache_format_name));
}

int32_t kv_cache_row_bytes(KvCacheFormat format, const ModelDims& dims) {
  switch (format) {
    case KvCacheFormat::kBf16:
      return 2 * dims.latent_dim();
    case KvCacheFormat::kFp8E4M3:
      return dims.latent_dim();
    case KvCacheFormat::kFp8DsMla:
      if (dims.kv_lora_rank != 512 || dims.qk_rope_head_dim != 64) {
        throw_error(ErrorCode::kInvalidArgument,
                    "fp8_ds_mla holds kv_lora_rank 512 and qk_rope_head_dim 64, not {} and {}",
                    dims.kv_lora_rank, dims.qk_rope_head_dim);
      }
      return 656;
  }
  throw_error(ErrorCode::kInvalidArgument, "unknown KV cache format {}", static_cast<int>(format));
}

}  // namespace mla
