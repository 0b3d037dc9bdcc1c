// Unpacks the levels of a tile into 16-bit floats, two per register: q - zero, exact; or leaves them at their place (Subnormal).
#pragma once

#include "gguf/formats.cuh"

namespace scaled_mm::gguf {

// (word & mask) | base in one instruction. With two constants the compiler would emit an AND and an OR.
__device__ inline uint32_t bits_onto(uint32_t base, uint32_t word, uint32_t mask) {
#if defined(__CUDA_ARCH__)
  uint32_t made;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(made) : "r"(word), "r"(mask), "r"(base));
  return made;
#else
  return (word & mask) | base;
#endif
}

// Pairs of 16-bit floats by their bits. Integer to float: set the low mantissa bits of a power of two, then subtract the power.
template <class T>
struct Pairs;

template <>
struct Pairs<__half> {
  static constexpr uint32_t kBase = 0x64006400; // 1024; its last mantissa bit has the value 1
  static constexpr int kMantissa = 10;
  __device__ static __half2 of(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
  __device__ static uint32_t bits(__half2 value) { return *reinterpret_cast<const uint32_t*>(&value); }
  __device__ static __half2 times(__half2 value, float factor) { return __hmul2(value, __float2half2_rn(factor)); }
  // The first or the second of two numbers, twice.
  __device__ static __half2 both(__half2 rows, bool second) { return second ? __high2half2(rows) : __low2half2(rows); }
  // q: the bits of 1024 + level in both halves. Result: level - zero.
  template <int kZero>
  __device__ static uint32_t minus(uint32_t q) {
    return bits(__hsub2(of(q), __half2half2(__ushort_as_half(0x6400 + kZero))));
  }
  // q: the bits of 1024 + kOne * level in both halves; kOne is a power of two, level < 1024 / kOne. Result: level - zero.
  template <int kZero, int kOne>
  __device__ static uint32_t scaled_minus(uint32_t q) {
    return bits(__hfma2(of(q), __float2half2_rn(1.0f / kOne), __float2half2_rn(-1024.0f / kOne - kZero)));
  }
};

template <>
struct Pairs<__nv_bfloat16> {
  static constexpr uint32_t kBase = 0x43004300; // 128
  static constexpr int kMantissa = 7;
  __device__ static __nv_bfloat162 of(uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); }
  __device__ static uint32_t bits(__nv_bfloat162 value) { return *reinterpret_cast<const uint32_t*>(&value); }
  __device__ static __nv_bfloat162 times(__nv_bfloat162 value, float factor) { return __hmul2(value, __float2bfloat162_rn(factor)); }
  __device__ static __nv_bfloat162 both(__nv_bfloat162 rows, bool second) { return second ? __high2bfloat162(rows) : __low2bfloat162(rows); }
  __device__ static uint32_t difference(uint32_t a, uint32_t b) { return bits(__hsub2(of(a), of(b))); }
  template <int kZero>
  __device__ static uint32_t minus(uint32_t q) {
    return difference(q, kBase + 0x00010001u * kZero);
  }
};

// Levels left at their place in a word, to be multiplied as numbers of type T. As float16 their bits are subnormal numbers, 2^-24 * one * level; as
// bfloat16 2^-133 * one * level. one is PairLevels::one. A level of bfloat16 that reaches the eighth bit, the lowest of the exponent, has the same
// value: the least normal numbers continue the subnormal ones. The zero point is not subtracted; bytes are level + 128.
template <class T>
struct Subnormal {};

template <class T>
struct Pairs<Subnormal<T>> {
  static constexpr uint32_t kBase = 0;
  static constexpr int kMantissa = Pairs<T>::kMantissa + 1; // with the lowest bit of the exponent
  template <int kZero>
  __device__ static uint32_t minus(uint32_t q) {
    return q;
  }
  template <int kZero, int kOne>
  __device__ static uint32_t scaled_minus(uint32_t q) {
    return q;
  }
};

// A thread's part of one row of one block: elements 2 t and 2 t + 1, and the pairs 8, 16 and 24 elements later.
struct RowFragment {
  uint32_t pairs[4];
};

// Levels of 4 bits. word: eight nibbles in the order of a tile.
template <class F, class T>
__device__ inline RowFragment numbers_of_nibbles(uint32_t word) {
  using P = Pairs<T>;
  RowFragment f;
  if constexpr (P::kMantissa >= 8) { // room for bits 4 to 7 without a shift
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const uint32_t w = j ? word >> 8 : word;
      f.pairs[j] = P::template minus<F::kZero>(bits_onto(P::kBase, w, 0x000f000fu));
      f.pairs[j + 1] = P::template scaled_minus<F::kZero, 16>(bits_onto(P::kBase, w, 0x00f000f0u));
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) f.pairs[j] = P::template minus<F::kZero>(bits_onto(P::kBase, word >> (4 * j), 0x000f000fu));
  }
  return f;
}

