// A tile of 32 tokens or more, by wgmma. While the tensor cores multiply one GGUF block, the sums of the block before are scaled and
// added, and the levels of the block after are decoded.
#pragma once

#include <utility>

#include "gguf/wgmma_minima.cuh"

namespace scaled_mm::gguf {

template <class F, class S, Factors kFactors>
struct WideShape {
  static constexpr int kTokens = S::kTokens;
  static constexpr bool kScaled = kFactors == Factors::kScaled;
  static constexpr bool kHasMinima = F::kMinimum && kScaled;
  // Tokens of one instruction. With factors more than 32 would need too many registers.
  static constexpr int kUnit = kScaled || kTokens < 128 ? 32 : 64, kUnits = kTokens / kUnit, kUnitFragment = kUnit / 2;
  using Indices = std::make_index_sequence<kUnitFragment>;
  // Pairs of blocks in a run; nothing is in flight between runs. As many as spill no register (tests/jit/test_build_rows.py); for 32 tokens
  // as many as keep the compiler from waiting after each instruction.
  static constexpr int kTogether = kScaled                    ? 1
                                   : kTokens == 32            ? 2
                                   : kTokens > 128            ? (F::kBits == 8 ? 2 : 1)
                                   : S::kPair&& F::kBits == 5 ? 2
                                                              : kTileBlocks / 2;
  // Whether the next run of the same step is loaded and decoded before a run ends.
  static constexpr bool kAhead = !kScaled && kTogether < kTileBlocks / 2;
};

// Adds `left` steps of a tile to a warp's sums.
template <class F, class T, class S, Factors kFactors>
__device__ __forceinline__ void multiply_wide(typename S::Storage& s, int left, Stages<S::kStages>& tiles, Stages<S::kValueStages>& values,
                                              float (&sums)[S::kTokens / 8][4]) {
  using Wide = WideShape<F, S, kFactors>;
  constexpr int kTokens = S::kTokens, kUnit = Wide::kUnit, kUnits = Wide::kUnits, kUnitFragment = Wide::kUnitFragment, kTogether = Wide::kTogether;
  constexpr bool kScaled = Wide::kScaled, kHasMinima = Wide::kHasMinima, kAhead = Wide::kAhead;
  const int group = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  const int g = lane / 4, t = lane % 4;
  float sum[2][kUnitFragment];      // of one block and kUnit tokens each: what is in flight, and what was before it
  Fragments fragments[2];           // of an even and an odd block
  float2 scale[2], minimum[2] = {}; // the same
  const float2* factors[2] = {};    // the same
  PairLevels<Levels<F, kFactors>> levels;
  PairScales scales, minima{};

  // Adds a block that has been multiplied.
  const auto add = [&](int which, int block, int unit) {
    if constexpr (kScaled) {
#pragma unroll
      for (int tile = 0; tile < kUnit / 8; ++tile) {
        const float4 factor = load_shared(factors[block] + unit * kUnit + tile * 8 + 2 * t);
        add_block<F::kMinimum, kFactors>(sums[unit * kUnit / 8 + tile], sum[which] + tile * 4, scale[block], minimum[block], factor);
      }
    } else {
      static_assert(kFactors != Factors::kFloats);
      // Row by row: a row's scale is read from its register once. Fewer register reads cost less power, which limits the clock.
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int i = 0; i < kUnitFragment / 2; ++i) {
          float& to = sums[unit * kUnit / 8 + i / 2][row * 2 + i % 2];
          to = fmaf(row ? scale[block].y : scale[block].x, sum[which][i / 2 * 4 + row * 2 + i % 2], to);
        }
      }
    }
  };
  const auto fence = [](float(&of_unit)[kUnitFragment]) {
#pragma unroll
    for (int i = 0; i < kUnitFragment; ++i) cute::warpgroup_fence_operand(of_unit[i]);
  };
  const auto load = [&](const uint8_t* band, int pair) {
    levels.load(band, pair, lane);
    scales.load(band + F::kBandScales, pair, g);
    if constexpr (kHasMinima) minima.load(band + F::kBandMinima, pair, g);
  };
  const auto decode = [&](int b) {
    fragments[b] = levels.template fragments<T>(b);
#pragma unroll
    for (int j = 0; j < 8; ++j) cute::warpgroup_fence_operand(fragments[b].a[j / 4][j % 4]);
  };
  const auto release = [&](int stage) { release_stage(s.values_empty[stage], lane, S::template kValueArrivals<kFactors>); };

  for (; left > 0; --left, tiles.advance()) {
    wait(s.tiles_full[tiles.stage], tiles.phase);
    const uint8_t* const band = s.tiles[tiles.stage][group] + warp * F::kBandBytes;
    if constexpr (kAhead) load(band, 0), decode(0);
#pragma unroll 1
    for (int from = 0; from < kTileBlocks / 2; from += kTogether) {
      int done = 0; // the stage of activations before this one
      if constexpr (!kAhead) load(band, from), decode(0);
      // Decodes the block after `block` of this run, while `block` is being multiplied. After the last pair of a step that pair's first block is
      // decoded again and not used: a branch would keep the compiler from decoding between instructions. 256 tokens of 8 bits have no
      // registers for it.
      const auto prepare_after = [&](int block) {
        const int pair = from + (block + 1) / 2, last = kTileBlocks / 2 - 1;
        if (block % 2 == 0) return decode(1);
        if (block + 1 < 2 * kTogether || (kAhead && (kTokens <= 128 || F::kBits < 8 || pair <= last))) load(band, min(pair, last)), decode(0);
      };
#pragma unroll
      for (int block = 0; block < 2 * kTogether; ++block) {
        const int b = block % 2;
        if (b == 0) wait(s.values_full[values.stage], values.phase);
        const uint64_t x = descriptor_of(s.values[values.stage][0]) + 4 * b;
        const float2 block_scale = scales.of(b), block_minimum = kHasMinima ? minima.of(b) : float2{};
        const float2* const block_factors = &s.factors[values.stage][b][0];
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          const int number = block * kUnits + unit, now = number % 2;
          fence(sum[now]);
          cute::warpgroup_arrive();
          multiply<T>(sum[now], fragments[b].a[0], x + unit * kUnit * 8, false, typename Wide::Indices{});
          multiply<T>(sum[now], fragments[b].a[1], x + unit * kUnit * 8 + 2, true, typename Wide::Indices{});
          cute::warpgroup_commit_batch();
          // The fragments of the block before are in use until its last unit has been waited for, after the first unit of this block.
          if (kUnits > 1 && unit == kUnits - 1) prepare_after(block);
          if (number > 0) {
            cute::warpgroup_wait<1>();
            fence(sum[now ^ 1]);
            add(now ^ 1, unit > 0 ? b : b ^ 1, unit > 0 ? unit - 1 : kUnits - 1);
            if (unit == 0 && b == 0) release(done);
          }
          if (unit == 0) {
            scale[b] = block_scale;
            if constexpr (kHasMinima) minimum[b] = block_minimum;
            if constexpr (kScaled) factors[b] = block_factors;
          }
          if (kUnits == 1) prepare_after(block);
        }
        if (b == 1) {
          done = values.stage;
          values.advance();
        }
      }
      // With an instruction in flight from one run to the next, the compiler would wait for every instruction.
      cute::warpgroup_wait<0>();
      fence(sum[1]);
      add(1, 1, kUnits - 1);
      release(done);
    }
    add_minima<F, S, kFactors>(s, band, tiles.stage, lane, sums);
    release_stage(s.tiles_empty[tiles.stage], lane, S::kArrivals);
  }
}

} // namespace scaled_mm::gguf
