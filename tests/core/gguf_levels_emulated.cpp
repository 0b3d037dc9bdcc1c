// A GGUF format's tiles, on gpu.h as a library: written from blocks by the kernel that does it (csrc/gguf/stage.cuh), and read as the
// kernels of products read them, into the numbers of their fragments (csrc/gguf/levels.cuh).
#include "gpu.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>

// What CUDA's headers have for a GPU alone. A fused multiply-add of halves is rounded once: the sum is exact in double.
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const auto one = [](__half x, __half y, __half z) { return __double2half(double(__half2float(x)) * __half2float(y) + __half2float(z)); };
  return __halves2half2(one(a.x, b.x, c.x), one(a.y, b.y, c.y));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  const auto one = [](__nv_bfloat16 x, __nv_bfloat16 y, __nv_bfloat16 z) {
    return __double2bfloat16(double(__bfloat162float(x)) * __bfloat162float(y) + __bfloat162float(z));
  };
  return __halves2bfloat162(one(a.x, b.x, c.x), one(a.y, b.y, c.y));
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= uint32_t(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return word;
}
// For what is not run here.
template <class T>
T __ldg(const T* at) {
  return *at;
}
inline float __shfl_xor_sync(unsigned, float v, int) { return v; }
inline uint32_t __ballot_sync(unsigned, bool v) { return v; }
inline float __uint_as_float(uint32_t x) { return __int_as_float(int(x)); }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

#include "gguf/levels.cuh"
#include "gguf/output.cuh"
#include "gguf/rounded.cuh"
#include "gguf/stage.cuh"

using namespace scaled_mm::gguf;

namespace {

float value_of(uint32_t half, const __half*) { return __half2float(__ushort_as_half(uint16_t(half))); }
float value_of(uint32_t half, const __nv_bfloat16*) { return __bfloat162float(__ushort_as_bfloat16(uint16_t(half))); }

// q minus the level of 0 [64][256] of a tile, each from the register in which mma.m16n8k16 takes it.
template <class F, class T>
void read_tile(const uint8_t* tile, float* numbers) {
  for (int thread = 0; thread < 128; ++thread) {
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    for (int pair = 0; pair < kTileBlocks / 2; ++pair) {
      PairLevels<F> levels;
      levels.load(tile + warp * F::kBandBytes, pair, lane);
      for (int b = 0; b < 2; ++b) {
        const Fragments f = levels.template fragments<T>(b);
        for (int i = 0; i < 16; ++i) { // of a lane's values: which of two instructions, register and half
          const int a = i / 8, of = i / 2 % 4, half = i % 2;
          const int row = warp * kBandRows + g + of % 2 * 8, k = (2 * pair + b) * kBlock + a * 16 + of / 2 * 8 + 2 * t + half;
          numbers[row * kTileK + k] = value_of(f.a[a][of] >> 16 * half & 0xffff, static_cast<const T*>(nullptr));
        }
      }
    }
  }
}

// The rounded values [64][256] of a tile, divided by the powers of their rows, each from the register in which wgmma takes it.
template <class F, class T>
void read_rounded(const uint8_t* tile, float* values) {
  for (int thread = 0; thread < 128; ++thread) {
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const uint32_t powers = RoundedPair<F, T>::as_pair(*reinterpret_cast<const uint32_t*>(tile + F::kBandsBytes + warp * F::kBandPowers + g * 4));
    const float2 inverse = RoundedPair<F, T>::inverse_powers(powers);
    for (int pair = 0; pair < kTileBlocks / 2; ++pair) {
      RoundedPair<F, T> two;
      two.load(tile + warp * F::kBandBytes, pair, lane);
      for (int b = 0; b < 2; ++b) {
        const Fragments f = two.fragments(b, powers);
        for (int i = 0; i < 16; ++i) {
          const int a = i / 8, of = i / 2 % 4, half = i % 2;
          const int row = warp * kBandRows + g + of % 2 * 8, k = (2 * pair + b) * kBlock + a * 16 + of / 2 * 8 + 2 * t + half;
          const float value = value_of(f.a[a][of] >> 16 * half & 0xffff, static_cast<const T*>(nullptr));
          values[row * kTileK + k] = value * (of % 2 ? inverse.y : inverse.x);
        }
      }
    }
  }
}

template <class F>
void write_tiles(const uint8_t* weight, int64_t rows, int64_t blocks, uint8_t* tiles) {
  const int tiles_k = int(tiles_of(blocks, kTileBlocks)), count = int(tiles_of(rows, kTileRows)) * tiles_k;
  for (int tile = 0; tile < count; ++tile) {
    gpu::run_block(128, unsigned(tile), true, [&] { make_tiles<F>(weight, blocks * F::kBytes, rows, blocks, tiles_k, tiles); });
  }
}

// What the middle levels stand for [64][8] of a tile, high and low parts, from the registers in which mma.m16n8k8 takes them.
template <class F>
void read_middles(const uint8_t* tile, float* high, float* low) {
  for (int thread = 0; thread < 128; ++thread) {
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const Middles middles = Middles::of<F>(tile + warp * F::kBandBytes, lane);
    for (int i = 0; i < 4; ++i) {
      const int at = (warp * kBandRows + g + 8 * (i % 2)) * kTileBlocks + t + 4 * (i / 2);
      high[at] = __uint_as_float(middles.high[i]), low[at] = __uint_as_float(middles.low[i]);
    }
  }
}

} // namespace

#define EMULATE_FORMAT(F)                                                                                                                            \
  extern "C" void F##_half(const uint8_t* tile, float* numbers) { read_tile<F, __half>(tile, numbers); }                                             \
  extern "C" void F##_bfloat16(const uint8_t* tile, float* numbers) { read_tile<F, __nv_bfloat16>(tile, numbers); }                                  \
  extern "C" void F##_rounded_half(const uint8_t* tile, float* values) { read_rounded<F, __half>(tile, values); }                                    \
  extern "C" void F##_rounded_bfloat16(const uint8_t* tile, float* values) { read_rounded<F, __nv_bfloat16>(tile, values); }                         \
  extern "C" void F##_tiles(const uint8_t* weight, int64_t rows, int64_t blocks, uint8_t* tiles) { write_tiles<F>(weight, rows, blocks, tiles); }

#define EMULATE_WEIGHT_FORMAT(NAME, ...) EMULATE_FORMAT(NAME)
SCALED_MM_GGUF_WEIGHT_FORMATS(EMULATE_WEIGHT_FORMAT)

#define EMULATE_MINIMUM(F)                                                                                                                           \
  extern "C" void F##_middles(const uint8_t* tile, float* high, float* low) { read_middles<F>(tile, high, low); }                                    \
  extern "C" void F##_centred(const uint8_t* tile, float* numbers) { read_tile<Levels<F, Factors::kSums>, __half>(tile, numbers); }                  \
  extern "C" void F##_centred_bfloat16(const uint8_t* tile, float* numbers) { read_tile<Levels<F, Factors::kFloats>, __nv_bfloat16>(tile, numbers); }

EMULATE_MINIMUM(Q4_1)
EMULATE_MINIMUM(Q5_1)

// (high, low) of a sum of activations, as TF32 takes it.
extern "C" void two_tf32_of(const float* sums, int64_t count, float* parts) {
  for (int64_t i = 0; i < count; ++i) {
    const float2 two = two_tf32(sums[i]);
    parts[2 * i] = two.x, parts[2 * i + 1] = two.y;
  }
}
