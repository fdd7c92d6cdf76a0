#include "tests/support/mutant_backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/convert.h"
#include "kernels/forwarding_backend.h"
#include "kernels/validate.h"

namespace mla::test {
namespace {

enum class Mutant { kNoFault, kMaskOff, kBase2Lse, kOffset32, kMultiplyWeight0, kTopLeftCausal };

std::optional<Mutant> find_mutant(std::string_view name) {
  if (name == "no_fault") return Mutant::kNoFault;
  if (name == "mask_off") return Mutant::kMaskOff;
  if (name == "base2_lse") return Mutant::kBase2Lse;
  if (name == "offset32") return Mutant::kOffset32;
  if (name == "multiply_weight0") return Mutant::kMultiplyWeight0;
  if (name == "top_left_causal") return Mutant::kTopLeftCausal;
  return std::nullopt;
}

int64_t count_of(const Count& count) {
  return count.actual == nullptr ? count.capacity : *count.actual;
}

float load(const ConstHeadRows& rows, int64_t offset) {
  switch (rows.dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(rows.data)[offset];
    case DType::kFloat16:
      return fp16_to_float(static_cast<const uint16_t*>(rows.data)[offset]);
    case DType::kBFloat16:
      return bf16_to_float(static_cast<const uint16_t*>(rows.data)[offset]);
    case DType::kFloat8E4M3:
      return e4m3_to_float(static_cast<const uint8_t*>(rows.data)[offset]);
  }
  return NAN;
}

void store(const HeadRows& rows, int64_t offset, float value) {
  switch (rows.dtype) {
    case DType::kFloat32:
      static_cast<float*>(rows.data)[offset] = value;
      return;
    case DType::kFloat16:
      static_cast<uint16_t*>(rows.data)[offset] = float_to_fp16(value);
      return;
    case DType::kBFloat16:
      static_cast<uint16_t*>(rows.data)[offset] = float_to_bf16(value);
      return;
    case DType::kFloat8E4M3:
      static_cast<uint8_t*>(rows.data)[offset] = float_to_e4m3(value);
  }
}

/// merge_attn_states by its contract, apart from one fault or none.
void merge_with_fault(const MergeAttnStatesParams& params, Mutant mutant) {
  validate(params);
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  const float unit = mutant == Mutant::kBase2Lse ? std::log(2.0f) : 1.0f;
  const auto offset = [mutant](int64_t wide) {
    return mutant == Mutant::kOffset32 ? static_cast<int64_t>(static_cast<uint32_t>(wide)) : wide;
  };
  const auto lse_at = [](const ConstLse& lse, int64_t t, int64_t h) {
    const float value = lse.data[h * lse.head_stride + t * lse.row_stride];
    return value == -kEmpty ? kEmpty : value;
  };
  const auto weighted = [mutant](float weight, float value) {
    return weight == 0.0f && mutant != Mutant::kMultiplyWeight0 ? 0.0f : weight * value;
  };

  for (int64_t t = 0; t < count_of(params.num_tokens); ++t) {
    const bool has_prefix = params.prefix_tokens < 0 || t < params.prefix_tokens;
    for (int64_t h = 0; h < params.num_heads; ++h) {
      const float p = has_prefix ? lse_at(params.prefix_lse, t, h) : kEmpty;
      const float s = lse_at(params.suffix_lse, t, h);
      // A NaN on either side must come through, so it can't be left to std::max.
      const float m = std::isnan(p) || std::isnan(s) ? NAN : std::max(p, s);
      float prefix_weight = 0.0f;
      float suffix_weight = 0.0f;
      float merged = kEmpty;
      if (m != kEmpty) {
        const float prefix_exp = std::exp(unit * (p - m));
        const float suffix_exp = std::exp(unit * (s - m));
        prefix_weight = prefix_exp / (prefix_exp + suffix_exp);
        suffix_weight = suffix_exp / (prefix_exp + suffix_exp);
        merged = m + std::log(prefix_exp + suffix_exp) / unit;
      }
      const float scale = params.output_scale == nullptr ? 1.0f : *params.output_scale;
      const auto row = [&](const auto& rows) { return t * rows.row_stride + h * rows.head_stride; };
      for (int64_t d = 0; d < params.head_dim; ++d) {
        const float prefix =
            has_prefix ? load(params.prefix_out, offset(row(params.prefix_out) + d)) : 0.0f;
        const float suffix = load(params.suffix_out, offset(row(params.suffix_out) + d));
        const float value = weighted(prefix_weight, prefix) + weighted(suffix_weight, suffix);
        store(params.output, offset(row(params.output) + d), value / scale);
      }
      const Lse& lse = params.output_lse;
      if (lse.data != nullptr) lse.data[h * lse.head_stride + t * lse.row_stride] = merged;
    }
  }
}

class MutantBackend final : public ForwardingBackend {
 public:
  MutantBackend(std::unique_ptr<Backend> backend, Mutant mutant)
      : ForwardingBackend(std::move(backend)), mutant_(mutant) {}

  void mask_empty_context(const MaskEmptyContextParams& params, const OpContext& context) override {
    if (mutant_ != Mutant::kMaskOff) return backend_.mask_empty_context(params, context);
    validate(params);
  }

  void merge_attn_states(const MergeAttnStatesParams& params, const OpContext& context) override {
    if (mutant_ == Mutant::kMaskOff || mutant_ == Mutant::kTopLeftCausal) {
      backend_.merge_attn_states(params, context);
    } else {
      merge_with_fault(params, mutant_);
    }
  }

  void prefill_attention(const PrefillAttentionParams& params, const OpContext& context) override {
    if (mutant_ != Mutant::kTopLeftCausal) return backend_.prefill_attention(params, context);
    validate(params);
    std::vector<AttentionItem> items(params.items, params.items + count_of(params.num_items));
    for (AttentionItem& item : items) {
      if (item.causal_offset != kUnmasked) item.causal_offset = 0;
    }
    PrefillAttentionParams mutated = params;
    mutated.items = items.data();
    backend_.prefill_attention(mutated, context);
  }

 private:
  Mutant mutant_;
};

}  // namespace

std::unique_ptr<Backend> make_mutant_backend(std::unique_ptr<Backend> backend,
                                             std::string_view mutant) {
  const std::optional<Mutant> known = find_mutant(mutant);
  if (!known) return nullptr;
  return std::make_unique<MutantBackend>(std::move(backend), *known);
}

}  // namespace mla::test