// Levels of 5 bits (q5_0, q5_1): pair n of the 16 in a thread's five words (formats.cuh). n must be a constant after unrolling, or the words
// go to local memory.
template <class F, class T>
__device__ inline uint32_t number_of_fives(const uint32_t (&words)[5], int n) {
  using P = Pairs<T>;
  if (n == 15) {
    uint32_t q = P::kBase;
#pragma unroll
    for (int i = 0; i < 5; ++i) q = bits_onto(q, words[i] >> (15 - i), 0x00010001u << i);
    return P::template minus<F::kZero>(q);
  }
  const uint32_t word = words[n / 3];
  if constexpr (P::kMantissa >= 10) { // a float16 mantissa holds bits 5 to 9 without a shift
    if (n % 3 == 1) return P::template scaled_minus<F::kZero, 32>(bits_onto(P::kBase, word, 0x03e003e0u));
  }
  return P::template minus<F::kZero>(bits_onto(P::kBase, word >> (5 * (n % 3)), 0x001f001fu));
}

// Pairs first to first + 3.
template <class F, class T>
__device__ inline RowFragment numbers_of_fives(const uint32_t (&words)[5], int first) {
  RowFragment f;
#pragma unroll
  for (int j = 0; j < 4; ++j) f.pairs[j] = number_of_fives<F, T>(words, first + j);
  return f;
}

// Levels of 8 bits. first: signed bytes of elements 2 t, 2 t + 16, 2 t + 1, 2 t + 17. second: of the elements 8 later.
template <class T>
__device__ inline RowFragment numbers_of_bytes(uint32_t first, uint32_t second) {
  using P = Pairs<T>;
  RowFragment f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t word = j % 2 ? second : first;
    if constexpr (P::kMantissa >= 8) {
      f.pairs[j] = P::template minus<128>(__byte_perm(word ^ 0x80808080u, P::kBase | P::kBase >> 8, j < 2 ? 0x4240 : 0x4341));
    } else {
      const uint32_t two = __byte_perm(word, 0, j < 2 ? 0x4240 : 0x4341);
      // The low seven bits, minus 128 if the sign bit is set: (128 + low bits) - (128 or 256).
      f.pairs[j] = P::difference(bits_onto(P::kBase, two, 0x007f007fu), bits_onto(P::kBase, two, 0x00800080u));
    }
  }
  return f;
}

// The A operands of one block for two MMAs of 16 k each: rows g and g + 8 of a warp's 16.
struct Fragments {
  uint32_t a[2][4];

  __device__ void set(int row, const RowFragment& f) {
    a[0][row] = f.pairs[0];
    a[0][row + 2] = f.pairs[1];
    a[1][row] = f.pairs[2];
    a[1][row + 2] = f.pairs[3];
  }
};

// A thread's levels of two blocks, in registers, as loaded from a band.
template <class F>
struct PairLevels {
  static constexpr int kVectors = F::kBits == 8 ? 2 : 1;
  uint4 vectors[kVectors];
  uint32_t fifth; // levels of 5 bits: the last of the five words

  // The factor (1, 16 or 32) that its place in a word gives to a level of Subnormal<T>, for register i of a block (Fragments::set).
  template <class T>
  __device__ static constexpr int one(int block, int i) {
    const int j = i / 4 * 2 + i % 4 / 2, n = 8 * block + 4 * (i % 2) + j;
    if (F::kBits == 4) return j % 2 ? 16 : 1;
    return F::kBits == 5 && Pairs<T>::kMantissa == 10 && n % 3 == 1 ? 32 : 1;
  }

  // band: aligned to 16 bytes.
  __device__ void load(const uint8_t* band, int pair, int lane) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      vectors[i] = *reinterpret_cast<const uint4*>(band + pair * F::kPairBytes + i * 512 + lane * 16);
    }
    if constexpr (F::kBits == 5) fifth = *reinterpret_cast<const uint32_t*>(band + F::kBandHigh + pair * 128 + lane * 4);
  }

  template <class T>
  __device__ Fragments fragments(int block) const {
    Fragments f;
    if constexpr (F::kBits == 8) {
      const uint4& v = vectors[block];
      f.set(0, numbers_of_bytes<T>(v.x, v.y));
      f.set(1, numbers_of_bytes<T>(v.z, v.w));
    } else if constexpr (F::kBits == 5) {
      const uint4& v = vectors[0];
      const uint32_t words[5] = {v.x, v.y, v.z, v.w, fifth};
      f.set(0, numbers_of_fives<F, T>(words, 8 * block));
      f.set(1, numbers_of_fives<F, T>(words, 8 * block + 4));
    } else {
      const uint4& v = vectors[0];
      f.set(0, numbers_of_nibbles<F, T>(block ? v.z : v.x));
      f.set(1, numbers_of_nibbles<F, T>(block ? v.w : v.y));
    }
    return f;
  }
};

// The scales (or minima) of a thread's two rows in two blocks of a tile: a pair of float16 per block.
struct PairScales {
  uint2 words;

  // scales: of a band.
  __device__ void load(const uint8_t* scales, int pair, int g) { words = *reinterpret_cast<const uint2*>(scales + g * kTileBlocks * 4 + pair * 8); }
  __device__ uint32_t word(int block) const { return block ? words.y : words.x; }
  __device__ float2 of(int block) const { return __half22float2(Pairs<__half>::of(word(block))); }
};

} // namespace scaled_mm::gguf
