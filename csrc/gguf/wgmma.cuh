// A block product by wgmma, for Hopper: levels as exact 16-bit numbers in registers, activations in shared memory. Each block of K has
// accumulators of its own, which the scales take to float32 while the next block is being multiplied.
//
// A tile of the output is kRows rows of the weight, 64 to a warpgroup, and kTokens tokens. A thread block has some, and its share of those
// that would not occupy all multiprocessors (shares.cuh). One of its threads loads, ahead into the next tile: tiles of the weight, which
// are one copy each, and what is multiplied with their minima, into one ring of stages, activations into another. Constant weights that
// lie in tiles are asked for before the preceding kernel has ended (docs/decisions/0011).
#pragma once

#include <climits>
#include <cstring>
#include <type_traits>
#include <utility>

#include "gguf/hopper.cuh"
#include "gguf/instructions.cuh"
#include "gguf/levels.cuh"
#include "gguf/output.cuh"
#include "gguf/shares.cuh"
#include "gguf/stage.cuh"
#include "cute/arch/mma_sm90.hpp"
#include "cutlass/arch/reg_reconfig.h"

namespace scaled_mm::gguf {

// ---- the instruction --------------------------------------------------------------------------------------------------------

template <class T, int kTokens>
using Atom = decltype(cute::SM90::GMMA::rs_op_selector<std::conditional_t<std::is_same_v<T, __half>, cute::half_t, cute::bfloat16_t>,
                                                       std::conditional_t<std::is_same_v<T, __half>, cute::half_t, cute::bfloat16_t>, float,
                                                       cute::Shape<cute::_64, cute::Int<kTokens>, cute::_16>, cute::SM90::GMMA::Major::K,
                                                       cute::SM90::GMMA::Major::K>());

// p (+)= a (64 x 16, registers) * b (16 x tokens, shared)
template <class T, size_t... I>
__device__ inline void multiply(float* p, const uint32_t (&a)[4], uint64_t b, bool add, std::index_sequence<I...>) {
  Atom<T, int(sizeof...(I)) * 2>::fma(a[0], a[1], a[2], a[3], b, p[I]..., add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// The matrix descriptor of rows of 64 16-bit values, swizzled by 128 bytes.
__device__ inline uint64_t descriptor_of(const void* rows) {
  const uint32_t address = cute::cast_smem_ptr_to_uint(rows);
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

// ---- the kernel -------------------------------------------------------------------------------------------------------------

struct WgmmaParams {
  CUtensorMap values; // [M, K], boxes of kTokens x 64
  const uint8_t* tiles;
  const float2* factors;
  Output output;
  Shares shares;
  OutputTiles output_tiles;
  bool early_weights;
};

// The shape of a kernel, and its shared memory. kTokens x 64 k of activations are a load, a box; a stage holds kBoxes of them.
template <class F, int kTokens_, int kRows_, int kStages_>
struct WgmmaShape {
  static constexpr int kTokens = kTokens_, kRows = kRows_, kStages = kStages_;
  static constexpr bool kWide = kTokens >= 32; // multiplies by wgmma, else by mma.sync
  static constexpr int kGroups = kRows / kTileRows, kConsumers = kGroups * 128;
  static constexpr int kBoxes = kWide ? 1 : 4, kPerTile = 4 / kBoxes; // stages of activations to a tile of the weight
  // Two groups of 64 rows and many tokens: registers go from the loading warps to the others, which takes four of those.
  static constexpr bool kReconfigure = kWide && kGroups == 2;
  static constexpr int kThreads = kConsumers + (kReconfigure ? 128 : 32);
  // Arrivals of a warp at a barrier of stages that its lanes have read. Of a wide kernel each lane's: racecheck cannot tell that a lane
  // which arrives for all of them does so after the others' loads, for a warp that never diverges has no instruction that says so.
  static constexpr int kArrivals = kWide ? 32 : 1;

  template <int kValueStages>
  struct alignas(1024) StorageOf {
    uint8_t values[kValueStages][kBoxes][kTokens * 128];
    alignas(128) uint8_t tiles[kStages][kGroups][F::kTileBytes];
    union {
      alignas(128) float2 factors[kValueStages][kBoxes * 2][kTokens];                          // Factors::kScaled
      alignas(128) uint4 sums_of_values[F::kMinimum ? kStages : 1][kTokens * kTileBlocks / 2]; // Factors::kSums
    };
    FullBarrier tiles_full[kStages], values_full[kValueStages];
    EmptyBarrier tiles_empty[kStages], values_empty[kValueStages];
    Share share;
  };
  template <class Storage>
  static constexpr int kFitOf = 228 * 1024 / int(sizeof(Storage) + 1024); // thread blocks in a multiprocessor; each keeps 1 KiB for the system
  // Of up to 64 tokens two thread blocks, if few stages make room for both. Minima of 64 take too many registers.
  static constexpr bool kPair = (kTokens == 32 || (kTokens == 64 && !F::kMinimum)) && kGroups == 2 && kStages <= 3 && kFitOf<StorageOf<4>> >= 2;
  static constexpr int kValueStages = !kWide ? kStages : kPair || kTokens > 128 ? 4 : 6;
  using Storage = StorageOf<kValueStages>;
  // Thread blocks that a multiprocessor should hold at once, for many warps hide what each waits for: what its memory holds, or fewer.
  static constexpr int kWanted = kTokens >= 128 ? 1 : !kWide ? 4 : kGroups == 1 ? 3 : kPair ? 2 : 1;
  static constexpr int kFit = kFitOf<Storage>;
  static constexpr int kResident = kWanted < kFit ? kWanted : kFit > 1 ? kFit : 1;
  // Whether a thread block may have several tiles, or parts of them: 256 tokens and minima leave no registers to keep count of them.
  static constexpr bool kDeals = kTokens <= 128 || !F::kMinimum;
  // Of those a GPU is dealt work for: more than two share the same multiprocessor to no use.
  static constexpr int kAtOnce = kResident < 2 ? kResident : 2;
  // Registers that a thread has after reconfiguration: of the loading warps, of the others.
  static constexpr int kLoading = kPair ? 32 : 40, kMultiplying = kPair ? 104 : 232;
};

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

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
inline DriverFunction<EncodeTiled> driver_encode_tiled("cuTensorMapEncodeTiled");

// One row of sm90.yaml's block section and one format of weights.
template <class F, int kTokens, int kRows, int kSplit, int kStages>
struct Wgmma {
  static_assert((kRows == 64 || kRows == 128) && kSplit >= 1 && kSplit <= 16, "the rules of the table");
  // What else computes a row of 256 tokens: tiles of 128, whose kernel has room for factors, and for dealing tiles where there are minima.
  static constexpr bool kFewer = kTokens > 128;
  using Fewer = Wgmma<F, kFewer ? 128 : kTokens, kRows, kSplit, kFewer ? kStages + 1 : kStages>;
  using Shape = WgmmaShape<F, kTokens, kRows, kStages>;
  static constexpr int kSharedMemory = int(sizeof(typename Shape::Storage));
  static_assert(kSharedMemory <= 227 * 1024, "the shared memory of SM90");
  static constexpr Factors kOfFloats = factors_of<F>(Values::kHalf, true);

  template <class T, Factors kFactors>
  static DeviceKernel& device_kernel() {
    static DeviceKernel one(&wgmma_kernel<F, T, Shape, kFactors>);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    if (scaledMMStatus_t status = Fewer::prepare_scaled(device, message, size)) return status;
    if constexpr (!Shape::kDeals) {
      if (scaledMMStatus_t status = Fewer::prepare(device, message, size)) return status;
    }
    if (scaledMMStatus_t status = prepare_kernel(add_shares_kernel(), 0, device, message, size)) return status;
    if (scaledMMStatus_t status = prepare_kernel(device_kernel<__half, kOfFloats>(), kSharedMemory, device, message, size)) return status;
    return prepare_kernel(device_kernel<__nv_bfloat16, kOfFloats>(), kSharedMemory, device, message, size);
  }

  static scaledMMStatus_t prepare_scaled(int32_t device, char* message, size_t size) {
    return prepare_kernel(device_kernel<__half, Factors::kScaled>(), kSharedMemory, device, message, size);
  }

  static int64_t tiles(int64_t M, int64_t N) { return tiles_of(M, kTokens) * tiles_of(N, kRows); }

  static Shares shares_of(int64_t M, int64_t N, int64_t K, int32_t multiprocessors) {
    const int64_t slots = Shape::kDeals ? int64_t(multiprocessors) * Shape::kAtOnce : 0;
    return share_tiles(tiles(M, N), tiles_of(K, kTileK), slots, kSplit, kTokens);
  }

  // Whether Fewer computes a product. Where tiles are not dealt, if more than a twentieth of the multiprocessors would be idle.
  static bool is_for_fewer(int64_t M, int64_t N, const BlockOperands& o, int32_t multiprocessors) {
    if (!kFewer || values_of(o, true) == Values::kQuantized) return kFewer;
    return !Shape::kDeals && multiprocessors > 0 && 20 * tiles(M, N) < 19 * tiles_of(tiles(M, N), multiprocessors) * multiprocessors;
  }

  static int64_t workspace_size(int64_t M, int64_t N, int64_t K, const BlockOperands& o, int32_t multiprocessors) {
    if (is_for_fewer(M, N, o, multiprocessors)) return Fewer::workspace_size(M, N, K, o, multiprocessors);
    const Shares shares = shares_of(M, N, K, multiprocessors);
    const int64_t parts = shares.blocks ? shares.blocks + shares.tiles - 1 : 0;
    return stage_layout<F>(M, N, K, o, kTokens, true).end + parts * (kTokens * kRows * int64_t(sizeof(float)));
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    if (values_of(*l.blocks, true) == Values::kQuantized) return Fewer::run_scaled(l, message, size);
    if constexpr (!Shape::kDeals) {
      if (is_for_fewer(l.M, l.N, *l.blocks, l.multiprocessors)) return Fewer::launch(l, message, size);
    }
    return run(l, message, size, [](Values form) -> DeviceKernel& {
      return form == Values::kBfloat16 ? device_kernel<__nv_bfloat16, kOfFloats>() : device_kernel<__half, kOfFloats>();
    });
  }

  static scaledMMStatus_t run_scaled(const GemmLaunch& l, char* message, size_t size) {
    return run(l, message, size, [](Values) -> DeviceKernel& { return device_kernel<__half, Factors::kScaled>(); });
  }

  // kernel_of(form): of activations in that form.
  template <class KernelOf>
  static scaledMMStatus_t run(const GemmLaunch& l, char* message, size_t size, KernelOf&& kernel_of) {
    const int64_t tiles_m = tiles_of(l.M, kTokens), tiles_n = tiles_of(l.N, kRows);
    if (tiles_n > INT_MAX / tiles_m) {
      snprintf(message, size, "out: expected at most %d tiles of %d tokens and %d rows for this kernel, got %lld tokens and %lld rows", INT_MAX,
               kTokens, kRows, static_cast<long long>(l.M), static_cast<long long>(l.N));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    Staged staged;
    if (scaledMMStatus_t status = stage<F>(l, {kTokens, false, true, true}, &staged, message, size)) return status;
    WgmmaParams p;
    memset(&p, 0, sizeof(p));
    p.tiles = staged.tiles;
    p.factors = staged.factors;
    p.output = output_of(l);
    p.output_tiles = OutputTiles::of(tiles_n, tiles_m);
    p.shares = shares_of(l.M, l.N, l.K, l.multiprocessors);
    p.shares.sums = reinterpret_cast<float4*>(static_cast<uint8_t*>(l.workspace) + stage_layout<F>(l.M, l.N, l.K, *l.blocks, kTokens, true).end);
    p.early_weights = l.constant_b && l.blocks->packed;
    const bool bfloat16 = staged.form == Values::kBfloat16;
    if (l.K > 0) {
      EncodeTiled encode = nullptr;
      CurrentDevice current(l.device);
      if (current.error()) return cuda_failure(current.error(), "cudaSetDevice", message, size);
      if (cudaError_t error = driver_encode_tiled.find(&encode)) return cuda_failure(error, "looking up cuTensorMapEncodeTiled", message, size);
      const cuuint64_t sizes[2] = {cuuint64_t(l.K), cuuint64_t(l.M)}, strides[1] = {cuuint64_t(staged.stride) * 2};
      const cuuint32_t box[2] = {64, kTokens}, one[2] = {1, 1};
      const CUresult result = encode(&p.values, bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                                     const_cast<void*>(staged.values), sizes, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
      if (result != CUDA_SUCCESS) return cuda_failure(static_cast<cudaError_t>(result), "cuTensorMapEncodeTiled", message, size);
    }
    LaunchShape shape;
    shape.grid = dim3(unsigned(p.shares.thread_blocks));
    shape.block = dim3(Shape::kThreads);
    shape.shared_memory = kSharedMemory;
    shape.dependent = true;
    void* params[] = {&p};
    if (scaledMMStatus_t status = launch_kernel(kernel_of(staged.form), shape, params, l, message, size)) return status;
    if (p.shares.blocks == 0) return SCALED_MM_STATUS_SUCCESS;
    return launch_add_shares({p.shares, p.output, p.output_tiles, kTokens}, kRows, l, message, size);
  }

  static Kernel entry(const char* row) {
    Kernel kernel = {row, F::kDtype, kSharedMemory, &prepare, &launch};
    kernel.block_workspace_size = &workspace_size;
    return kernel;
  }
};

} // namespace scaled_mm::gguf
