// PTX of sm_80 in small functions: asynchronous copies, matrix fragments, matrix products.
//
// Fragments of mma.m16n8k16, by lane, with r = lane / 4 and c = lane % 4 * 2 (PTX ISA, "Matrix
// Fragments for mma.m16n8k16"):
//   A: (r, c..), (r + 8, c..), (r, c + 8..), (r + 8, c + 8..), two values each
//   B: (k = c.., n = r), (k = c + 8.., n = r), two values each
//   C: (r, c), (r, c + 1), (r + 8, c), (r + 8, c + 1)
#ifndef KERNELS_CUDA_MMA_CUH_
#define KERNELS_CUDA_MMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mla::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Copies 16 bytes to shared memory, or fills them with zeros where `valid` is false; then `global`
/// is not read.
__device__ inline void copy16_async(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0));
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;"); }
/// Waits until at most kPending of this thread's groups are on their way.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

/// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(row)));
}
__device__ inline void load_matrices_transposed(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(row)));
}

/// What depends on the 16-bit type of the operands.
template <typename T>
struct Half2;

template <>
struct Half2<__nv_bfloat16> {
  static constexpr uint32_t kExponent = 0x7f807f80u;
  static constexpr uint32_t kOnes = 0x3f803f80u;

  __device__ static uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  /// sums[16, 8] += a[16, 16] b[16, 8]
  __device__ static void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <>
struct Half2<__half> {
  static constexpr uint32_t kExponent = 0x7c007c00u;
  static constexpr uint32_t kOnes = 0x3c003c00u;

  __device__ static uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  __device__ static void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

/// All bits set in each half of `pair` that is infinite or NaN.
template <typename T>
__device__ inline uint32_t not_finite(uint32_t pair) {
  constexpr uint32_t kExponent = Half2<T>::kExponent;
  const uint32_t exponents = pair & kExponent;
  return ((exponents & 0xffffu) == (kExponent & 0xffffu) ? 0xffffu : 0u) |
         ((exponents & 0xffff0000u) == (kExponent & 0xffff0000u) ? 0xffff0000u : 0u);
}

}  // namespace mla::cuda

#endif  // KERNELS_CUDA_MMA_CUH_
