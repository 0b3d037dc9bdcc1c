// The wgmma kernel: consumer warpgroups first, then a warp or a warpgroup whose first warp is the producer. If weights round and it is a warpgroup,
// its warp 0 loads activations, warp 3 the weight, and, without clusters, warps 1 and 2 store tiles of more than 64 tokens.
#pragma once

#include "gguf/wgmma_cluster.cuh"
#include "gguf/wgmma_loads.cuh"
#include "gguf/wgmma_narrow.cuh"
#include "gguf/wgmma_rounded.cuh"
#include "gguf/wgmma_store.cuh"
#include "gguf/wgmma_wide.cuh"
#include "cutlass/arch/reg_reconfig.h"

namespace scaled_mm::gguf {

template <class F, class T, class S, Factors kFactors>
__global__ void __launch_bounds__(S::kThreads, S::kResident) wgmma_kernel(const __grid_constant__ WgmmaParams p) {
  let_next_kernel_start();
  constexpr int kTokens = S::kTokens, kRows = S::kRows, kStages = S::kStages;
  constexpr int kPerTile = S::kPerTile, kValueStages = S::kValueStages, kConsumers = S::kConsumers;
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<typename S::Storage*>(kept(memory));
  const int64_t tiles_n = (int64_t(p.output.N) + kTileRows - 1) / kTileRows;
  const int tiles_k = p.shares.steps;

  const WgmmaLoads<F, S, kFactors> load{p, s, tiles_n, tiles_k};
  const auto cluster = Cluster<S>::current();
  const int block = int(blockIdx.x) / cluster.blocks, blocks = int(gridDim.x) / cluster.blocks; // clusters, whose thread blocks have the same tiles
  const Part whole = cluster.part_of(0, tiles_k);
  const auto begin = [&] { return S::kDeals ? Work::begin(p.shares, block) : Work{block}; };
  const auto advance = [&](Work& work) { return S::kDeals && work.advance(p.shares, block, blocks); };
  const auto is_whole = [&](Work work) { return !S::kDeals || S::kClusters || work.whole(); };
  const auto part_of = [&](Work work) { return is_whole(work) ? Part{work.at, whole.begin, whole.count} : s.share[work]; };

  constexpr bool kStoresBoxes = kFactors == Factors::kRounded && BoxStore<S>::kPossible;
  if (threadIdx.x == kConsumers) {
    if constexpr (S::kDeals) s.share.fill(p.shares, block);
    cluster.init(s);
    for (int i = 0; i < kStages; ++i) s.tiles_full[i].init(1), s.tiles_empty[i].init(kConsumers / 32 * S::kArrivals);
    for (int i = 0; i < kValueStages; ++i) s.values_full[i].init(1), s.values_empty[i].init(kConsumers / 32 * S::template kValueArrivals<kFactors>);
    cutlass::arch::fence_barrier_init();
    cutlass::arch::fence_view_async_shared();
    if (p.early_weights) {
      const Part first = part_of(begin());
      const int row_tile = p.output_tiles.place_of(first.tile).row_tile;
      for (int i = 0; i < min(first.count, kStages); ++i) load.tiles(row_tile, first.begin + i, i);
    }
  }
  cluster.sync();

  if (threadIdx.x >= kConsumers) {
    if constexpr (S::kReconfigure) cutlass::arch::warpgroup_reg_dealloc<S::kLoading>();
    // What one thread loads: tiles of the weight, activations, or both.
    const auto load_all = [&](auto of_weight, auto of_values) {
      const int early = p.early_weights ? min(part_of(begin()).count, kStages) : 0;
      wait_for_preceding_kernel();
      Stages<kStages> tiles;
      Stages<kValueStages> values;
      int loaded = 0; // steps
      Work work = begin();
      do {
        const Part part = part_of(work);
        const OutputTiles::Place at = p.output_tiles.place_of(part.tile);
        const int parts = load.parts_of(at.token_tile);
        for (int step = part.begin; step < part.begin + part.count; ++step, ++loaded, tiles.advance()) {
          if constexpr (of_weight.value) {
            if (loaded >= kStages) s.tiles_empty[tiles.stage].wait(tiles.phase ^ 1);
            if (loaded >= early) load.tiles(at.row_tile, step, tiles.stage);
            load.sums(at.token_tile, step, tiles.stage);
          }
          if constexpr (of_values.value) {
            const int stages = S::kSkips && step + 1 == tiles_k ? p.last_pairs : kPerTile;
            for (int i = 0; i < kPerTile; ++i, values.advance()) {
              if (loaded * kPerTile + i >= kValueStages) s.values_empty[values.stage].wait(values.phase ^ 1);
              i < stages ? load.values(at.token_tile, parts, step, i, values.stage) : s.values_full[values.stage].arrive();
            }
          }
        }
      } while (advance(work));
    };
    constexpr bool kApart = S::kReconfigure && kFactors == Factors::kRounded; // one warp for the weight, one for activations
    const int helper = int(threadIdx.x) / 32 - kConsumers / 32;               // which of these warps
    // By elect.sync the compiler knows that it is one thread. After a comparison with threadIdx it makes a loop of each copy, which delays the loads
    // (docs/decisions/0027).
    if (helper == 0) {
      if (cute::elect_one_sync()) load_all(std::bool_constant<!kApart>{}, std::true_type{});
    } else if (kApart && helper == 3) {
      if (cute::elect_one_sync()) load_all(std::true_type{}, std::false_type{});
    } else if constexpr (kStoresBoxes) {
      const int group = helper - 1;
      wait_for_preceding_kernel();
      if (p.stores_boxes) BoxStore<S>{p, s, group, int(threadIdx.x) % 32}.copy(tiles_k);
    }
  } else {
    if constexpr (S::kReconfigure) cutlass::arch::warpgroup_reg_alloc<S::kMultiplying>();
    const int group = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
    const int g = lane / 4, t = lane % 4;
    wait_for_preceding_kernel();
    float sums[kTokens / 8][4];
    Stages<kStages> tiles;
    Stages<kValueStages> values;
    Work work = begin();
    int before = 0; // tiles, if S::kClusters
    const auto clear = [&] {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sums[i / 4][i % 4] = 0.0f;
    };
    do {
      const int left = is_whole(work) ? whole.count : load_shared(&s.share[work].count);
      const bool stores_boxes = kStoresBoxes && p.stores_boxes && is_whole(work);
      float bias[2] = {-0.0f, -0.0f};
      OutputTiles::Place at{};
      if constexpr (kFactors == Factors::kRounded) {
        if (left > 0) {
          const bool ends = (is_whole(work) ? whole.begin : load_shared(&s.share[work].begin)) + left == tiles_k;
          const bool partial = S::kSkips && p.last_pairs < kPerTile && ends;
          clear();
          const auto ending = [&] {
            if (!stores_boxes) return;
            at = p.output_tiles.place_of(work.at);
            const int row = at.row_tile * kRows + group * kTileRows + warp * 16 + g;
            if (p.output.bias) bias[0] = p.output.bias_of(row), bias[1] = p.output.bias_of(row + 8);
          };
          multiply_rounded<F, T, S>(s, left, partial ? p.last_pairs : kPerTile, tiles, values, sums, [&] { return stores_boxes; }, ending);
        } else {
          clear();
        }
      } else if constexpr (S::kWide) {
        clear();
        multiply_wide<F, T, S, kFactors>(s, left, tiles, values, sums);
      } else {
        clear();
        multiply_narrow<F, T, S, kFactors>(s, left, tiles, values, sums);
      }
      if (stores_boxes) {
        if constexpr (kStoresBoxes) BoxStore<S>{p, s, group, lane}.write(values.stage, warp, at, bias, sums);
      } else if constexpr (S::kClusters) {
        at = p.output_tiles.place_of(work.at);
        const int row = at.row_tile * kRows + group * kTileRows + warp * 16 + g;
        cluster.add_and_store(p.output, at.token_tile * kTokens + 2 * t, row, s, sums, before++, work.at + blocks < p.shares.whole);
      } else if (is_whole(work)) {
        at = p.output_tiles.place_of(work.at);
        const int row = at.row_tile * kRows + group * kTileRows + warp * 16 + g, token = at.token_tile * kTokens + 2 * t;
        bias[0] = p.output.bias_of(row), bias[1] = p.output.bias_of(row + 8);
        constexpr int kStored = S::kDeals ? kTokens / 8 : 1; // at a time; a kernel without registers for kDeals has none for all at once either
#pragma unroll
        for (int i = 0; i < kTokens / 8; i += kStored) p.output.store_fragments<kStored>(token + 8 * i, row, sums + i, bias);
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
