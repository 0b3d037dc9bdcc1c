// What a producer thread of the wgmma kernel loads: tiles of the weight and the sums that belong to them, and activations.
#pragma once

#include "gguf/wgmma_shape.cuh"

namespace scaled_mm::gguf {

template <class F, class S, Factors kFactors>
struct WgmmaLoads {
  static constexpr int kTokens = S::kTokens, kGroups = S::kGroups, kBoxes = S::kBoxes, kBoxTokens = S::kBoxTokens;
  static constexpr bool kScaled = kFactors == Factors::kScaled;
  static constexpr int kSumBytes = kFactors == Factors::kSums ? kTokens * kTileBlocks * int(sizeof(float2)) : 0;

  const WgmmaParams& p;
  typename S::Storage& s;
  int64_t tiles_n;
  int tiles_k;

  // step: of a tile's K.
  __device__ void tiles(int row_tile, int step, int stage) const {
    s.tiles_full[stage].arrive_and_expect_tx(kGroups * S::kLoaded + kSumBytes);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      // Beyond the last rows: the last tile again. Its results are not stored.
      const int64_t row = min(int64_t(row_tile) * kGroups + i, tiles_n - 1);
      load_bytes(s.tiles_full[stage], s.tiles[stage][i], p.tiles + (row * tiles_k + step) * F::kTileBytes, S::kLoaded);
    }
  }

  __device__ void sums(int token_tile, int step, int stage) const {
    if constexpr (kFactors == Factors::kSums) {
      const float2* from = p.factors + (int64_t(token_tile) * tiles_k + step) * (kTokens * kTileBlocks);
      load_bytes(s.tiles_full[stage], s.sums_of_values[stage], from, kSumBytes);
    }
  }

  // The number of a tile's boxes, along the tokens, that have a token.
  __device__ int parts_of(int token_tile) const { return (min(kTokens, p.output.M - token_tile * kTokens) + kBoxTokens - 1) / kBoxTokens; }

  // parts: parts_of(token_tile). box: which part of the activations of a step.
  __device__ void values(int token_tile, int parts, int step, int box, int stage) const {
    constexpr int kFactorBytes = kScaled ? kBoxes * 2 * kTokens * int(sizeof(float2)) : 0;
    const int first = token_tile * kTokens;
    s.values_full[stage].arrive_and_expect_tx(kBoxes * parts * (kBoxTokens * 128) + kFactorBytes);
    const int block = step * kTileBlocks + box * kBoxes * 2;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      if (kTokens > kBoxTokens && parts == kTokens / kBoxTokens) { // one copy takes less time to start than several
        load_box(s.values_full[stage], s.values[stage][i], &p.full, block * kBlock + i * 64, first);
        continue;
      }
#pragma unroll
      for (int part = 0; part < kTokens / kBoxTokens; ++part) {
        if (part >= parts) break;
        uint8_t* const to = s.values[stage][i] + part * (kBoxTokens * 128);
        load_box(s.values_full[stage], to, &p.values, block * kBlock + i * 64, first + part * kBoxTokens);
      }
    }
    if constexpr (kScaled) {
      load_bytes(s.values_full[stage], s.factors[stage], p.factors + (int64_t(token_tile) * tiles_k * kTileBlocks + block) * kTokens, kFactorBytes);
    }
  }
};

} // namespace scaled_mm::gguf
