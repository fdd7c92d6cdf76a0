// Warpgroup matrix multiply-accumulate: D[64, N] += A[64, 16] B[16, N], float32 accumulators.
//
// Thread t of the warpgroup (warp w = t / 32, lane l) holds d[4j + 2i + c] = D[16w + l/4 + 8i,
// 8j + 2(l%4) + c]. An A fragment from registers has the same shape: a[2h + i] packs columns
// 8h + 2(l%4) + {0, 1} of row 16w + l/4 + 8i, so accumulators of one product become the A operand
// of the next without any exchange.
#ifndef KERNELS_CUDA_SM90_WGMMA_CUH_
#define KERNELS_CUDA_SM90_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mla::sm90 {

/// Matrix descriptor of a tile in shared memory with 128-byte rows and 128-byte swizzle. Offsets
/// in bytes: `stride` between groups of 8 rows, `leading` between panels of 64 columns where the
/// tile is read column-major (unused otherwise).
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading,
                                                      uint32_t stride) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32 |
         uint64_t{1} << 62;
}

/// The descriptor of the same tile `bytes` further on.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

/// Orders register and shared-memory accesses before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `kPending` committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving uses of the registers across this point.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin_registers(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// Operand lists: N/2 accumulators as constraints and as text.
#define MLA_ACC_8(d, i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define MLA_ACC_32(d, i) \
  MLA_ACC_8(d, i), MLA_ACC_8(d, i + 8), MLA_ACC_8(d, i + 16), MLA_ACC_8(d, i + 24)
#define MLA_ACC_40(d) MLA_ACC_32(d, 0), MLA_ACC_8(d, 32)
#define MLA_ACC_64(d) MLA_ACC_32(d, 0), MLA_ACC_32(d, 32)
#define MLA_ACC_128(d) MLA_ACC_64(d), MLA_ACC_32(d, 64), MLA_ACC_32(d, 96)

#define MLA_TEXT_40                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, "         \
  "%8, %9, %10, %11, %12, %13, %14, %15, "   \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define MLA_TEXT_64                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, "         \
  "%8, %9, %10, %11, %12, %13, %14, %15, "   \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define MLA_TEXT_128                                 \
  MLA_TEXT_64                                        \
  ", "                                               \
  "%64, %65, %66, %67, %68, %69, %70, %71, "         \
  "%72, %73, %74, %75, %76, %77, %78, %79, "         \
  "%80, %81, %82, %83, %84, %85, %86, %87, "         \
  "%88, %89, %90, %91, %92, %93, %94, %95, "         \
  "%96, %97, %98, %99, %100, %101, %102, %103, "     \
  "%104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"

/// Products of N columns and Element inputs; specialised for the shapes in use.
///   multiply_shared     A and B from shared memory, both K-major; overwrites D unless accumulate
///   multiply_registers  A from registers, B from shared memory, N-major; accumulates
template <int N, typename Element>
struct Wgmma;

#define MLA_MULTIPLY_SHARED(N, COUNT, TYPE, A, B, P)                                               \
  static __device__ __forceinline__ void multiply_shared(float(&d)[COUNT], uint64_t a, uint64_t b, \
                                                         bool accumulate) {                        \
    asm volatile(                                                                                  \
        "{\n"                                                                                      \
        ".reg .pred accumulate;\n"                                                                 \
        "setp.ne.b32 accumulate, " P                                                               \
        ", 0;\n"                                                                                   \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                            \
        " "                                                                                        \
        "{" MLA_TEXT_##COUNT "}, " A ", " B                                                        \
                             ", accumulate, 1, 1, 0, 0;\n"                                         \
                             "}"                                                                   \
        : MLA_ACC_##COUNT(d)                                                                       \
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)));                                  \
  }

#define MLA_MULTIPLY_REGISTERS(N, COUNT, TYPE, A, B, P)                                          \
  static __device__ __forceinline__ void multiply_registers(float(&d)[COUNT], const uint32_t* a, \
                                                            uint64_t b) {                        \
    asm volatile(                                                                                \
        "{\n"                                                                                    \
        ".reg .pred accumulate;\n"                                                               \
        "setp.ne.b32 accumulate, " P                                                             \
        ", 0;\n"                                                                                 \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                          \
        " "                                                                                      \
        "{" MLA_TEXT_##COUNT "}, {" A "}, " B                                                    \
                             ", accumulate, 1, 1, 1;\n"                                          \
                             "}"                                                                 \
        : MLA_ACC_##COUNT(d)                                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                           \
  }

#define MLA_WGMMA(ELEMENT, TYPE)                                                     \
  template <>                                                                        \
  struct Wgmma<80, ELEMENT> {                                                        \
    MLA_MULTIPLY_SHARED(80, 40, TYPE, "%40", "%41", "%42")                           \
  };                                                                                 \
  template <>                                                                        \
  struct Wgmma<128, ELEMENT> {                                                       \
    MLA_MULTIPLY_SHARED(128, 64, TYPE, "%64", "%65", "%66")                          \
    MLA_MULTIPLY_REGISTERS(128, 64, TYPE, "%64, %65, %66, %67", "%68", "%69")        \
  };                                                                                 \
  template <>                                                                        \
  struct Wgmma<256, ELEMENT> {                                                       \
    MLA_MULTIPLY_REGISTERS(256, 128, TYPE, "%128, %129, %130, %131", "%132", "%133") \
  };

MLA_WGMMA(__nv_bfloat16, "bf16")
MLA_WGMMA(__half, "f16")

#undef MLA_WGMMA
#undef MLA_MULTIPLY_REGISTERS
#undef MLA_MULTIPLY_SHARED
#undef MLA_TEXT_128
#undef MLA_TEXT_64
#undef MLA_TEXT_40
#undef MLA_ACC_128
#undef MLA_ACC_64
#undef MLA_ACC_40
#undef MLA_ACC_32
#undef MLA_ACC_8

}  // namespace mla::sm90

#endif  // KERNELS_CUDA_SM90_WGMMA_CUH_
