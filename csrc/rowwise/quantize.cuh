// From float32 results to int8.
#pragma once

#include "rowwise/rows.cuh"

namespace scaled_mm::rowwise {

constexpr float kSmallScale = 8.0779357e-28f; // 2^-90: see `corrected`

// A scale and a zero point, and what the short ways of dividing need.
struct Quantizer {
  float scale, inverse, zero_point;
  bool short_way; // false: every element is divided
  bool spoilt;    // NaN or infinity in a row that has a scale of its own: all zeros
  float low;      // -127 for a symmetric scale of the row's own, else -128

  __device__ static Quantizer of(float scale, float zero_point, bool spoilt, float low) {
    const float size = fabsf(scale);
    const bool small = zero_point >= -128 && zero_point <= 128 && size >= kSmallScale && size <= 1 / kSmallScale;
    return {scale, 1 / scale, zero_point, small, spoilt, low};
  }
  // Symmetric. bits: of the largest magnitude; those of a NaN are larger than an infinity's.
  __device__ static Quantizer of_largest(uint32_t bits) {
    constexpr float kSmallest = 1.1754943508222875e-38f; // 2^-126
    const float scale = __uint_as_float(bits) / 127.0f;
    const bool spoilt = !(fabsf(scale) <= 3.4028234663852886e38f);
    Quantizer quantizer = of(scale < kSmallest ? kSmallest : scale, 0, spoilt, -127);
    quantizer.short_way = bits == 0 || scale >= kSmallScale;
    return quantizer;
  }
};

// The larger of `most` and the magnitudes, NaN if one of them is.
__device__ inline float largest_of(const float (&y)[kChunk], float most) {
#pragma unroll
  for (int e = 0; e < kChunk; ++e) most = larger(most, fabsf(y[e]));
  return most;
}

__device__ inline uint32_t magnitude_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// The low bytes of eight integers.
__device__ inline Chunk<int8_t> low_bytes(const float (&v)[kChunk]) {
  Chunk<int8_t> chunk;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#if defined(__CUDA_ARCH__)
    const uint32_t first = __byte_perm(__float_as_uint(v[4 * i]), __float_as_uint(v[4 * i + 1]), 0x0040);
    const uint32_t second = __byte_perm(__float_as_uint(v[4 * i + 2]), __float_as_uint(v[4 * i + 3]), 0x0040);
    chunk.words[i] = __byte_perm(first, second, 0x5410);
#else
    chunk.words[i] = 0;
    for (int e = 0; e < 4; ++e) chunk.words[i] |= (__float_as_uint(v[4 * i + e]) & 0xffu) << (8 * e);
#endif
  }
  return chunk;
}

__device__ inline int8_t clamped(float q, float low) { return int8_t(q < low ? low : q > 127 ? 127 : q); }

// clamp(round half to even(y / scale) + zero_point): the definition. NaN counts as 0.
__device__ inline int8_t divided(float y, const Quantizer& q) {
  const float rounded = rintf(y / q.scale);
  return clamped((rounded == rounded ? rounded : 0.0f) + q.zero_point, q.low);
}

struct EightFloats {
  float values[kChunk];
};

__device__ inline Chunk<int8_t> divided_here(const float (&y)[kChunk], const Quantizer& q) {
  int8_t out[kChunk];
#pragma unroll
  for (int e = 0; e < kChunk; ++e) out[e] = q.spoilt ? int8_t(0) : divided(y[e], q);
  return Chunk<int8_t>::of(out);
}

// A function of its own: it is rare, and eight divisions in every place that may need them are most of a kernel.
__attribute__((noinline)) static __device__ Chunk<int8_t> divide_all(EightFloats y, float scale, float zero_point, float low, bool spoilt) {
  return divided_here(y.values, {scale, 0, zero_point, false, spoilt, low});
}

