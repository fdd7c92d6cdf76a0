// Runs prefill_attention over items and computes what it must give, in float64.
#ifndef TESTS_KERNELS_ATTENTION_HARNESS_H_
#define TESTS_KERNELS_ATTENTION_HARNESS_H_

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "metadata/attention_item.h"
#include "tests/support/test_backend.h"

namespace mla::test {

/// How the keys and values lie in memory.
enum class KeyLayout {
  kSeparate,  // tensors of their own, rows wider than they need be
  kExpanded,  // k_nope and v are views of [rows, H * (P + V)]; k_pe is a view of [rows, L + Rr]
  kLatent,    // absorbed: all heads share the rows of [rows, P + Rr]; v is their first V columns
};

struct AttentionCase {
  int32_t heads = 1;
  int32_t p = 128;
  int32_t rr = 64;
  int32_t v = 128;
  DType dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;
  KeyLayout layout = KeyLayout::kExpanded;
  float softmax_scale = 0.0f;  // 0: 1 / sqrt(P + Rr)
  std::vector<AttentionItem> items = {};
  int64_t q_rows = 0;
  int64_t k_rows = 0;
  int64_t out_rows = 0;
  int32_t items_capacity = 0;  // 0: no actual count is given
  int32_t bound_slack = 0;     // by which max_q_len and max_k_len exceed the items' lengths
  bool lse_wanted = true;
  bool lse_rows_first = false;
  bool prefix_in_place = true;

  // [q_rows][H][P + Rr], [k_rows][H][P], [k_rows][Rr], [k_rows][H][V]. kLatent: one head of keys,
  // and no v.
  std::vector<float> q = {}, k_nope = {}, k_pe = {}, values = {};
  // [out_rows][H][V] and [out_rows][H], or empty: no prefix.
  std::vector<float> prefix_out = {}, prefix_lse = {};

  /// Makes every extent at least what the items need.
  void fit_rows();
  /// Whether an item writes the row.
  std::vector<bool> covered_rows() const;
};

struct AttentionResult {
  std::vector<float> out;  // [out_rows][H][V]
  std::vector<float> lse;  // [out_rows][H]
};
struct AttentionExpected {
  std::vector<double> out;
  std::vector<double> lse;
};

/// Runs the case with poisoned outputs and scratch. Expects padding, and rows that belong to no
/// item, to hold what they held before.
AttentionResult run_attention(Backend& backend, const OpContext& context, const AttentionCase& c);

/// By the oracle, head by head; the prefix is merged in float64. Rows of no item are 0 in both.
AttentionExpected expected_attention(const AttentionCase& c);

/// Judges the covered rows.
///
/// Inputs are exact, so what remains is rounding. A bf16 result differs from the exact one
/// by 1.1e-3 to 2.3e-3 (2^-7 / sqrt(12) for a significand of 1, half of it for one near 2), by the
/// norm of many. Kernels that round their weights to bf16 for the matrix unit add the same once
/// more, as the square root of the sum of squares; the CPU backend keeps them in float32. A single
/// row of a head may deviate three times as much. LSEs are float32: 1e-5 * max(1, |LSE|).
void expect_attention(const Backend& backend, AttentionResult found, const AttentionCase& c);

/// Whether the backend serves the case. The CPU backend serves all that is valid.
bool supports(const Backend& backend, const AttentionCase& c);

/// Draws q, keys, values, and where `with_prefix` a prefix, a third of whose rows are empty (NaN
/// beside an LSE of -inf or +inf).
class AttentionTest : public BackendTest {
 protected:
  void fill(AttentionCase& c, bool with_prefix = false);
  OpContext context_for(const AttentionCase& c, uint8_t poison = kPoison);
  AttentionResult run(const AttentionCase& c) {
    return run_attention(backend(), context_for(c), c);
  }
  void check(const AttentionCase& c) { expect_attention(backend(), run(c), c); }
};

}  // namespace mla::test

#endif  // TESTS_KERNELS_ATTENTION_HARNESS_H_
