// Vectorised loops over one row, compiled for every instruction set and chosen at run time.
#ifndef KERNELS_CPU_VECTOR_OPS_H_
#define KERNELS_CPU_VECTOR_OPS_H_

#include <cstdint>

#include "metadata/model.h"

namespace mla::cpu {

/// Rows given to softmax_row are readable and writable up to a multiple of this many elements.
inline constexpr int64_t kRowPadding = 64;

/// The instruction set in use, such as "AVX2".
const char* vector_target();

/// dst[0..n) = factor * src[0..n) of dtype bf16, fp16 or float32.
void to_float(const void* src, DType dtype, int64_t n, float factor, float* dst);

/// dst[0..n) = src[0..n) rounded to dtype bf16, fp16 or float32, with the bits of
/// kernels/convert.h.
void from_float(const float* src, int64_t n, DType dtype, void* dst);

/// x[0..n) *= factor
void scale_row(float* x, int64_t n, float factor);

/// Whether x[0..n) holds neither infinity nor NaN.
bool all_finite(const float* x, int64_t n);

struct SoftmaxRow {
  float max = 0.0f;  // of the scores and the previous maximum; -inf where all of them are
  float sum = 0.0f;  // of the weights; NaN where a score is NaN or +inf
};
/// Turns scores[0..visible) into weights exp(score - max), where max takes in `previous_max`, and
/// sets scores[visible..n) to 0 whatever they hold. Scores of -inf get weight 0.
SoftmaxRow softmax_row(float* scores, int64_t visible, int64_t n, float previous_max);

}  // namespace mla::cpu

#endif  // KERNELS_CPU_VECTOR_OPS_H_
