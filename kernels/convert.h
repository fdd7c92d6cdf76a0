// Conversions between float32 and the storage formats, bit for bit the same on host and device.
// All round to nearest even.
#ifndef KERNELS_CONVERT_H_
#define KERNELS_CONVERT_H_

#include <cstdint>
#include <cstring>

#include "kernels/host_device.h"

namespace mla {

MLA_HOST_DEVICE inline uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
MLA_HOST_DEVICE inline float float_from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

/// bf16 storage: the upper half of a float32.
MLA_HOST_DEVICE inline float bf16_to_float(uint16_t x) {
  return float_from_bits(static_cast<uint32_t>(x) << 16);
}
MLA_HOST_DEVICE inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// IEEE binary16 storage.
MLA_HOST_DEVICE inline float fp16_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t magnitude = x & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity and NaN
    return float_from_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // Scaling by 2^112 puts normals and subnormals alike on float32's exponent.
  const float scaled = float_from_bits(magnitude << 13) * float_from_bits(0x77800000u);
  return float_from_bits(float_bits(scaled) | sign);
}
MLA_HOST_DEVICE inline uint16_t float_to_fp16(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 65520: infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds at the subnormal spacing 2^-24
    const float rounded = float_from_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(rounded) - 0x3f000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

/// OCP FP8 E4M3 (OFP8 specification 1.0, 2023): bias 7, largest 448, no infinities, NaN 0x7f.
inline constexpr float kE4M3Max = 448.0f;

MLA_HOST_DEVICE inline float e4m3_to_float(uint8_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x80u) << 24;
  const uint32_t magnitude = x & 0x7fu;
  if (magnitude == 0x7fu) return float_from_bits(sign | 0x7fc00000u);
  // Scaling by 2^120 moves the bias from 7 to 127, subnormals included.
  const float scaled = float_from_bits(magnitude << 20) * float_from_bits(0x7b800000u);
  return float_from_bits(float_bits(scaled) | sign);
}
/// Saturates beyond +-448, infinities included; NaN stays NaN.
MLA_HOST_DEVICE inline uint8_t float_to_e4m3(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // >= 448
  if (magnitude < 0x3c800000u) {  // below 2^-6: adding 2^14 rounds at the subnormal spacing 2^-9
    const float rounded = float_from_bits(magnitude) + 16384.0f;
    return static_cast<uint8_t>(sign | (float_bits(rounded) - 0x46800000u));
  }
  const uint32_t odd = (magnitude >> 20) & 1u;
  return static_cast<uint8_t>(sign | ((magnitude - 0x3c000000u + 0x7ffffu + odd) >> 20));
}

}  // namespace mla

#endif  // KERNELS_CONVERT_H_
