// From float32 results to int8.
#pragma once

#include "rowwise/rows.cuh"

namespace scaled_mm::rowwise {

// A scale and a zero point, and what the short way of `quantize` needs.
struct Quantizer {
  float scale, inverse, zero_point;
  int32_t integer_zero_point;
  bool short_way; // false: every element is divided
  bool spoilt;    // NaN or infinity in a row that has a scale of its own: all zeros
  float low;      // -127 for a symmetric scale of the row's own, else -128

  __device__ static Quantizer of(float scale, float zero_point, bool spoilt, float low) {
    const bool small = zero_point >= -128 && zero_point <= 128;
    return {scale, 1 / scale, zero_point, small ? int32_t(zero_point) : 0, small, spoilt, low};
  }
  // Symmetric. bits: of the largest magnitude; those of a NaN are larger than an infinity's.
  __device__ static Quantizer of_largest(uint32_t bits) {
    constexpr float kSmallest = 1.1754943508222875e-38f; // 2^-126
    const float scale = __uint_as_float(bits) / 127.0f;
    const bool spoilt = !(fabsf(scale) <= 3.4028234663852886e38f);
    return of(scale < kSmallest ? kSmallest : scale, 0, spoilt, -127);
  }
};

__device__ inline int8_t clamped(float q, float low) { return int8_t(q < low ? low : q > 127 ? 127 : q); }

// clamp(round half to even(y / scale) + zero_point): the definition. NaN counts as 0.
__device__ inline int8_t divided(float y, const Quantizer& q) {
  const float rounded = rintf(y / q.scale);
  return clamped((rounded == rounded ? rounded : 0.0f) + q.zero_point, q.low);
}

// Eight elements. The short way multiplies by the inverse of the scale, which differs from the division by less than 2^-14 up to 300, beyond
// which the result is clamped. Only next to a tie does that change the rounding; then, and for NaN and huge values, the chunk is divided.
__device__ inline void quantize(const float (&y)[kChunk], const Quantizer& q, int8_t (&out)[kChunk]) {
  constexpr float kMagic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
  constexpr float kSure = 0.5f - 1.0f / 16384;
  bool sure = q.short_way;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    const float ratio = y[e] * q.inverse, moved = ratio + kMagic;
    sure = sure && fabsf(ratio - (moved - kMagic)) <= kSure && fabsf(ratio) < 2097152.0f;
    const int32_t integer = __float_as_int(moved) - __float_as_int(kMagic) + q.integer_zero_point;
    const int32_t low = int32_t(q.low);
    out[e] = int8_t(integer < low ? low : integer > 127 ? 127 : integer);
  }
  if (!sure) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) out[e] = q.spoilt ? int8_t(0) : divided(y[e], q);
  }
}

// clamp(round half to even(y)), NaN counts as 0.
__device__ inline void round_only(const float (&y)[kChunk], int8_t (&out)[kChunk]) {
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    const float rounded = rintf(y[e]);
    out[e] = clamped(rounded == rounded ? rounded : 0.0f, -128);
  }
}

} // namespace scaled_mm::rowwise
