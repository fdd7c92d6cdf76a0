#include "parallel/cost_model.h"

#include <cmath>
#include <utility>

#include "metadata/error.h"

namespace mla {

void validate_rates(const CostRates& rates) {
  for (const auto& [value, name] :
       {std::pair<double, const char*>{rates.link_bytes_per_second, "link_bytes_per_second"},
        {rates.collective_seconds, "collective_seconds"},
        {rates.gemm_flops, "gemm_flops"},
        {rates.attention_flops, "attention_flops"}}) {
    if (!(std::isfinite(value) && value > 0.0)) {
      throw_error(ErrorCode::kInvalidArgument, "{} is {}, must be finite and positive", name,
                  value);
    }
  }
}

std::string Cost::describe(const CostRates& rates) const {
  return fmt::format(
      "{:.3f} ms: expand {:.3g} TFLOP and attend {:.3g} TFLOP in {:.3f} ms, receive {:.3g} MB in "
      "{} calls and {:.3f} ms",
      seconds(rates) * 1e3, expansion_flops * 1e-12, attention_flops * 1e-12,
      compute_seconds(rates) * 1e3, bytes_received * 1e-6, collectives,
      exchange_seconds(rates) * 1e3);
}

double expansion_flops(const ModelDims& dims, double rows) {
  return 2.0 * rows * dims.num_heads * dims.kv_head_dim() * dims.kv_lora_rank;
}

double attention_flops(const ModelDims& dims, double scores) {
  return 2.0 * scores * dims.num_heads * (dims.qk_head_dim() + dims.v_head_dim);
}

}  // namespace mla
