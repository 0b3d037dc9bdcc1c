// From float32 results to int8.
#pragma once

#include "rowwise/rows.cuh"

namespace scaled_mm::rowwise {

// A scale and a zero point, and what the short way of `quantize` needs.
struct Quantizer {
  float scale, inverse, zero_point;
  bool short_way; // false: every element is divided
  bool spoilt;    // NaN or infinity in a row that has a scale of its own: all zeros
  float low;      // -127 for a symmetric scale of the row's own, else -128

  __device__ static Quantizer of(float scale, float zero_point, bool spoilt, float low) {
    const bool small = zero_point >= -128 && zero_point <= 128;
    return {scale, 1 / scale, zero_point, small, spoilt, low};
  }
  // Symmetric. bits: of the largest magnitude; those of a NaN are larger than an infinity's.
  __device__ static Quantizer of_largest(uint32_t bits) {
    constexpr float kSmallest = 1.1754943508222875e-38f; // 2^-126
    const float scale = __uint_as_float(bits) / 127.0f;
    const bool spoilt = !(fabsf(scale) <= 3.4028234663852886e38f);
    return of(scale < kSmallest ? kSmallest : scale, 0, spoilt, -127);
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

// Eight elements by the inverse of the scale, which differs from the division by less than 2^-14 up to 300, beyond which the result is clamped. Only
// next to a tie does that change the rounding. `sure` becomes false then, and for NaN: the elements have to be divided.
// kBounded: the scale is that of the largest magnitude, and the row is not spoilt: nothing has to be clamped, and nothing is NaN.
template <bool kBounded>
__device__ inline Chunk<int8_t> multiplied(const float (&y)[kChunk], const Quantizer& q, bool& sure) {
  constexpr float kSure = 0.5f - 1.0f / 16384;
  const float least = q.low - q.zero_point, most = 127.0f - q.zero_point, magic = kMagic + (kBounded ? 0.0f : q.zero_point);
  float moved[kChunk];
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    float ratio = y[e] * q.inverse;
    if constexpr (!kBounded) ratio = smaller(larger(ratio, least), most); // NaN stays
    moved[e] = ratio + magic;
    sure = sure && fabsf(ratio - (moved[e] - magic)) <= kSure;
  }
  return low_bytes(moved);
}

// Eight elements of a block that has a scale of its own.
__device__ inline Chunk<int8_t> quantize(const float (&y)[kChunk], const Quantizer& q) {
  if (q.spoilt) return {};
  bool sure = true;
  const Chunk<int8_t> fast = multiplied<true>(y, q, sure);
  if (sure) return fast;
  int8_t out[kChunk];
#pragma unroll
  for (int e = 0; e < kChunk; ++e) out[e] = divided(y[e], q);
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

// A batch of chunks of a row, written. Returns the sum of the int8 elements if wants_sum, else 0.
template <bool kBounded, bool kVectors, class At, int kCount>
__device__ inline int32_t write_quantized(const Rows& p, int64_t row, const At& at, const float (&y)[kCount][kChunk], const Quantizer& q,
                                          bool wants_sum) {
  bool sure = kBounded || q.short_way;
  int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    Chunk<int8_t> chunk = multiplied<kBounded>(y[i], q, sure);
    if (kBounded && q.spoilt) chunk = {};
    write_chunk<kVectors>(p.out, row, at[i], p.K, chunk);
    if (wants_sum) sum += sum_of(chunk, at[i], p.K);
  }
  if (sure || (kBounded && q.spoilt)) return sum;
  float copied[kCount][kChunk]; // an array that is indexed at run time lies in memory, unlike y
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) copied[i][e] = y[i][e];
  }
  sum = 0;
#pragma unroll 1
  for (int j = 0; j < kCount * kChunk; ++j) { // small code: the kernels' instructions have to be fetched too
    const int k = at[j / kChunk] + j % kChunk;
    if (k >= p.K) continue;
    const int8_t value = q.spoilt ? int8_t(0) : divided(copied[j / kChunk][j % kChunk], q);
    static_cast<int8_t*>(p.out.data)[row * p.out.stride_row + int64_t(k) * p.out.stride_k] = value;
    sum += value;
  }
  return wants_sum ? sum : 0;
}

} // namespace scaled_mm::rowwise
