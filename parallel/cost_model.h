// How long a layer's context work takes on the busiest rank, by rates that the caller knows or has
// measured. Coarse on purpose: it compares strategies and shares out chunks, it predicts no clock.
#ifndef PARALLEL_COST_MODEL_H_
#define PARALLEL_COST_MODEL_H_

#include <cstdint>
#include <string>

#include "metadata/model.h"

namespace mla {

/// Defaults: one H200 in this project's own measurements, NVLink at 450 GB/s a direction (NVIDIA's
/// H200 data sheet: 900 GB/s both ways together).
struct CostRates {
  double link_bytes_per_second = 450e9;  // what one rank receives
  double collective_seconds = 20e-6;     // a call, however small
  double gemm_flops = 600e12;
  double attention_flops = 600e12;
};

/// Throws kInvalidArgument unless all rates are positive and finite.
void validate_rates(const CostRates& rates);

/// Work and traffic of one rank in one layer.
struct Cost {
  double expansion_flops = 0.0;
  double attention_flops = 0.0;
  double bytes_received = 0.0;
  int32_t collectives = 0;

  double compute_seconds(const CostRates& rates) const {
    return expansion_flops / rates.gemm_flops + attention_flops / rates.attention_flops;
  }
  double exchange_seconds(const CostRates& rates) const {
    return bytes_received / rates.link_bytes_per_second + collectives * rates.collective_seconds;
  }
  double seconds(const CostRates& rates) const {
    return compute_seconds(rates) + exchange_seconds(rates);
  }
  std::string describe(const CostRates& rates) const;
};

/// Of `rows` latent rows, expanded for all heads.
double expansion_flops(const ModelDims& dims, double rows);
/// Of `scores` query-key pairs, all heads.
double attention_flops(const ModelDims& dims, double scores);

}  // namespace mla

#endif  // PARALLEL_COST_MODEL_H_
