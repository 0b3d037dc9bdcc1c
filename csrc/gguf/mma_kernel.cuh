// The mma.sync kernel. mma.cuh describes it, and holds the host side.
#pragma once

#include <type_traits>

#include "gguf/copies.cuh"
#include "gguf/few.cuh"
#include "gguf/instructions.cuh"
#include "gguf/levels.cuh"
#include "gguf/output.cuh"
#include "gguf/rows.cuh"
#include "gguf/stage.cuh"

namespace scaled_mm::gguf {

struct MmaParams {
  const uint8_t* tiles;
  const uint4* values;   // [tiles of 8 tokens][blocks][lanes]
  const float2* factors; // layout: StageParams
  Output output;
  int32_t tiles_k, strips; // of the weight
  int32_t width, parts;    // strips per thread block, warps that split the K of one strip
  int32_t groups;          // thread blocks that cover all strips
  bool early_weights;
  int32_t inverse_width;   // just above 2^16 / width: multiplication and shift instead of a division
  int32_t steps, one_more; // kHasRows: tiles of K per part, and how many parts have one more
  RowsParams rows;         // kHasRows: instead of values and factors
};

// 16 bytes per lane; volatile, so that the load stays here. Lanes with wanted = false keep their value.
__device__ inline void load_if(bool wanted, uint4& to, const uint4* from) {
  asm volatile("{.reg .pred wanted; setp.ne.u32 wanted, %5, 0; @wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
               : "l"(from), "r"(uint32_t(wanted)));
}

template <class F, class T, int kTokens, int kBands, int kWarps, int kStages, Factors kFactors, Activations kActivations>
__global__ void __launch_bounds__(32 * kWarps, 1) mma_kernel(const __grid_constant__ MmaParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  let_next_kernel_start();
#endif
  constexpr bool kSums = kFactors == Factors::kSums;
  constexpr bool kByBlock = kFactors == Factors::kScaled || kFactors == Factors::kFloats;
  constexpr bool kFew = kActivations == Activations::kFew, kHasRows = kFew || kActivations == Activations::kRows;
  constexpr int kTiles = kFew ? 1 : kTokens / 8, kRows = kBands * kBandRows, kStageBytes = kBands * F::kBandBytes;
  extern __shared__ __align__(128) uint8_t memory[];
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  // No division for few tokens: it would delay the first load.
  const int token_tile = int(gridDim.x) == p.groups ? 0 : int(blockIdx.x) / p.groups, group = int(blockIdx.x) - token_tile * p.groups;
  const int part = warp * p.inverse_width >> 16, place = warp - part * p.width, strip = group * p.width + place;
  uint8_t* const stages = memory + warp * kStages * kStageBytes;
  const bool works = part < p.parts && strip < p.strips;
  float sums[kBands][kTiles][4] = {};
  // The first step of a part. kHasRows avoids the division, which would delay the first load. Other kernels divide, because they have no registers
  // for `steps` and `one_more`. K is an int, so the product does not overflow.
  const auto first_step = [&](int part) { return kHasRows ? part * p.steps + min(part, p.one_more) : p.tiles_k * part / p.parts; };
  const int begin = first_step(part), count = works ? first_step(part + 1) - begin : 0;
  constexpr int kStrips = kTileRows / kRows; // of a tile
  const uint8_t* const strips = p.tiles + (int64_t(strip / kStrips) * p.tiles_k + begin) * F::kTileBytes + strip % kStrips * kStageBytes;
  const uint8_t* next = strips + lane * 16; // of the next step to load
  int left = count;                         // steps not loaded yet
  const auto load = [&](int stage) {
    if (kStages > 1 && left > 0) {
      uint8_t* to = stages + stage * kStageBytes;
#pragma unroll
      for (int i = 0; i < (kStageBytes + 511) / 512; ++i) {
        if ((i + 1) * 512 <= kStageBytes || i * 512 + lane * 16 < kStageBytes) {
          copy_async(to + (kFew ? Few<F>::place(i, lane) : i * 512 + lane * 16), next + i * 512);
        }
      }
    }
    next += F::kTileBytes;
    --left;
    end_copies();
  };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (!p.early_weights) wait_for_preceding_kernel();
#endif
#pragma unroll
  for (int i = 0; i < (kHasRows ? 1 : kStages - 1); ++i) load(i);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  wait_for_preceding_kernel();
#endif
  std::conditional_t<kFew, Few<F>, Rows> rows{p.rows};
  const int slot_bytes = kHasRows ? Rows::slot_bytes(p.rows.tokens, kSums) : 0;
  uint8_t* slot = memory + kWarps * kStages * kStageBytes + begin * slot_bytes; // of this step
  if constexpr (kHasRows) {
    if (works) {
      const int members = min(p.width, p.strips - group * p.width); // the warps that work on this part of K
      for (int i = place; i < count; i += members) rows.load(slot + i * slot_bytes, begin + i, lane);
      end_copies();
#pragma unroll
      for (int i = 1; i < kStages; ++i) load(i); // weights are in flight while this waits for the activations
      wait_for_copies<kStages - 1>();
      for (int i = place; kSums && i < count; i += members) {
        for (int tile = 0; tile < kTiles; ++tile) rows.template add_up<T>(slot + i * slot_bytes, tile, lane);
      }
      meet(part + 1, members);
    }
  }
  const int64_t blocks = int64_t(p.tiles_k) * kTileBlocks, tile_of_k = int64_t(token_tile) * p.tiles_k + begin;
  const uint4* values = p.values + (int64_t(token_tile) * kTiles * blocks + int64_t(begin) * kTileBlocks) * 32 + lane;
  const float2* factors = kFactors != Factors::kNone ? p.factors + tile_of_k * kTileBlocks * kTokens : nullptr;
  // Activations are loaded kAhead pairs of blocks ahead, as many as fit in registers. With 8 tokens per tile, tokens past M are not loaded.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  constexpr bool kMany = true; // its compiler needs more registers
#else
  constexpr bool kMany = false;
#endif
  constexpr int kAhead = kTokens == 8 ? 4 : kTokens * kBands >= 64 && (kFactors != Factors::kNone || kMany) ? 1 : 2;
  const bool there = kTokens > 8 || token_tile * kTokens + g < p.output.M;
  uint4 x[kHasRows ? 1 : kAhead][2][kTiles] = {};
  int pairs = count * (kTileBlocks / 2); // not loaded yet
  const auto load_values = [&](int pair, uint4(&to)[2][kTiles]) {
    const bool wanted = there && pairs > 0;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) load_if(wanted, to[b][tile], values + (tile * blocks + pair * 2 + b) * 32);
    }
    --pairs;
  };
  if constexpr (!kHasRows) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_values(i, x[i]);
  }
  const uint8_t* from = strips;
  int stage = 0;
  uint4 two[kSums ? kTiles : 1] = {};
  const auto load_sums = [&](bool wanted) {
    if constexpr (kSums && !kHasRows) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) load_if(wanted, two[tile], reinterpret_cast<const uint4*>(factors) + tile * 32 + lane);
      factors += kTileBlocks * kTokens;
    }
  };
  load_sums(count > 0);
  if constexpr (kStages > 1) {
    from = stages;
    if (!kHasRows && count > 0) {
      wait_for_copies<kStages - 2>();
      load(kStages - 1);
    }
  }
  for (int step = 0; step < count; ++step) {
    if constexpr (kFew) {
      rows.template add<T>(sums[0][0], from, slot, lane);
    } else {
      if constexpr (kSums) {
#pragma unroll
        for (int tile = 0; kHasRows && tile < kTiles; ++tile) two[tile] = rows.sums(slot, tile, lane);
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          const Middles minima = Middles::of<F>(from + band * F::kBandBytes, lane);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) minima.add(sums[band][tile], two[tile]);
        }
        load_sums(step + 1 < count);
      }
