// One or two tokens of 16-bit floats, read in place. From Ampere on.
//
// A column of mma.sync's result stands for a pair of GGUF blocks and a token, instead of one of 8 tokens. Each lane of a quad holds whole GGUF
// blocks of the weight, different ones from its neighbours. The operand is zero except where a column meets its own blocks. The sums of
// all 8 blocks of a tile take as many instructions as with 8 tokens, but a lane scales the sums of two blocks instead of all 8.
#pragma once

#include "gguf/instructions.cuh"
#include "gguf/levels.cuh"
#include "gguf/output.cuh"
#include "gguf/rows.cuh"
#include "gguf/stage.cuh"

namespace scaled_mm::gguf {

__device__ inline float sum_of_pair(__half2 two) { return __low2float(two) + __high2float(two); }
__device__ inline float sum_of_pair(__nv_bfloat162 two) { return __low2float(two) + __high2float(two); }

// 16 bytes per lane from shared memory. Lanes with wanted = false keep their value.
__device__ inline void load_shared_if(bool wanted, uint4& to, const void* from) {
  asm volatile("{.reg .pred wanted; setp.ne.u32 wanted, %5, 0; @wanted ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
               : "r"(uint32_t(__cvta_generic_to_shared(from))), "r"(uint32_t(wanted)));
}

// Lane 4 g + t holds rows g and g + 8 of pair t of a tile's blocks, all 32 k. Shared memory is swizzled: the 16 bytes of pair t that belong to
// lane 4 g + i in other kernels lie at lane 4 g + (i ^ t). A quad reads one i at a time, and two quads then cover all banks.
template <class F>
struct Few : Rows {
  static constexpr int kTokens = 2;

  uint4 values[kTileBlocks] = {}; // activations of a tile; zeros in lanes whose column belongs to another lane's blocks

  __device__ explicit Few(const RowsParams& params) : Rows{params} {}

  // The offset in the band to which this lane copies its 16 bytes of the band's n-th 512 bytes. It is within these 512 bytes. Scales and minima
  // are not swizzled.
  __device__ static int place(int n, int lane) {
    constexpr int kOfPair = F::kPairBytes / 512;
    if (n < 4 * kOfPair) return n * 512 + (lane ^ (n / kOfPair)) * 16;
    if (F::kBits == 5 && n == 4) return n * 512 + (lane ^ (lane / 8 * 2)) * 16; // four fifth words of a pair's row
    return n * 512 + lane * 16;
  }

  __device__ float* sums_of(uint8_t* slot, int token) const { return reinterpret_cast<float*>(slot + p.tokens * kRowBytes + token * kSumBytes); }

  // A warp sums each block of the tokens in a slot that it has loaded and waited for.
  template <class T>
  __device__ void add_up(uint8_t* slot, int, int lane) const {
    for (int token = 0; token < p.tokens; ++token) {
      const uint4 v = *reinterpret_cast<const uint4*>(slot + token * kRowBytes + lane * 16);
      float sum = 0.0f;
      for (const uint32_t two : {v.x, v.y, v.z, v.w}) sum += sum_of_pair(Pairs<T>::of(two));
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0) sums_of(slot, token)[lane / 4] = sum;
    }
  }

  // Multiplies a band by a slot. sums: of the lane's own blocks; tokens 0 and 1 stand in the place of a fragment's two columns.
  template <class T>
  __device__ void add(float (&sums)[4], const uint8_t* band, uint8_t* slot, int lane) {
    const int g = lane / 4, t = lane % 4;
    const bool own = g / 2 == t && g % 2 < p.tokens; // column g is token g % 2 of pair g / 2
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) load_shared_if(own, values[i], slot + g % 2 * kRowBytes + t * 128 + i * 16);
    uint4 fifths{};
    if constexpr (F::kBits == 5) fifths = *reinterpret_cast<const uint4*>(band + F::kBandHigh + t * 128 + (g ^ (2 * t)) * 16);
    float block_sums[2][4] = {};
    const uint32_t fifth[4] = {fifths.x, fifths.y, fifths.z, fifths.w};
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      PairLevels<Levels<F, F::kMinimum ? Factors::kSums : Factors::kNone>> levels[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int j = 0; j < levels[n].kVectors; ++j) {
          levels[n].vectors[j] = *reinterpret_cast<const uint4*>(band + t * F::kPairBytes + j * 512 + (4 * g + ((i + n) ^ t)) * 16);
        }
        levels[n].fifth = fifth[i + n];
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const Fragments f[2] = {levels[0].template fragments<T>(b), levels[1].template fragments<T>(b)};
#pragma unroll
        for (int eight = 0; eight < 4; ++eight) {
          const int half = eight / 2, at = eight % 2 * 2;
          const uint32_t a[4] = {f[0].a[half][at], f[0].a[half][at + 1], f[1].a[half][at], f[1].a[half][at + 1]};
          const uint4 v = values[4 * b + eight];
          mma_m16n8k16<T>(block_sums[b], a, i ? v.z : v.x, i ? v.w : v.y);
        }
      }
    }
    PairScales scales, minima{};
    scales.load(band + F::kBandScales, t, g);
    float2 of_blocks[kTokens] = {};
    if constexpr (F::kMinimum) {
      minima.load(band + F::kBandMinima, t, g);
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        of_blocks[token] = *reinterpret_cast<const float2*>(sums_of(slot, min(token, p.tokens - 1)) + 2 * t);
      }
    }
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float2 scale = scales.of(b);
      add_block<false, Factors::kNone>(sums, block_sums[b], scale, {}, {});
      if constexpr (F::kMinimum) {
        const float2 middle = middles<F>(scale, minima.of(b));
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = fmaf(i < 2 ? middle.x : middle.y, b ? of_blocks[i % 2].y : of_blocks[i % 2].x, sums[i]);
      }
    }
  }

  // Adds the sums of a quad's lanes: every lane then has the sums of all blocks.
  __device__ static void add_up_quad(float (&sums)[4]) {
#pragma unroll
    for (float& sum : sums) {
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
    }
  }
};

} // namespace scaled_mm::gguf
