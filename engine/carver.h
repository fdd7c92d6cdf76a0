// Parts of a workspace, one after the other, each rounded up to 256 bytes.
#ifndef ENGINE_CARVER_H_
#define ENGINE_CARVER_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/tensor.h"

namespace mla {

inline constexpr size_t kWorkspaceAlignment = 256;

inline size_t align_part(size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

/// Takes parts in the order of the layout that their sizes come from.
class Carver {
 public:
  explicit Carver(std::span<std::byte> memory) : memory_(memory) {}

  std::span<std::byte> take(size_t bytes) {
    const std::span<std::byte> part = memory_.first(align_part(bytes));
    memory_ = memory_.subspan(part.size());
    return part;
  }
  Rows take_rows(int64_t rows, int64_t columns, DType dtype) {
    return {take(rows * columns * dtype_bytes(dtype)).data(), dtype, columns};
  }
  HeadRows take_heads(int64_t rows, int64_t heads, int64_t dim, DType dtype) {
    return {take(rows * heads * dim * dtype_bytes(dtype)).data(), dtype, heads * dim, dim};
  }
  Lse take_lse(int64_t rows, int64_t heads) {
    return {reinterpret_cast<float*>(take(rows * heads * sizeof(float)).data()), rows, 1};
  }

 private:
  std::span<std::byte> memory_;
};

}  // namespace mla

#endif  // ENGINE_CARVER_H_
