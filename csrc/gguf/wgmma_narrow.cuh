// A step of a tile of few tokens, by mma.sync. wgmma has a higher latency, and so few warps would wait for it block by block.
#pragma once

#include "gguf/levels.cuh"
#include "gguf/output.cuh"
#include "gguf/wgmma_shape.cuh"

namespace scaled_mm::gguf {

// Adds the 256 k of one stage to a warp's sums. band: the warp's 16 rows of the weight's tile.
template <class F, class T, class S, Factors kFactors>
__device__ __forceinline__ void multiply_step_narrow(typename S::Storage& s, const uint8_t* band, int stage, int lane,
                                                     float (&sums)[S::kTokens / 8][4]) {
  constexpr int kTokens = S::kTokens;
  constexpr bool kScaled = kFactors == Factors::kScaled;
  const int g = lane / 4, t = lane % 4;
#pragma unroll kTokens < 16 ? 4 : kScaled ? 1 : 2
  for (int pair = 0; pair < kTileBlocks / 2; ++pair) {
    PairLevels<Levels<F, kFactors>> levels;
    PairScales scales, minima{};
    levels.load(band, pair, lane);
    scales.load(band + F::kBandScales, pair, g);
    if constexpr (F::kMinimum && kScaled) minima.load(band + F::kBandMinima, pair, g);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const Fragments f = levels.template fragments<T>(b);
      const int block = pair * 2 + b;
#pragma unroll
      for (int tile_n = 0; tile_n < kTokens / 8; ++tile_n) {
        const uint4 x = load_swizzled(&s.values[stage][pair][0], tile_n * 8 + lane % 8, b * 4 + lane / 8);
        float sum[4] = {};
        mma_m16n8k16<T>(sum, f.a[0], x.x, x.y);
        mma_m16n8k16<T>(sum, f.a[1], x.z, x.w);
        float4 factor{};
        if constexpr (kScaled) factor = *reinterpret_cast<const float4*>(&s.factors[stage][block][tile_n * 8 + 2 * t]);
        add_block<F::kMinimum, kFactors>(sums[tile_n], sum, scales.of(b), F::kMinimum ? minima.of(b) : float2{}, factor);
      }
    }
  }
}

} // namespace scaled_mm::gguf
