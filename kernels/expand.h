// Products with kv_b_proj, [H * (P + V), L] bf16, contiguous: per head W_UK (P rows), then W_UV
// (V rows). Accumulation is float32; each result is rounded once, to its output's dtype. The K
// order and the algorithm do not depend on the number of rows.
#ifndef KERNELS_EXPAND_H_
#define KERNELS_EXPAND_H_

#include "kernels/tensor.h"
#include "metadata/model.h"

namespace mla {

/// expanded[row, h, :] = kv_b_proj[h] latent[row]: k_nope and v of every head, side by side.
/// Attention reads both as views of this output.
struct ExpandParams {
  ModelDims dims;
  ConstRows latent;                 // [rows, L] bf16 (the first L columns of wider rows)
  const void* kv_b_proj = nullptr;  // bf16
  Rows expanded;                    // [rows, H * (P + V)] bf16
  Count num_rows;
};

/// absorbed[row, h, :L] = q[row, h, :P] W_UK[h]; absorbed[row, h, L:] = q[row, h, P:] (RoPE part).
struct AbsorbQueryParams {
  ModelDims dims;
  ConstHeadRows q;                  // [rows, H, P + Rr] bf16
  const void* kv_b_proj = nullptr;  // bf16
  HeadRows absorbed;                // [rows, H, L + Rr] bf16, or float32: not rounded
  Count num_rows;
};

/// values[row, h, :V] = W_UV[h] latent_out[row, h, :L]: closes absorbed attention.
struct ProjectValueParams {
  ModelDims dims;
  ConstHeadRows latent_out;         // [rows, H, L] float32
  const void* kv_b_proj = nullptr;  // bf16
  HeadRows values;                  // [rows, H, V] float32
  Count num_rows;
};

}  // namespace mla

#endif  // KERNELS_EXPAND_H_
