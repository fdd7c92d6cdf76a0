// The oracle: multi-head latent attention by its definition, naive, in float64.
//
// It shares no code with metadata/, kernels/ or engine/ and works on one head of one request at a
// time, so that memory stays small and callers may run heads side by side. Values that the engine
// stores as bf16 are exact in the float32 arrays used here; every sum is float64.
#ifndef TESTS_ORACLE_ORACLE_H_
#define TESTS_ORACLE_ORACLE_H_

#include <cstdint>
#include <span>
#include <vector>

namespace mla::oracle {

/// The nearest bf16 value, ties to even.
float round_to_bf16(double x);

/// The nearest e4m3 (OCP FP8) value, ties to even, saturated at +-448.
float round_to_e4m3(double x);

/// What a row reads back from a cache after it was written there. `row` is [L + Rr] bf16 values.
/// fp8_e4m3: every value through e4m3 at `scale`; fp8_ds_mla: latent values through e4m3 at a
/// scale of max|x| / 448 for each 128 of them, RoPE values as they are. The result is rounded to
/// bf16, as attention reads it.
std::vector<float> through_fp8_e4m3(std::span<const float> row, float scale);
std::vector<float> through_fp8_ds_mla(std::span<const float> row);

/// Keys and values of one head, in position order.
struct HeadKeys {
  std::vector<float> k_nope;  // [S, P]
  std::vector<float> v;       // [S, V]
};

/// Expands `latent` [S, L] through one head of kv_b_proj, `weight` [P + V, L], in float64; each
/// result is rounded to bf16 unless `round` is false.
HeadKeys expand_head(std::span<const float> latent, std::span<const float> weight, int64_t p,
                     int64_t v, int64_t l, bool round = true);

struct HeadResult {
  std::vector<double> out;  // [n, V]
  std::vector<double> lse;  // [n] natural log
};

/// Row i of `q` [n, P + Rr] attends keys 0 to visible[i] - 1; with none, out = 0 and lse = -inf.
/// `k_pe` is [S, Rr].
HeadResult attend_head(std::span<const float> q, const HeadKeys& keys, std::span<const float> k_pe,
                       std::span<const int64_t> visible, int64_t p, int64_t rr, int64_t v,
                       double softmax_scale);

}  // namespace mla::oracle

#endif  // TESTS_ORACLE_ORACLE_H_
