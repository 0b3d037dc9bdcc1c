// The wgmma kernel: consumer warpgroups first, then the warp or warpgroup whose first thread is the producer.
#pragma once

#include "gguf/instructions.cuh"
#include "gguf/levels.cuh"
#include "gguf/output.cuh"
#include "gguf/wgmma_shape.cuh"
#include "cutlass/arch/reg_reconfig.h"

namespace scaled_mm::gguf {

template <class F, class T, class S, Factors kFactors>
__global__ void __launch_bounds__(S::kThreads, S::kResident) wgmma_kernel(const __grid_constant__ WgmmaParams p) {
  let_next_kernel_start();
  constexpr int kTokens = S::kTokens, kRows = S::kRows, kStages = S::kStages, kGroups = S::kGroups;
  constexpr int kBoxes = S::kBoxes, kPerTile = S::kPerTile, kValueStages = S::kValueStages, kConsumers = S::kConsumers;
  constexpr bool kScaled = kFactors == Factors::kScaled;
  // Tokens of an instruction: where there are factors more would need too many registers.
  constexpr int kUnit = kScaled || kTokens < 128 ? 32 : 64, kUnits = kTokens / kUnit, kUnitFragment = kUnit / 2;
  constexpr auto kIndices = std::make_index_sequence<kUnitFragment>{};
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<typename S::Storage*>(kept(memory));
  const int64_t tiles_n = (int64_t(p.output.N) + kTileRows - 1) / kTileRows;
  const int tiles_k = p.shares.steps;

  constexpr int kSumBytes = kFactors == Factors::kSums ? kTokens * kTileBlocks * int(sizeof(float2)) : 0;
  // Of step `step` of a tile's K.
  const auto load_tiles = [&](int row_tile, int step, int stage) {
    s.tiles_full[stage].arrive_and_expect_tx(kGroups * F::kTileBytes + kSumBytes);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      // Beyond the last rows: the last tile again, whose results nobody stores.
      const int64_t row = min(int64_t(row_tile) * kGroups + i, tiles_n - 1);
      load_bytes(s.tiles_full[stage], s.tiles[stage][i], p.tiles + (row * tiles_k + step) * F::kTileBytes, F::kTileBytes);
    }
  };
  const auto load_sums = [&](int token_tile, int step, int stage) {
    if constexpr (kFactors == Factors::kSums) {
      const float2* from = p.factors + (int64_t(token_tile) * tiles_k + step) * (kTokens * kTileBlocks);
      load_bytes(s.tiles_full[stage], s.sums_of_values[stage], from, kSumBytes);
    }
  };
  // Part `box` of the activations of a step.
  const auto load_values = [&](int token_tile, int step, int box, int stage) {
    constexpr int kFactorBytes = kScaled ? kBoxes * 2 * kTokens * int(sizeof(float2)) : 0;
    s.values_full[stage].arrive_and_expect_tx(kBoxes * kTokens * 128 + kFactorBytes);
    const int block = step * kTileBlocks + box * kBoxes * 2;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) load_box(s.values_full[stage], s.values[stage][i], &p.values, block * kBlock + i * 64, token_tile * kTokens);
    if constexpr (kScaled) {
      load_bytes(s.values_full[stage], s.factors[stage], p.factors + (int64_t(token_tile) * tiles_k * kTileBlocks + block) * kTokens, kFactorBytes);
    }
  };

  const auto begin = [&] { return S::kDeals ? Work::begin(p.shares, int(blockIdx.x)) : Work{int(blockIdx.x)}; };
  const auto advance = [&](Work& work) { return S::kDeals && work.advance(p.shares, int(blockIdx.x), int(gridDim.x)); };
  const auto is_whole = [&](Work work) { return !S::kDeals || work.whole(); };
  const auto part_of = [&](Work work) { return is_whole(work) ? Part{work.at, 0, tiles_k} : s.share[work]; };

  const bool loads = threadIdx.x == kConsumers;
  int early = 0;
  if (loads) {
    if constexpr (S::kDeals) s.share.fill(p.shares, int(blockIdx.x));
    for (int i = 0; i < kStages; ++i) s.tiles_full[i].init(1), s.tiles_empty[i].init(kConsumers / 32 * S::kArrivals);
    for (int i = 0; i < kValueStages; ++i) s.values_full[i].init(1), s.values_empty[i].init(kConsumers / 32 * (kScaled ? S::kArrivals : 1));
    cutlass::arch::fence_barrier_init();
    cutlass::arch::fence_view_async_shared();
    if (p.early_weights) {
      const Part first = part_of(begin());
      early = min(first.count, kStages);
      const int row_tile = p.output_tiles.place_of(first.tile).row_tile;
      for (int i = 0; i < early; ++i) load_tiles(row_tile, first.begin + i, i);
    }
  }
  __syncthreads();

  if (threadIdx.x >= kConsumers) {
    if constexpr (S::kReconfigure) cutlass::arch::warpgroup_reg_dealloc<S::kLoading>();
    if (loads) {
      wait_for_preceding_kernel();
      Stages<kStages> tiles;
      Stages<kValueStages> values;
      int loaded = 0; // steps
      Work work = begin();
      do {
        const Part part = part_of(work);
        const OutputTiles::Place at = p.output_tiles.place_of(part.tile);
        for (int step = part.begin; step < part.begin + part.count; ++step, ++loaded, tiles.advance()) {
          if (loaded >= kStages) s.tiles_empty[tiles.stage].wait(tiles.phase ^ 1);
          if (loaded >= early) load_tiles(at.row_tile, step, tiles.stage);
          load_sums(at.token_tile, step, tiles.stage);
          for (int box = 0; box < kPerTile; ++box, values.advance()) {
            if (loaded * kPerTile + box >= kValueStages) s.values_empty[values.stage].wait(values.phase ^ 1);
            load_values(at.token_tile, step, box, values.stage);
          }
        }
      } while (advance(work));
    }
  } else {
    if constexpr (S::kReconfigure) cutlass::arch::warpgroup_reg_alloc<S::kMultiplying>();
    const int group = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
    const int g = lane / 4, t = lane % 4;
    wait_for_preceding_kernel();
    float sums[kTokens / 8][4];
    Stages<kStages> tiles;
    Stages<kValueStages> values;
    const auto release = [&](EmptyBarrier& barrier, int arrivals = 1) {
      __syncwarp();
      if (lane < arrivals) arrive(barrier);
    };
    const auto add_step_minima = [&](const uint8_t* band, int stage) {
      if constexpr (kFactors == Factors::kSums) {
        const Middles minima = Middles::of<F>(band, lane);
#pragma unroll
        for (int tile = 0; tile < kTokens / 8; ++tile) minima.add(sums[tile], s.sums_of_values[stage][tile * 32 + lane]);
      }
    };
    Work work = begin();
    do {
      int left = is_whole(work) ? tiles_k : load_shared(&s.share[work].count);
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sums[i / 4][i % 4] = 0.0f;
      if constexpr (!S::kWide) {
        // mma.sync: its latency is less than that of wgmma, whose results so few warps would wait for block by block.
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
          add_step_minima(band, tiles.stage);
          release(s.tiles_empty[tiles.stage]);
          release(s.values_empty[values.stage]);
        }
      } else {
        // What is in flight and what was before it: sums of one block and kUnit tokens each.
        float sum[2][kUnitFragment];
        Fragments fragments[2]; // by block
        float2 scale[2], minimum[2] = {};
        const float2* factors[2] = {};
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
            // One row after the other: its scale is read from the registers once, and a GPU at its limit of power is as fast as it reads little.
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
        const auto fence = [](float(&values)[kUnitFragment]) {
#pragma unroll
          for (int i = 0; i < kUnitFragment; ++i) cute::warpgroup_fence_operand(values[i]);
        };
        // Pairs of blocks between two moments when nothing is in flight: as many as spill no register (tests/jit/test_build_rows.py), of 32
        // tokens as the compiler does not wait after each instruction for.
        constexpr int kTogether = kScaled                     ? 1
                                  : kTokens == 32             ? 2
                                  : kTokens > 128             ? (F::kBits == 8 ? 2 : 1)
                                  : S::kPair && F::kBits == 5 ? 2
                                                              : kTileBlocks / 2;
        // Whether what comes after such a moment, in the same step, is loaded and decoded before it.
        constexpr bool kAhead = !kScaled && kTogether < kTileBlocks / 2;
        PairLevels<Levels<F, kFactors>> levels;
        PairScales scales, minima{};
        const auto load = [&](const uint8_t* band, int pair) {
          levels.load(band, pair, lane);
          scales.load(band + F::kBandScales, pair, g);
          if constexpr (F::kMinimum && kScaled) minima.load(band + F::kBandMinima, pair, g);
        };
        const auto decode = [&](int b) {
          fragments[b] = levels.template fragments<T>(b);
#pragma unroll
          for (int j = 0; j < 8; ++j) cute::warpgroup_fence_operand(fragments[b].a[j / 4][j % 4]);
        };
        for (; left > 0; --left, tiles.advance()) {
          wait(s.tiles_full[tiles.stage], tiles.phase);
          const uint8_t* const band = s.tiles[tiles.stage][group] + warp * F::kBandBytes;
          if constexpr (kAhead) load(band, 0), decode(0);
#pragma unroll 1
          for (int from = 0; from < kTileBlocks / 2; from += kTogether) {
            int done = 0; // the stage of activations before this one
            if constexpr (!kAhead) load(band, from), decode(0);
            // The fragments of the block after `block`, while that is being multiplied. After a step's last pair those of that pair's first block,
            // which nobody uses: a branch would keep the compiler from making fragments between multiply-adds. 256 tokens and 8 bits find no
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
              const float2 block_scale = scales.of(b), block_minimum = F::kMinimum && kScaled ? minima.of(b) : float2{};
              const float2* const block_factors = &s.factors[values.stage][b][0];
#pragma unroll
              for (int unit = 0; unit < kUnits; ++unit) {
                const int number = block * kUnits + unit, now = number % 2;
                fence(sum[now]);
                cute::warpgroup_arrive();
                multiply<T>(sum[now], fragments[b].a[0], x + unit * kUnit * 8, false, kIndices);
                multiply<T>(sum[now], fragments[b].a[1], x + unit * kUnit * 8 + 2, true, kIndices);
                cute::warpgroup_commit_batch();
                // Fragments of the block before are read until its last unit has been waited for, which is after the first of this one.
                if (kUnits > 1 && unit == kUnits - 1) prepare_after(block);
                if (number > 0) { // meanwhile the one before
                  cute::warpgroup_wait<1>();
                  fence(sum[now ^ 1]);
                  add(now ^ 1, unit > 0 ? b : b ^ 1, unit > 0 ? unit - 1 : kUnits - 1);
                  if (unit == 0 && b == 0) release(s.values_empty[done], kScaled ? S::kArrivals : 1);
                }
                if (unit == 0) {
                  scale[b] = block_scale;
                  if constexpr (F::kMinimum && kScaled) minimum[b] = block_minimum;
                  if constexpr (kScaled) factors[b] = block_factors;
                }
                if (kUnits == 1) prepare_after(block);
              }
              if (b == 1) {
                done = values.stage;
                values.advance();
              }
            }
            // Nothing is in flight from one run to the next: the compiler would wait for every instruction then.
            cute::warpgroup_wait<0>();
            fence(sum[1]);
            add(1, 1, kUnits - 1);
            release(s.values_empty[done], kScaled ? S::kArrivals : 1);
          }
          add_step_minima(band, tiles.stage);
          release(s.tiles_empty[tiles.stage], S::kArrivals);
        }
      }
      if (is_whole(work)) {
        const OutputTiles::Place at = p.output_tiles.place_of(work.at);
        const int row = at.row_tile * kRows + group * kTileRows + warp * 16 + g, token = at.token_tile * kTokens + 2 * t;
        const float bias[2] = {p.output.bias_of(row), p.output.bias_of(row + 8)};
#pragma unroll
        for (int i = 0; i < kTokens / 8; ++i) p.output.store_fragment(token + i * 8, row, sums[i], bias);
      } else if (load_shared(&s.share[work].count) > 0) {
        const int64_t at = p.shares.place_of(int(blockIdx.x), load_shared(&s.share[work].tile)) * (kTokens / 8);
#pragma unroll
        for (int i = 0; i < kTokens / 8; ++i) {
          p.shares.sums[(at + i) * kConsumers + threadIdx.x] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        }
      }
    } while (advance(work));
  }
}

} // namespace scaled_mm::gguf
