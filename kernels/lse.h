// The algebra of partial attention states (out, lse), written once for the host and the device.
//
// A state over a set of keys is lse = ln sum exp(s) and out = sum exp(s - lse) v. The empty state
// is (0, -inf). Merging weighs each side by exp(lse_side - lse_merged); natural log throughout.
// See section 2.2 of Ye et al., "Cascade Inference" (FlashInfer, 2024), for the recurrence.
#ifndef KERNELS_LSE_H_
#define KERNELS_LSE_H_

#include <cmath>

#include "kernels/host_device.h"

namespace mla {

/// Some kernels report +inf for a row without keys; it means the same as -inf.
MLA_HOST_DEVICE inline float normalized_lse(float lse) { return lse == INFINITY ? -lse : lse; }

MLA_HOST_DEVICE inline bool is_empty_lse(float lse) { return lse == -INFINITY; }

/// How two states combine. A weight of exactly 0 means: do not read that side at all.
struct MergeWeights {
  float prefix = 0.0f;
  float suffix = 0.0f;
  float lse = -INFINITY;
};

/// `prefix_lse` and `suffix_lse` as the kernels reported them. A NaN is no empty side: it makes
/// both weights and the merged lse NaN. Where one side is empty the other has weight exactly 1.
MLA_HOST_DEVICE inline MergeWeights merge_weights(float prefix_lse, float suffix_lse) {
  const float p = normalized_lse(prefix_lse);
  const float s = normalized_lse(suffix_lse);
  if (is_empty_lse(p)) {
    return {0.0f, is_empty_lse(s) ? 0.0f : (s == s ? 1.0f : s), s};
  }
  if (is_empty_lse(s)) return {p == p ? 1.0f : p, 0.0f, p};
  const float m = p > s ? p : s;
  const float prefix_exp = expf(p - m);
  const float suffix_exp = expf(s - m);
  const float sum = prefix_exp + suffix_exp;  // in [1, 2], or NaN
  return {prefix_exp / sum, suffix_exp / sum, m + logf(sum)};
}

/// One element of the merged output. A side of weight 0 is selected away, never multiplied: its
/// value may be NaN or memory that nothing wrote.
MLA_HOST_DEVICE inline float merge_values(const MergeWeights& w, float prefix, float suffix) {
  const float weighted_prefix = w.prefix == 0.0f ? 0.0f : w.prefix * prefix;
  const float weighted_suffix = w.suffix == 0.0f ? 0.0f : w.suffix * suffix;
  return weighted_prefix + weighted_suffix;
}

}  // namespace mla

#endif  // KERNELS_LSE_H_
