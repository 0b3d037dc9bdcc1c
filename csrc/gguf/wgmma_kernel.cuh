// The wgmma kernel: a producer thread loads, consumer warps multiply and store. Consumer warpgroups come first; the producer is the first thread
// of the warp or warpgroup after them.
#pragma once

#include "gguf/levels.cuh"
#include "gguf/output.cuh"
#include "gguf/wgmma_loads.cuh"
#include "gguf/wgmma_narrow.cuh"
#include "gguf/wgmma_wide.cuh"
#include "cutlass/arch/reg_reconfig.h"

namespace scaled_mm::gguf {

// The tiles, and parts of tiles, of one thread block.
template <class S>
struct WgmmaWork {
  const WgmmaParams& p;
  typename S::Storage& s;
  int tiles_k;

  __device__ Work begin() const { return S::kDeals ? Work::begin(p.shares, int(blockIdx.x)) : Work{int(blockIdx.x)}; }
  __device__ bool advance(Work& work) const { return S::kDeals && work.advance(p.shares, int(blockIdx.x), int(gridDim.x)); }
  __device__ bool is_whole(Work work) const { return !S::kDeals || work.whole(); }
  __device__ Part part_of(Work work) const { return is_whole(work) ? Part{work.at, 0, tiles_k} : s.share[work]; }
};

// Prepares the barriers. Loads the first stages of a constant weight before the preceding kernel has ended; returns how many.
template <class S, class Loads>
__device__ __forceinline__ int begin_loading(const WgmmaParams& p, typename S::Storage& s, const Loads& load, const WgmmaWork<S>& works) {
  if constexpr (S::kDeals) s.share.fill(p.shares, int(blockIdx.x));
  const int value_arrivals = S::kConsumers / 32 * (Loads::kScaled ? S::kArrivals : 1);
  for (int i = 0; i < S::kStages; ++i) s.tiles_full[i].init(1), s.tiles_empty[i].init(S::kConsumers / 32 * S::kArrivals);
  for (int i = 0; i < S::kValueStages; ++i) s.values_full[i].init(1), s.values_empty[i].init(value_arrivals);
  cutlass::arch::fence_barrier_init();
  cutlass::arch::fence_view_async_shared();
  if (!p.early_weights) return 0;
  const Part first = works.part_of(works.begin());
  const int early = min(first.count, S::kStages);
  const int row_tile = p.output_tiles.place_of(first.tile).row_tile;
  for (int i = 0; i < early; ++i) load.tiles(row_tile, first.begin + i, i);
  return early;
}

// early: stages of the weight that `begin_loading` has loaded.
template <class S, class Loads>
__device__ __forceinline__ void keep_loading(const WgmmaParams& p, typename S::Storage& s, const Loads& load, const WgmmaWork<S>& works, int early) {
  wait_for_preceding_kernel();
  Stages<S::kStages> tiles;
  Stages<S::kValueStages> values;
  int loaded = 0; // steps
  Work work = works.begin();
  do {
    const Part part = works.part_of(work);
    const OutputTiles::Place at = p.output_tiles.place_of(part.tile);
    for (int step = part.begin; step < part.begin + part.count; ++step, ++loaded, tiles.advance()) {
      if (loaded >= S::kStages) s.tiles_empty[tiles.stage].wait(tiles.phase ^ 1);
      if (loaded >= early) load.tiles(at.row_tile, step, tiles.stage);
      load.sums(at.token_tile, step, tiles.stage);
      for (int box = 0; box < S::kPerTile; ++box, values.advance()) {
        if (loaded * S::kPerTile + box >= S::kValueStages) s.values_empty[values.stage].wait(values.phase ^ 1);
        load.values(at.token_tile, step, box, values.stage);
      }
    }
  } while (works.advance(work));
}

// Multiplies the tiles of a thread block, and stores them or leaves the sums of a part in the workspace.
template <class F, class T, class S, Factors kFactors>
__device__ __forceinline__ void multiply_tiles(const WgmmaParams& p, typename S::Storage& s, const WgmmaWork<S>& works) {
  constexpr int kTokens = S::kTokens;
  const int group = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  const int g = lane / 4, t = lane % 4;
  wait_for_preceding_kernel();
  float sums[kTokens / 8][4];
  Stages<S::kStages> tiles;
  Stages<S::kValueStages> values;
  const auto band_of = [&](int stage) -> const uint8_t* { return s.tiles[stage][group] + warp * F::kBandBytes; };
  const auto add_step_minima = [&](const uint8_t* band, int stage) {
    if constexpr (kFactors == Factors::kSums) {
      const Middles minima = Middles::of<F>(band, lane);
#pragma unroll
      for (int tile = 0; tile < kTokens / 8; ++tile) minima.add(sums[tile], s.sums_of_values[stage][tile * 32 + lane]);
    }
  };
  Work work = works.begin();
  do {
    int left = works.is_whole(work) ? works.tiles_k : load_shared(&s.share[work].count);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sums[i / 4][i % 4] = 0.0f;
    if constexpr (S::kWide) {
      WgmmaWide<F, T, S, kFactors> wide(s, lane, sums);
      for (; left > 0; --left, tiles.advance()) {
        wait(s.tiles_full[tiles.stage], tiles.phase);
        const uint8_t* const band = band_of(tiles.stage);
        wide.multiply_step(band, values);
        add_step_minima(band, tiles.stage);
        release_stage(s.tiles_empty[tiles.stage], lane, S::kArrivals);
      }
    } else {
      for (; left > 0; --left, tiles.advance(), values.advance()) {
        wait(s.tiles_full[tiles.stage], tiles.phase);
        const uint8_t* const band = band_of(tiles.stage);
        wait(s.values_full[values.stage], values.phase);
        multiply_step_narrow<F, T, S, kFactors>(s, band, values.stage, lane, sums);
        add_step_minima(band, tiles.stage);
        release_stage(s.tiles_empty[tiles.stage], lane, 1);
        release_stage(s.values_empty[values.stage], lane, 1);
      }
    }
    if (works.is_whole(work)) {
      const OutputTiles::Place at = p.output_tiles.place_of(work.at);
      const int row = at.row_tile * S::kRows + group * kTileRows + warp * 16 + g, token = at.token_tile * kTokens + 2 * t;
      const float bias[2] = {p.output.bias_of(row), p.output.bias_of(row + 8)};
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) p.output.store_fragment(token + i * 8, row, sums[i], bias);
    } else if (load_shared(&s.share[work].count) > 0) {
      const int64_t at = p.shares.place_of(int(blockIdx.x), load_shared(&s.share[work].tile)) * (kTokens / 8);
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
        p.shares.sums[(at + i) * S::kConsumers + threadIdx.x] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
      }
    }
  } while (works.advance(work));
}

template <class F, class T, class S, Factors kFactors>
__global__ void __launch_bounds__(S::kThreads, S::kResident) wgmma_kernel(const __grid_constant__ WgmmaParams p) {
  let_next_kernel_start();
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<typename S::Storage*>(kept(memory));
  const int64_t tiles_n = (int64_t(p.output.N) + kTileRows - 1) / kTileRows;
  const WgmmaLoads<F, S, kFactors> load{p, s, tiles_n, p.shares.steps};
  const WgmmaWork<S> works{p, s, p.shares.steps};
  const bool loads = threadIdx.x == S::kConsumers;
  const int early = loads ? begin_loading<S>(p, s, load, works) : 0;
  __syncthreads();

  if (threadIdx.x >= S::kConsumers) {
    if constexpr (S::kReconfigure) cutlass::arch::warpgroup_reg_dealloc<S::kLoading>();
    if (loads) keep_loading<S>(p, s, load, works, early);
  } else {
    if constexpr (S::kReconfigure) cutlass::arch::warpgroup_reg_alloc<S::kMultiplying>();
    multiply_tiles<F, T, S, kFactors>(p, s, works);
  }
}

} // namespace scaled_mm::gguf