__device__ inline Chunk<int8_t> divided(const float (&y)[kChunk], const Quantizer& q) {
  EightFloats all;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) all.values[e] = y[e];
  return divide_all(all, q.scale, q.zero_point, q.low, q.spoilt);
}

// The quotient y / scale of the IEEE division, from y * inverse. The first correction leaves it within one unit of the last place, the second rounds
// it correctly (Markstein, IBM Journal of Research and Development 34, 1990): the inverse is correctly rounded, and the remainders are exact if the
// scale is 2^-90 or more. Below a quotient of 1/4 they may be inexact: it is rounded to 0.
__device__ inline float corrected(float estimate, float y, const Quantizer& q) {
  const float better = fmaf(fmaf(-estimate, q.scale, y), q.inverse, estimate);
  return fmaf(fmaf(-better, q.scale, y), q.inverse, better);
}

// Each byte plus the same number, modulo 256.
__device__ inline void add_to_bytes(Chunk<int8_t>& chunk, int number) {
  const uint32_t numbers = (uint32_t(number) & 0xffu) * 0x01010101u;
#pragma unroll
  for (uint32_t& word : chunk.words) word = ((word & 0x7f7f7f7fu) + (numbers & 0x7f7f7f7fu)) ^ ((word ^ numbers) & 0x80808080u);
}

// Eight elements of a row that is not spoilt, whose largest magnitude gave the scale: nothing is clamped, and nothing is NaN.
__device__ inline Chunk<int8_t> by_largest(const float (&y)[kChunk], const Quantizer& q) {
  float moved[kChunk];
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    moved[e] = corrected(y[e] * q.inverse, y[e], q) + kMagic;
  }
  return low_bytes(moved);
}

// Eight elements of any row, by corrected quotients too. A chunk with NaN or with quotients beyond 2^20 is divided, kHere or by a call.
template <bool kHere = false>
__device__ inline Chunk<int8_t> by_inverse(const float (&y)[kChunk], const Quantizer& q) {
  const float least = q.low - q.zero_point, most = 127.0f - q.zero_point;
  bool small = q.short_way;
  float moved[kChunk];
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    const float estimate = y[e] * q.inverse;
    small = small && fabsf(estimate) <= 1048576.0f;
    moved[e] = fminf(fmaxf(corrected(estimate, y[e], q), least), most) + kMagic;
  }
  if (!small) return kHere ? divided_here(y, q) : divided(y, q);
  Chunk<int8_t> chunk = low_bytes(moved);
  if (q.zero_point != 0) add_to_bytes(chunk, int(q.zero_point));
  return chunk;
}

// Eight elements of a block that has a scale of its own.
__device__ inline Chunk<int8_t> quantize(const float (&y)[kChunk], const Quantizer& q) {
  return q.spoilt || !q.short_way ? divided(y, q) : by_largest(y, q);
}

// The same with quotients rounded toward zero.
__device__ inline Chunk<int8_t> truncate(const float (&y)[kChunk], const Quantizer& q) {
  int8_t out[kChunk];
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    const float quotient = truncf(q.short_way ? corrected(y[e] * q.inverse, y[e], q) : y[e] / q.scale);
    out[e] = q.spoilt ? int8_t(0) : clamped(quotient, q.low);
  }
  return Chunk<int8_t>::of(out);
}

// The sum of elements [k, k + 8) of a row.
__device__ inline int32_t sum_of(const Chunk<int8_t>& q, int k, int K) {
  int8_t values[kChunk];
  q.get(values);
  int32_t sum = 0;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) sum += k + e < K ? values[e] : 0;
  return sum;
}

// clamp(round half to even(y)), NaN counts as 0.
__device__ inline Chunk<int8_t> round_only(const float (&y)[kChunk]) {
  float moved[kChunk];
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    const float held = y[e] == y[e] ? y[e] : 0.0f;
    moved[e] = (held < -128 ? -128.0f : held > 127 ? 127.0f : held) + kMagic;
  }
  return low_bytes(moved);
}

} // namespace scaled_mm::rowwise
