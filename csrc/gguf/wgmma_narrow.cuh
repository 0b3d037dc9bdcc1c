// A tile of few tokens, by mma.sync. wgmma has a higher latency, and so few warps would wait for it block by block.
#pragma once

#include "gguf/wgmma_minima.cuh"

namespace scaled_mm::gguf {

// Adds `left` steps of a tile to a warp's sums.
template <class F, class T, class S, Factors kFactors>
__device__ __forceinline__ void multiply_narrow(typename S::Storage& s, int left, Stages<S::kStages>& tiles, Stages<S::kValueStages>& values,
                                                float (&sums)[S::kTokens / 8][4]) {
  constexpr int kTokens = S::kTokens;
  constexpr bool kScaled = kFactors == Factors::kScaled;
  const int group = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  const int g = lane / 4, t = lane % 4;
  for (; left > 0; --left, tiles.advance(), values.advance()) {
    wait(s.tiles_full[tiles.stage], tiles.phase);
    const uint8_t* band = s.tiles[tiles.stage][group] + warp * F::kBandBytes;
    wait(s.values_full[values.stage], values.phase);
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
          const uint4 x = load_swizzled(&s.values[values.stage][pair][0], tile_n * 8 + lane % 8, b * 4 + lane / 8);
          float sum[4] = {};
          mma_m16n8k16<T>(sum, f.a[0], x.x, x.y);
          mma_m16n8k16<T>(sum, f.a[1], x.z, x.w);
          float4 factor{};
          if constexpr (kScaled) factor = *reinterpret_cast<const float4*>(&s.factors[values.stage][block][tile_n * 8 + 2 * t]);
          add_block<F::kMinimum, kFactors>(sums[tile_n], sum, scales.of(b), F::kMinimum ? minima.of(b) : float2{}, factor);
        }
      }
    }
    add_minima<F, S, kFactors>(s, band, tiles.stage, lane, sums);
    release_stage(s.tiles_empty[tiles.stage], lane, S::kArrivals);
    release_stage(s.values_empty[values.stage], lane, S::kArrivals);
  }
}

} // namespace scaled_mm::gguf