#pragma unroll 1
      for (int first = 0; first < kTileBlocks / 2; first += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int pair = first + i;
          PairLevels<Levels<F, kFactors>> levels[kBands];
          PairScales scales[kBands], minima[kBands] = {};
#pragma unroll
          for (int band = 0; band < kBands; ++band) {
            const uint8_t* const bytes = from + band * F::kBandBytes;
            levels[band].load(bytes, pair, lane);
            scales[band].load(bytes + F::kBandScales, pair, g);
            if constexpr (F::kMinimum && kByBlock) minima[band].load(bytes + F::kBandMinima, pair, g);
          }
#pragma unroll
          for (int b = 0; b < 2; ++b) {
#pragma unroll
            for (int band = 0; band < kBands; ++band) {
              const Fragments f = levels[band].template fragments<T>(b);
              const float2 scale = scales[band].of(b);
              float2 minimum{};
              if constexpr (F::kMinimum && kByBlock) minimum = minima[band].of(b);
              if constexpr (kFactors == Factors::kFloats) minimum = middles<F>(scale, minimum);
#pragma unroll
              for (int tile = 0; tile < kTiles; ++tile) {
                float sum[4] = {};
                const uint4 v = kHasRows ? rows.operand(slot, pair * 2 + b, tile, lane) : x[kHasRows ? 0 : i][b][tile];
                mma_m16n8k16<T>(sum, f.a[0], v.x, v.y);
                mma_m16n8k16<T>(sum, f.a[1], v.z, v.w);
                float4 factor{};
                if constexpr (kByBlock) {
                  factor = *reinterpret_cast<const float4*>(factors + (pair * 2 + b) * kTokens + tile * 8 + 2 * t);
                }
                add_block<F::kMinimum, kFactors>(sums[band][tile], sum, scale, minimum, factor);
              }
            }
          }
          if constexpr (!kHasRows) load_values(i + kAhead, x[i]);
        }
        values += kAhead * 2 * 32;
      }
    }
    if constexpr (kHasRows) slot += slot_bytes;
    if constexpr (kByBlock) factors += kTileBlocks * kTokens;
    if constexpr (kStages > 1) {
      if (step + 1 < count) {
        wait_for_copies<kStages - 2>();
        load(stage);
        if (++stage == kStages) stage = 0;
        from = stages + stage * kStageBytes;
      }
    } else {
      from += F::kTileBytes;
    }
  }
  // The warps' partial sums reuse the stages' shared memory.
  wait_for_copies<0>();
  __syncthreads();
  auto* const partial = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int band = 0; band < kBands; ++band) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if constexpr (kFew) Few<F>::add_up_quad(sums[band][tile]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (kFew && t > 0) continue;
        const int token = tile * 8 + 2 * t + i % 2, row = band * kBandRows + g + 8 * (i / 2);
        partial[(warp * kTokens + token) * kRows + row] = sums[band][tile][i];
      }
    }
  }
  __syncthreads();
  const int first_row = group * p.width * kRows, first_token = token_tile * kTokens;
  for (int i = int(threadIdx.x); i < p.width * kRows * kTokens; i += int(blockDim.x)) {
    const int row = i % kRows, token = i / kRows % kTokens, of = i / kRows / kTokens;
    float sum = 0.0f;
    for (int other = 0; other < p.parts; ++other) sum += partial[((other * p.width + of) * kTokens + token) * kRows + row];
    const int n = first_row + of * kRows + row;
    p.output.store(first_token + token, n, sum, p.output.bias_of(n));
  }
}

} // namespace scaled_mm::gguf
