// Quantizes floats to the blocks of every GGUF format, with the bits of scaled_mm/gguf/quantize.py. Four adjacent threads share a GGUF block. A
// warp collects its eight blocks in shared memory and stores them together: blocks are aligned to two bytes only.
#pragma once

#include "gguf/block_sum.cuh"
#include "rowwise/kernel.cuh"

namespace scaled_mm::gguf {

// A GGUF format as it is written.
template <int kBits_, int kZero_, bool kMinimum_, bool kSum_>
struct Written {
  static constexpr int kBits = kBits_, kZero = kZero_;
  static constexpr bool kMinimum = kMinimum_, kSum = kSum_;
  static constexpr int kHighOffset = kMinimum || kSum ? 4 : 2;
  static constexpr int kLevelsOffset = kHighOffset + (kBits == 5 ? 4 : 0);
  static constexpr int kBytes = kLevelsOffset + kBits / 4 * 16;
  static constexpr float kMost = float((1 << kBits) - 1);
};

struct QuantizeParams {
  rowwise::Matrix x;
  int K;
  uint32_t blocks, blocks_k; // all; of a row
  uint8_t* out;              // one block after the other
  bool aligned;              // to 16 bytes
};

constexpr int kQuantizeThreads = 256, kWarpBlocks = 32 / kSharers;

// Over the threads of a GGUF block.
template <class T, class Combine>
__device__ inline T over_block(T value, const Combine& combine) {
#pragma unroll
  for (int step = kSharers / 2; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

__device__ inline uint32_t larger(uint32_t x, uint32_t y) { return x > y ? x : y; }

// The bits of the largest magnitude: those of a NaN are larger than an infinity's.
__device__ inline uint32_t largest_bits(const float (&x)[kEach]) {
  uint32_t bits = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) bits = larger(bits, __float_as_uint(x[e]) & 0x7fffffffu);
  return over_block(bits, larger);
}

// Rounded to nearest even. NaN becomes 0x7e00.
__device__ inline uint16_t half_bits(float v) {
  const __half rounded = __float2half_rn(v);
  uint16_t bits;
  memcpy(&bits, &rounded, sizeof(bits));
  return v == v ? bits : uint16_t(0x7e00);
}

__device__ inline bool is_finite(float v) { return fabsf(v) <= 3.4028234663852886e38f; }
__device__ inline float inverse_of(float d) { return d == 0.0f ? 0.0f : 1.0f / d; }

// Truncated and clamped; 0 for one that is not finite.
__device__ inline uint8_t unsigned_level(float v, float most) { return uint8_t(int(!is_finite(v) || v < 0.0f ? 0.0f : v > most ? most : v)); }

// The scale; levels as bytes.
template <class F>
__device__ inline float by_absmax(const float (&x)[kEach], uint8_t (&levels)[kEach]) {
  const float d = __uint_as_float(largest_bits(x)) / float(F::kZero - 1), divisor = d == 0.0f ? 1.0f : d;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const float level = roundf(x[e] / divisor);
    levels[e] = unsigned_level((is_finite(level) ? level : 0.0f) + float(F::kZero), float(2 * F::kZero - 1));
  }
  return d;
}

template <class F>
__device__ inline float by_largest(const float (&x)[kEach], uint8_t (&levels)[kEach]) {
  const uint32_t largest = largest_bits(x), thread = threadIdx.x % kSharers;
  uint32_t first = ~0u; // the first of this magnitude: 2 * its place + its sign
#pragma unroll
  for (int e = kEach - 1; e >= 0; --e) {
    const uint32_t bits = __float_as_uint(x[e]);
    if ((bits & 0x7fffffffu) == largest) first = 2 * (thread * kEach + e) + (bits >> 31);
  }
  first = over_block(first, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
  const float d = __uint_as_float(largest | first << 31) / float(-F::kZero), inverse = inverse_of(d);
#pragma unroll
  for (int e = 0; e < kEach; ++e) levels[e] = unsigned_level(x[e] * inverse + (float(F::kZero) + 0.5f), F::kMost);
  return d;
}

// Order of the numbers, with -0.0 before +0.0. A NaN is beyond every number.
__device__ inline int32_t ordered(uint32_t bits) { return int32_t(bits) < 0 ? int32_t(bits ^ 0x7fffffffu) : int32_t(bits); }

template <class F>
__device__ inline float by_range(const float (&x)[kEach], uint8_t (&levels)[kEach], float* minimum) {
  int32_t low = INT32_MAX, high = INT32_MIN;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int32_t key = ordered(__float_as_uint(x[e]));
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  low = over_block(low, [](int32_t a, int32_t b) { return a < b ? a : b; });
  high = over_block(high, [](int32_t a, int32_t b) { return a > b ? a : b; });
  const float most = __uint_as_float(uint32_t(ordered(uint32_t(high)))) + 0.0f; // +0.0 for either zero
  float least = __uint_as_float(uint32_t(ordered(uint32_t(low))));
  if (most != most) least = most;
  const float d = (most - least) / F::kMost, inverse = inverse_of(d);
#pragma unroll
  for (int e = 0; e < kEach; ++e) levels[e] = unsigned_level((x[e] - least) * inverse + 0.5f, F::kMost);
  *minimum = least;
  return d;
}

__device__ inline float by_magnitude(const float (&x)[kEach], uint8_t (&levels)[kEach]) {
  const float d = __uint_as_float(largest_bits(x)) / 127.0f, inverse = inverse_of(d);
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const float level = roundf(x[e] * inverse);
    levels[e] = uint8_t(int8_t(int(is_finite(level) ? level : 0.0f)));
  }
  return d;
}

__device__ inline void put(uint8_t* to, uint32_t word) { // aligned to two bytes
  reinterpret_cast<uint16_t*>(to)[0] = uint16_t(word);
  reinterpret_cast<uint16_t*>(to)[1] = uint16_t(word >> 16);
}

// This thread's part of a block's levels. to: the block.
template <class F>
__device__ inline void put_levels(const uint8_t (&levels)[kEach], uint8_t* to) {
  const uint32_t thread = threadIdx.x % kSharers;
  uint32_t words[2] = {};
#pragma unroll
  for (int e = 0; e < kEach; ++e) words[e / 4] |= uint32_t(levels[e]) << (8 * (e % 4));
  if constexpr (F::kBits == 8) {
    put(to + F::kLevelsOffset + kEach * thread, words[0]);
    put(to + F::kLevelsOffset + kEach * thread + 4, words[1]);
    return;
  }
  if constexpr (F::kBits == 5) {
    uint32_t high = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) high |= uint32_t(levels[e] >> 4) << e;
    to[F::kHighOffset + thread] = uint8_t(high);
    words[0] &= 0x0f0f0f0fu, words[1] &= 0x0f0f0f0fu;
  }
  // Byte j has elements j and j + 16, which thread + 2 has: one thread writes four of their eight bytes, the other the other four.
  const bool upper = thread & 2;
  const uint32_t other = __shfl_xor_sync(~0u, upper ? words[0] : words[1], 2);
  put(to + F::kLevelsOffset + 8 * (thread & 1) + (upper ? 4 : 0), upper ? other | words[1] << 4 : words[0] | other << 4);
}

