// Products with kv_b_proj. Every op is, for each head, rows [rows, k] times a part of the weight.
//
// A row's bits must not depend on how many rows come with it, and a GEMM may use another kernel
// for another number of rows: so each call has exactly kRowTile of them, the last one padded.
#include <cstring>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/vector_ops.h"
#include "metadata/error.h"

namespace mla::cpu {
namespace {

constexpr int64_t kRowTile = 96;       // a multiple of the usual GEMM kernels' heights
constexpr int64_t kTilesPerTask = 16;  // share one conversion of the head's weight

/// One worker's float32 tiles, as offsets in elements.
struct Layout {
  explicit Layout(const ModelDims& dims) {
    const int64_t kv = dims.kv_head_dim();
    const int64_t l = dims.kv_lora_rank;
    rows = kv * l;
    results = rows + kRowTile * std::max<int64_t>(kv, l);
    size = results + kRowTile * std::max<int64_t>(kv, l);
  }
  int64_t weight = 0;   // [P + V, L] at most
  int64_t rows = 0;     // [kRowTile, k]
  int64_t results = 0;  // [kRowTile, n]
  int64_t size = 0;
};

/// The product of one op.
struct Product {
  int64_t weight_row = 0;   // first row of the head's weight that takes part
  int64_t weight_rows = 0;  // how many
  bool transposed = true;   // rows [., L] W^T, or rows [., weight_rows] W
};

/// For every head and tile: load(row, head, k floats), the product, store(row, head, n floats).
template <typename Load, typename Store>
void multiply_heads(const ModelDims& dims, const void* kv_b_proj, const Product& product,
                    int64_t num_rows, Executor& executor, std::span<std::byte> scratch,
                    const Load& load, const Store& store) {
  const Layout layout(dims);
  const int64_t l = dims.kv_lora_rank;
  const int64_t k = product.transposed ? l : product.weight_rows;
  const int64_t n = product.transposed ? product.weight_rows : l;
  const int64_t rows_per_task = kRowTile * kTilesPerTask;
  const int64_t groups = (num_rows + rows_per_task - 1) / rows_per_task;
  parallel_for(executor, groups * dims.num_heads, [&](int64_t task, int worker) {
    const int64_t head = task % dims.num_heads;
    const int64_t begin = task / dims.num_heads * rows_per_task;
    const int64_t end = std::min(num_rows, begin + rows_per_task);

    float* const tiles = reinterpret_cast<float*>(scratch.data()) + worker * layout.size;
    float* const weight = tiles + layout.weight;
    float* const rows = tiles + layout.rows;
    float* const results = tiles + layout.results;

    const int64_t first_row = head * dims.kv_head_dim() + product.weight_row;
    to_float(static_cast<const uint16_t*>(kv_b_proj) + first_row * l, DType::kBFloat16,
             product.weight_rows * l, 1.0f, weight);
    for (int64_t tile = begin; tile < end; tile += kRowTile) {
      const int64_t count = std::min(kRowTile, end - tile);
      for (int64_t i = 0; i < count; ++i) load(tile + i, head, rows + i * k);
      std::memset(rows + count * k, 0, (kRowTile - count) * k * sizeof(float));
      if (product.transposed) {
        gemm_nt(kRowTile, n, k, rows, k, weight, l, results, n);
      } else {
        gemm_nn(kRowTile, n, k, rows, k, weight, l, false, results, n);
      }
      for (int64_t i = 0; i < count; ++i) store(tile + i, head, results + i * n);
    }
  });
}

}  // namespace

size_t expand_scratch_bytes(const ModelDims& dims, int num_workers) {
  return static_cast<size_t>(Layout(dims).size) * sizeof(float) * num_workers;
}

void expand(const ExpandParams& p, Executor& executor, std::span<std::byte> scratch) {
  const int64_t kv = p.dims.kv_head_dim();
  multiply_heads(
      p.dims, p.kv_b_proj, {.weight_row = 0, .weight_rows = kv, .transposed = true},
      length(p.num_rows), executor, scratch,
      [&](int64_t row, int64_t, float* x) {
        to_float(static_cast<const uint16_t*>(p.latent.data) + row * p.latent.row_stride,
                 DType::kBFloat16, p.dims.kv_lora_rank, 1.0f, x);
      },
      [&](int64_t row, int64_t head, const float* y) {
        from_float(
            y, kv, DType::kBFloat16,
            static_cast<uint16_t*>(p.expanded.data) + row * p.expanded.row_stride + head * kv);
      });
}

void absorb_query(const AbsorbQueryParams& p, Executor& executor, std::span<std::byte> scratch) {
  const int64_t nope = p.dims.qk_nope_head_dim;
  const int64_t l = p.dims.kv_lora_rank;
  const auto query = [&](int64_t row, int64_t head) {
    return static_cast<const uint16_t*>(p.q.data) + row * p.q.row_stride + head * p.q.head_stride;
  };
  multiply_heads(
      p.dims, p.kv_b_proj, {.weight_row = 0, .weight_rows = nope, .transposed = false},
      length(p.num_rows), executor, scratch,
      [&](int64_t row, int64_t head, float* x) {
        to_float(query(row, head), DType::kBFloat16, nope, 1.0f, x);
      },
      [&](int64_t row, int64_t head, const float* y) {
        const int64_t bytes = dtype_bytes(p.absorbed.dtype);
        auto* const out = static_cast<std::byte*>(p.absorbed.data) +
                          (row * p.absorbed.row_stride + head * p.absorbed.head_stride) * bytes;
        const uint16_t* const rope = query(row, head) + nope;
        from_float(y, l, p.absorbed.dtype, out);
        if (p.absorbed.dtype == DType::kFloat32) {
          to_float(rope, DType::kBFloat16, p.dims.qk_rope_head_dim, 1.0f,
                   reinterpret_cast<float*>(out) + l);
        } else {
          std::memcpy(out + l * bytes, rope, p.dims.qk_rope_head_dim * sizeof(uint16_t));
        }
      });
}

void project_value(const ProjectValueParams& p, Executor& executor, std::span<std::byte> scratch) {
  const int64_t v = p.dims.v_head_dim;
  multiply_heads(
      p.dims, p.kv_b_proj,
      {.weight_row = p.dims.qk_nope_head_dim, .weight_rows = v, .transposed = true},
      length(p.num_rows), executor, scratch,
      [&](int64_t row, int64_t head, float* x) {
        std::memcpy(x,
                    static_cast<const float*>(p.latent_out.data) + row * p.latent_out.row_stride +
                        head * p.latent_out.head_stride,
                    p.dims.kv_lora_rank * sizeof(float));
      },
      [&](int64_t row, int64_t head, const float* y) {
        std::memcpy(static_cast<float*>(p.values.data) + row * p.values.row_stride +
                        head * p.values.head_stride,
                    y, v * sizeof(float));
      });
}

}  // namespace mla::cpu
