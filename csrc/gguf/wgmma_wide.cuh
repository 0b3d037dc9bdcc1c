// A step of a tile of 32 tokens or more, by wgmma. While the tensor cores multiply one GGUF block, the sums of the block before are scaled and
// added, and the levels of the block after are decoded.
#pragma once

#include <utility>

#include "gguf/levels.cuh"
#include "gguf/output.cuh"
#include "gguf/wgmma_shape.cuh"

namespace scaled_mm::gguf {

template <class F, class T, class S, Factors kFactors>
struct WgmmaWide {
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

  typename S::Storage& s;
  const int lane;
  float (&sums)[kTokens / 8][4]; // of the tile

  float sum[2][kUnitFragment]; // of one block and kUnit tokens each: what is in flight, and what was before it
  Fragments fragments[2];      // of an even and an odd block
  float2 scale[2], minimum[2]; // the same
  const float2* factors[2];    // the same
  PairLevels<Levels<F, kFactors>> levels;
  PairScales scales, minima;

  __device__ __forceinline__ WgmmaWide(typename S::Storage& storage, int lane, float (&sums)[kTokens / 8][4])
      : s(storage), lane(lane), sums(sums), minimum{}, factors{}, minima{} {}

  // Adds a block that has been multiplied.
  __device__ __forceinline__ void add(int which, int block, int unit) {
    if constexpr (kScaled) {
#pragma unroll
      for (int tile = 0; tile < kUnit / 8; ++tile) {
        const float4 factor = load_shared(factors[block] + unit * kUnit + tile * 8 + 2 * (lane % 4));
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
  }

  __device__ __forceinline__ void fence(float (&values)[kUnitFragment]) {
#pragma unroll
    for (int i = 0; i < kUnitFragment; ++i) cute::warpgroup_fence_operand(values[i]);
  }

  __device__ __forceinline__ void load(const uint8_t* band, int pair) {
    levels.load(band, pair, lane);
    scales.load(band + F::kBandScales, pair, lane / 4);
    if constexpr (kHasMinima) minima.load(band + F::kBandMinima, pair, lane / 4);
  }

  __device__ __forceinline__ void decode(int b) {
    fragments[b] = levels.template fragments<T>(b);
#pragma unroll
    for (int j = 0; j < 8; ++j) cute::warpgroup_fence_operand(fragments[b].a[j / 4][j % 4]);
  }

  // Decodes the block after `block` of the run that starts at pair `from`, while `block` is being multiplied. After the last pair of a step
  // that pair's first block is decoded again and not used: a branch would keep the compiler from decoding between instructions. 256 tokens
  // of 8 bits have no registers for it.
  __device__ __forceinline__ void prepare_after(const uint8_t* band, int from, int block) {
    const int pair = from + (block + 1) / 2, last = kTileBlocks / 2 - 1;
    if (block % 2 == 0) return decode(1);
    if (block + 1 < 2 * kTogether || (kAhead && (kTokens <= 128 || F::kBits < 8 || pair <= last))) load(band, min(pair, last)), decode(0);
  }

  __device__ __forceinline__ void release(EmptyBarrier& barrier) { release_stage(barrier, lane, kScaled ? S::kArrivals : 1); }

  // Adds the 256 k of one stage. band: the warp's 16 rows of the weight's tile.
  __device__ __forceinline__ void multiply_step(const uint8_t* band, Stages<S::kValueStages>& values) {
    if constexpr (kAhead) load(band, 0), decode(0);
#pragma unroll 1
    for (int from = 0; from < kTileBlocks / 2; from += kTogether) {
      int done = 0; // the stage of activations before this one
      if constexpr (!kAhead) load(band, from), decode(0);
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
          multiply<T>(sum[now], fragments[b].a[0], x + unit * kUnit * 8, false, Indices{});
          multiply<T>(sum[now], fragments[b].a[1], x + unit * kUnit * 8 + 2, true, Indices{});
          cute::warpgroup_commit_batch();
          // The fragments of the block before are in use until its last unit has been waited for, after the first unit of this block.
          if (kUnits > 1 && unit == kUnits - 1) prepare_after(band, from, block);
          if (number > 0) {
            cute::warpgroup_wait<1>();
            fence(sum[now ^ 1]);
            add(now ^ 1, unit > 0 ? b : b ^ 1, unit > 0 ? unit - 1 : kUnits - 1);
            if (unit == 0 && b == 0) release(s.values_empty[done]);
          }
          if (unit == 0) {
            scale[b] = block_scale;
            if constexpr (kHasMinima) minimum[b] = block_minimum;
            if constexpr (kScaled) factors[b] = block_factors;
          }
          if (kUnits == 1) prepare_after(band, from, block);
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
      release(s.values_empty[done]);
    }
  }
};

} // namespace scaled_mm::gguf