template <class X, class F, bool kLargest>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_kernel(const __grid_constant__ QuantizeParams p) {
  rowwise::wait_for_preceding_kernel();
  alignas(16) __shared__ uint8_t staged[kQuantizeThreads / 32][kWarpBlocks * F::kBytes];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, thread = lane % kSharers;
  const uint32_t first = (blockIdx.x * (kQuantizeThreads / 32) + warp) * kWarpBlocks, block = first + lane / kSharers;
  if (first >= p.blocks) return;
  const uint32_t column = block % p.blocks_k;
  float x[kEach] = {};
  if (block < p.blocks) rowwise::load_chunk<X>(p.x, block / p.blocks_k, int(column) * 32 + int(thread) * kEach, p.K, x);
  uint8_t levels[kEach];
  float d, second = 0.0f;
  if constexpr (F::kMinimum) {
    d = by_range<F>(x, levels, &second);
  } else if constexpr (F::kZero == 0) {
    d = by_magnitude(x, levels);
    if constexpr (F::kSum) second = block_sum(x);
  } else if constexpr (kLargest) {
    d = by_largest<F>(x, levels);
  } else {
    d = by_absmax<F>(x, levels);
  }
  uint8_t* const to = staged[warp] + lane / kSharers * F::kBytes;
  if (thread == 0) *reinterpret_cast<uint16_t*>(to) = half_bits(d);
  if (F::kHighOffset == 4 && thread == 1) *reinterpret_cast<uint16_t*>(to + 2) = half_bits(second);
  put_levels<F>(levels, to);
  __syncwarp();
  const uint32_t left = p.blocks - first, bytes = (left < kWarpBlocks ? left : kWarpBlocks) * F::kBytes;
  uint8_t* const out = p.out + int64_t(first) * F::kBytes;
  uint32_t copied = 0; // a whole warp's blocks are a multiple of 16 bytes
  if (p.aligned) {
    copied = bytes / 16 * 16;
    if (16 * lane < copied) reinterpret_cast<uint4*>(out)[lane] = reinterpret_cast<const uint4*>(staged[warp])[lane];
  }
  for (uint32_t i = copied + lane; i < bytes; i += 32) out[i] = staged[warp][i];
}

} // namespace scaled_mm::gguf
