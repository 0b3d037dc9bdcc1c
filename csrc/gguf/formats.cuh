// The bytes of GGUF blocks, 32 values of a row behind their scale (docs/design/gguf-formats.md), and of the tiles that kernels read: 64 rows of
// 8 blocks, in the order of the tensor cores' fragments.
//
// Levels of five bits: a thread's levels of two blocks are 16 pairs in five words. Pair 8 block + 4 row + j is pair j of that RowFragment
// (levels.cuh). A pair has its first level in the low half of a word and its second in the high half. In word i, pairs 3 i, 3 i + 1 and 3 i + 2
// start at bits 0, 5 and 10 of each half. Bit 15 of each half is bit i of pair 15.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/kernel_abi.h"

namespace scaled_mm::gguf {

constexpr int kBlock = 32;                     // values
constexpr int kTileRows = 64, kTileBlocks = 8; // of a tile
constexpr int kBandRows = 16;                  // of a band: what a warp multiplies
constexpr int kTileK = kBlock * kTileBlocks;

// A GGUF format of weights. kBits: of a level. kZero: the level that stands for 0 (0 with a minimum). kMinimum: a float16 minimum.
template <int kDtype_, int kBits_, int kZero_, bool kMinimum_>
struct Format {
  static constexpr int kDtype = kDtype_; // scaledMMDtype_t
  static constexpr int kBits = kBits_, kZero = kZero_;
  static constexpr bool kMinimum = kMinimum_;

  // A block as in a file: the scale, the minimum, the fifth bits, the levels.
  static constexpr int kHighOffset = kMinimum ? 4 : 2;
  static constexpr int kLevelsOffset = kHighOffset + (kBits == 5 ? 4 : 0);
  static constexpr int kBytes = kLevelsOffset + (kBits == 8 ? kBlock : kBlock / 2);

  // A tile: four bands of 16 rows, each with its levels, fifth words, scales, minima.
  static constexpr int kPairBytes = (kBits == 8 ? 2 : 1) * 512; // of a band: levels of two blocks, in units of 16 bytes per thread
  static constexpr int kBandHigh = 4 * kPairBytes;              // of five bits: the last of each thread's five words
  static constexpr int kBandScales = kBandHigh + (kBits == 5 ? 4 * 128 : 0);
  static constexpr int kBandMinima = kBandScales + 256;
  static constexpr int kBandBytes = kBandMinima + (kMinimum ? 256 : 0);
  static constexpr int kBandsBytes = 4 * kBandBytes;
  // After the bands the power of two of each row, float16, in the order of a block's scales: rows g and g + 8 of a band, g = 0 ... 7. Kernels that
  // round values to 16 bits need it (rounded.cuh).
  static constexpr int kPowerBytes = kTileRows * 2, kBandPowers = kBandRows * 2;
  static constexpr int kTileBytes = kBandsBytes + kPowerBytes;
};

// Q4_0, Q4_1, ...
#define FORMAT_TYPE(NAME, name, code, bytes, bits, zero, has_minimum)                                                                                \
  using NAME = Format<SCALED_MM_DTYPE_##NAME, bits, zero, (has_minimum) != 0>;                                                                       \
  static_assert(NAME::kBytes == bytes, "gguf_formats.h: the bytes of a GGUF block follow from bits and minimum");
SCALED_MM_GGUF_WEIGHT_FORMATS(FORMAT_TYPE)
#undef FORMAT_TYPE

// The format with centered levels: q - c, c the middle level, and the value m + c d of the middle level instead of the minimum m. Centering
// avoids catastrophic cancellation: tensor cores truncate while accumulating, which would bias the result.
template <class F>
using Centred = Format<F::kDtype, F::kBits, 1 << (F::kBits - 1), F::kMinimum>;

// A q8_1 block of activations: the scale, the sum of the values before quantization, the levels.
constexpr int kActivationBytes = 36, kActivationSum = 2, kActivationLevels = 4;

__host__ __device__ constexpr int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// A float16 at any address: blocks need not be aligned.
__device__ inline float load_half(const uint8_t* p) { return __half2float(__ushort_as_half(uint16_t(p[0] | p[1] << 8))); }

} // namespace scaled_mm::gguf
