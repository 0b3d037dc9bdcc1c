// The kernel that packs a weight: from GGUF blocks into tiles.
#pragma once

#include "gguf/formats.cuh"
#include "int8/c3x/grid_dependency.cuh"

namespace scaled_mm::gguf {

// Stores pair n of 5-bit levels in the words (formats.cuh). levels: the first level in the low half, the second in the high half.
__device__ inline void put_five(uint32_t (&words)[5], int n, uint32_t levels) {
  if (n < 15) {
    words[n / 3] |= levels << (5 * (n % 3));
  } else {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] |= (levels >> i & 0x00010001u) << 15;
  }
}

// One thread block per tile, four threads per two rows, in the order of fragments. Powers of rows are 1: kernels that need them take packed weights.
template <class F>
__global__ void __launch_bounds__(128) make_tiles(const uint8_t* weight, int64_t stride, int64_t rows, int64_t blocks, int tiles_k, uint8_t* tiles) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  let_next_kernel_start();
  wait_for_preceding_kernel();
#endif
  const int64_t tile_m = blockIdx.x / tiles_k;
  const int tile_k = int(blockIdx.x % tiles_k), thread = int(threadIdx.x);
  const int t = thread % 4, g = thread / 4 % 8, warp = thread / 32, lane = thread % 32;
  uint8_t* const tile = tiles + int64_t(blockIdx.x) * F::kTileBytes;
  uint8_t* const band = tile + warp * F::kBandBytes;
  if (thread < kTileRows) reinterpret_cast<uint16_t*>(tile + F::kBandsBytes)[thread] = 0x3c00;
  for (int pair = 0; pair < kTileBlocks / 2; ++pair) {
    uint32_t fives[5] = {};
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int odd = part / 2, i = part % 2, block = 2 * pair + odd;
      const int64_t row = tile_m * kTileRows + warp * 16 + g + 8 * i, k = int64_t(tile_k) * kTileBlocks + block;
      const bool there = row < rows && k < blocks;
      const uint8_t* q = weight + row * stride + k * F::kBytes;
      const uint8_t* levels = q + F::kLevelsOffset;
      if constexpr (F::kBits == 8) {
        uint32_t words[2] = {};
        if (there) {
          for (int j = 0; j < 2; ++j) {
            const uint8_t* from = levels + 2 * t + 8 * j;
            words[j] = from[0] | uint32_t(from[16]) << 8 | uint32_t(from[1]) << 16 | uint32_t(from[17]) << 24;
          }
        }
        *reinterpret_cast<uint2*>(band + block * 512 + lane * 16 + i * 8) = make_uint2(words[0], words[1]);
      } else if constexpr (F::kBits == 5) {
        if (there) {
          const uint8_t* h = q + F::kHighOffset;
          const uint32_t all = h[0] | uint32_t(h[1]) << 8 | uint32_t(h[2]) << 16 | uint32_t(h[3]) << 24;
#pragma unroll
          for (int j = 0; j < 4; ++j) { // elements 2 t + 8 j and 2 t + 8 j + 1: nibbles of two bytes, and two fifth bits
            const uint8_t* from = levels + 2 * t + 8 * (j % 2);
            const int shift = j < 2 ? 0 : 4;
            const uint32_t one = from[0] >> shift & 15, next = from[1] >> shift & 15, two = all >> (2 * t + 8 * j);
            put_five(fives, 4 * part + j, one | (two & 1) << 4 | next << 16 | (two >> 1 & 1) << 20);
          }
        }
      } else {
        uint32_t word = 0;
        if (there) {
          for (int j = 0; j < 2; ++j) { // bytes 2 t + 8 j and 2 t + 8 j + 1; the high nibble is the element 16 after the low nibble's
            const uint32_t one = levels[2 * t + 8 * j], next = levels[2 * t + 8 * j + 1];
            word |= (one & 15) << (4 * j) | (one >> 4) << (4 * j + 8) | (next & 15) << (4 * j + 16) | (next >> 4) << (4 * j + 24);
          }
        }
        *reinterpret_cast<uint32_t*>(band + pair * F::kPairBytes + lane * 16 + odd * 8 + i * 4) = word;
      }
      if (t == 0) {
        const int at = (g * kTileBlocks + block) * 4 + 2 * i;
        *reinterpret_cast<uint16_t*>(band + F::kBandScales + at) = there ? uint16_t(q[0] | q[1] << 8) : uint16_t(0);
        if constexpr (F::kMinimum) {
          *reinterpret_cast<uint16_t*>(band + F::kBandMinima + at) = there ? uint16_t(q[2] | q[3] << 8) : uint16_t(0);
        }
      }
    }
    if constexpr (F::kBits == 5) {
      *reinterpret_cast<uint4*>(band + pair * F::kPairBytes + lane * 16) = make_uint4(fives[0], fives[1], fives[2], fives[3]);
      *reinterpret_cast<uint32_t*>(band + F::kBandHigh + pair * 128 + lane * 4) = fives[4];
    }
  }
}

} // namespace scaled_mm::gguf
