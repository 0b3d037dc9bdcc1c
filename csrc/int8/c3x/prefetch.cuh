// A kernel that asks L2 for the first weights of its tile before the preceding kernel of the stream has ended.
//
// The weights rarely come from that kernel, and where they do the prefetch is harmless: L2 is where all blocks meet, so what the
// other kernel writes later replaces what was fetched. Reading them into shared memory that early would not be safe.
#pragma once

#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "int8/c3x/grid_dependency.cuh"

namespace scaled_mm::c3x {

// kWeightsFirst: the weights are the MMA's first operand. kBytes: of each of the tile's rows of weights.
template <class Base, bool kPersistent, bool kWeightsFirst, int kBytes>
struct PrefetchingKernel : Base {
  using Params = typename Base::Params;

  CUTLASS_DEVICE void operator()(Params const& params, char* shared) {
    let_next_kernel_start();
    constexpr unsigned kIdleWarp = 1; // of the producer's warpgroup, in all three schedules
    if constexpr (kBytes > 0) {
      if (threadIdx.x == kIdleWarp * cutlass::NumThreadsPerWarp && !params.mainloop.early_weights) prefetch(params);
    }
    Base::operator()(params, shared);
  }

private:
  CUTLASS_DEVICE static void prefetch(Params const& params) {
    using namespace cute;
    int first = blockIdx.x, second = blockIdx.y, batch = blockIdx.z;
    if constexpr (kPersistent) {
      typename Base::TileScheduler scheduler{params.scheduler};
      const auto tile = scheduler.initial_work_tile_info(typename Base::ClusterShape{});
      if (!tile.is_valid()) return;
      first = tile.M_idx;
      second = tile.N_idx;
      batch = tile.L_idx;
    }
    const auto problem = append<4>(params.problem_shape, Int<1>{});
    const auto operands = typename Base::CollectiveMainloop{}.load_init(problem, params.mainloop);
    const dim3 block = cute::block_id_in_cluster();
    if constexpr (kWeightsFirst) {
      prefetch_rows(params.mainloop.tma_load_a, get<0>(operands), first, batch, block.y);
    } else {
      prefetch_rows(params.mainloop.tma_load_b, get<1>(operands), second, batch, block.x);
    }
  }

  // operand: the tensor map's coordinates, (rows of a tile, K of a tile, tiles along the rows, tiles along K, batch).
  template <class Tma, class Operand>
  CUTLASS_DEVICE static void prefetch_rows(Tma const& tma, Operand const& operand, int tile, int batch, unsigned part) {
    using namespace cute;
    constexpr int kTiles = kBytes / size<2>(typename Base::TileShape{});
    const auto mine = tma.get_slice(part).partition_S(operand(_, _, tile, _, batch));
    const int tiles = cute::min(kTiles, int(size<3>(operand)));
    for (int k = 0; k < tiles; ++k) cute::prefetch(tma, mine(_, _, _, k));
  }
};

} // namespace scaled_mm::c3x
