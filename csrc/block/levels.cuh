// Levels of a tile as the numbers that they stand for, two to a register, exact: q minus the level of 0.
#pragma once

#include "block/formats.cuh"

namespace scaled_mm::block {

// Pairs of 16-bit floats by their bits. An integer is made by setting low bits of a power of two's mantissa, which is then subtracted.
template <class T>
struct Pairs;

template <>
struct Pairs<__half> {
  static constexpr uint32_t kBase = 0x64006400;  // 1024, whose last bit counts 1
  __device__ static __half2 of(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
  __device__ static uint32_t bits(__half2 value) { return *reinterpret_cast<const uint32_t*>(&value); }
  // kBase + q in both, less 1024 + zero.
  template <int kZero>
  __device__ static uint32_t minus(uint32_t q) {
    return bits(__hsub2(of(q), __half2half2(__ushort_as_half(0x6400 + kZero))));
  }
  // kBase + 16 q in both: q - zero.
  template <int kZero>
  __device__ static uint32_t sixteenth_minus(uint32_t q) {
    return bits(__hfma2(of(q), __float2half2_rn(1.0f / 16.0f), __float2half2_rn(-64.0f - kZero)));
  }
};

template <>
struct Pairs<__nv_bfloat16> {
  static constexpr uint32_t kBase = 0x43004300;  // 128
  __device__ static __nv_bfloat162 of(uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); }
  __device__ static uint32_t bits(__nv_bfloat162 value) { return *reinterpret_cast<const uint32_t*>(&value); }
  __device__ static uint32_t difference(uint32_t a, uint32_t b) { return bits(__hsub2(of(a), of(b))); }
  template <int kZero>
  __device__ static uint32_t minus(uint32_t q) {
    return difference(q, kBase + 0x00010001u * kZero);
  }
};

// The pairs that a thread's fragments of one row and one block want: elements 2 t and 2 t + 1, the two that come 8, 16 and 24 later.
struct RowFragment {
  uint32_t pairs[4];
};

// word: nibbles as a tile has them; high: their fifth bits, pair j's at bits j and 16 + j.
template <class F, class T>
__device__ inline RowFragment numbers_of_nibbles(uint32_t word, uint32_t high) {
  using P = Pairs<T>;
  RowFragment f;
  constexpr bool kFive = F::kBits == 5;
  if constexpr (sizeof(T) == 2 && P::kBase == 0x64006400) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const uint32_t w = j ? word >> 8 : word;
      uint32_t low = (w & 0x000f000fu) | P::kBase, next = (w & 0x00f000f0u) | P::kBase;
      if constexpr (kFive) {
        low |= (j ? high << 2 : high << 4) & 0x00100010u;
        next |= (j ? high << 5 : high << 7) & 0x01000100u;
      }
      f.pairs[j] = P::template minus<F::kZero>(low);
      f.pairs[j + 1] = P::template sixteenth_minus<F::kZero>(next);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t q = (word >> (4 * j) & 0x000f000fu) | P::kBase;
      if constexpr (kFive) q |= high << (4 - j) & 0x00100010u;
      f.pairs[j] = P::template minus<F::kZero>(q);
    }
  }
  return f;
}

// first: signed bytes of elements 2 t, 2 t + 16, 2 t + 1, 2 t + 17; second: of those 8 later.
template <class T>
__device__ inline RowFragment numbers_of_bytes(uint32_t first, uint32_t second) {
  using P = Pairs<T>;
  RowFragment f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t word = j % 2 ? second : first;
    if constexpr (P::kBase == 0x64006400) {
      f.pairs[j] = P::template minus<128>(__byte_perm(word ^ 0x80808080u, 0x64646464u, j < 2 ? 0x4240 : 0x4341));
    } else {
      const uint32_t two = __byte_perm(word, 0, j < 2 ? 0x4240 : 0x4341);
      // Seven bits, less 128, or 256 where the sign is set.
      f.pairs[j] = P::difference((two & 0x007f007fu) | P::kBase, (two & 0x00800080u) | P::kBase);
    }
  }
  return f;
}

// Of one block: the A operands of two MMAs of 16 k, rows g and g + 8 of a warp's 16.
struct Fragments {
  uint32_t a[2][4];

  __device__ void set(int row, const RowFragment& f) {
    a[0][row] = f.pairs[0];
    a[0][row + 2] = f.pairs[1];
    a[1][row] = f.pairs[2];
    a[1][row + 2] = f.pairs[3];
  }
};

// Two blocks' levels as a thread loads them from a band, in registers.
template <class F>
struct PairLevels {
  static constexpr int kVectors = F::kBits == 8 ? 2 : 1;
  uint4 vectors[kVectors];
  uint32_t high;

  // band: its bytes, aligned to 16.
  __device__ void load(const uint8_t* band, int pair, int lane) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      vectors[i] = *reinterpret_cast<const uint4*>(band + pair * F::kPairBytes + i * 512 + lane * 16);
    }
    if constexpr (F::kBits == 5) high = *reinterpret_cast<const uint32_t*>(band + F::kBandHigh + pair * 128 + lane * 4);
  }

  template <class T>
  __device__ Fragments fragments(int block) const {
    Fragments f;
    if constexpr (F::kBits == 8) {
      const uint4& v = vectors[block];
      f.set(0, numbers_of_bytes<T>(v.x, v.y));
      f.set(1, numbers_of_bytes<T>(v.z, v.w));
    } else {
      const uint32_t r0 = block ? vectors[0].z : vectors[0].x, r1 = block ? vectors[0].w : vectors[0].y;
      uint32_t h0 = 0, h1 = 0;
      if constexpr (F::kBits == 5) {
        h0 = high >> (8 * block);
        h1 = high >> (8 * block + 4);
      }
      f.set(0, numbers_of_nibbles<F, T>(r0, h0));
      f.set(1, numbers_of_nibbles<F, T>(r1, h1));
    }
    return f;
  }
};

// The scales (or minima) of a thread's two rows in two blocks of a tile: a pair of halves each.
struct PairScales {
  uint2 words;

  // scales: those of a band.
  __device__ void load(const uint8_t* scales, int pair, int g) {
    words = *reinterpret_cast<const uint2*>(scales + g * kTileBlocks * 4 + pair * 8);
  }
  __device__ float2 of(int block) const { return __half22float2(Pairs<__half>::of(block ? words.y : words.x)); }
};

}  // namespace scaled_mm::block
