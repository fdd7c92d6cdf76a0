#include "kernels/cuda/expand.h"

#include "kernels/cuda/gemm.h"

namespace mla::cuda {

void expand(const ExpandParams& p, Gemm& gemm, cudaStream_t stream) {
  gemm.multiply({.m = p.num_rows.capacity,
                 .n = int64_t{p.dims.num_heads} * p.dims.kv_head_dim(),
                 .k = p.dims.kv_lora_rank,
                 .rows = {p.latent.data, p.latent.row_stride, 0},
                 .weight = {p.kv_b_proj, p.dims.kv_lora_rank, 0},
                 .out = {p.expanded.data, p.expanded.row_stride, 0}},
                stream);
}

void absorb_query(const AbsorbQueryParams& p, Gemm& gemm, cudaStream_t stream) {
  const int64_t l = p.dims.kv_lora_rank;
  gemm.multiply({.m = p.num_rows.capacity,
                 .n = l,
                 .k = p.dims.qk_nope_head_dim,
                 .batch = p.dims.num_heads,
                 .weight_by_output = false,
                 .rows = {p.q.data, p.q.row_stride, p.q.head_stride},
                 .weight = {p.kv_b_proj, l, p.dims.kv_head_dim() * l},
                 .out = {p.absorbed.data, p.absorbed.row_stride, p.absorbed.head_stride}},
                stream);
  copy_rope(p, stream);
}

}  // namespace mla::cuda
