// A main loop that fills its stages with weights while the preceding kernel of the stream still runs.
//
// Only where the caller promises that the weights are constant (GemmLaunch::constant_b): what a preceding kernel writes must not be
// read before that kernel has ended. Everything else waits for it: activations, scales, bias, and writing out.
#pragma once

#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "int8/c3x/grid_dependency.cuh"

namespace scaled_mm::c3x {

// Base: one of CUTLASS's TMA main loops, compiled without its own waits. kWeights: which of the MMA's operands they are, 0 or 1.
template <class Base, int kWeights>
struct EarlyWeights : Base {
  struct Arguments : Base::Arguments {
    bool early_weights;
  };
  struct Params : Base::Params {
    bool early_weights;
  };

  template <class Problem>
  static constexpr Params to_underlying_arguments(Problem const& problem, Arguments const& arguments, void* workspace) {
    return {Base::to_underlying_arguments(problem, arguments, workspace), arguments.early_weights};
  }

  // Called by all lanes of the producer's warp, once for each tile of the block.
  template <class Operands, class Block, class KTile>
  CUTLASS_DEVICE void load(Params const& params, typename Base::MainloopPipeline pipeline, typename Base::PipelineState stage,
                           Operands const& operands, Block const& block, KTile k_tile, int k_tiles, int thread, uint32_t rank_in_cluster,
                           typename Base::TensorStorage& shared) {
    if (first_tile_) {
      first_tile_ = false;
      const int early = params.early_weights ? cute::min(k_tiles, int(Base::DispatchPolicy::Stages)) : 0;
      const auto copy = [&](auto operand, bool acquire) {
        if (cute::elect_one_sync()) copy_tiles<operand>(params, pipeline, stage, operands, block, k_tile, early, acquire, rank_in_cluster, shared);
        __syncwarp();
      };
      copy(cute::Int<kWeights>{}, true); // a stage's barrier now expects both operands
      wait_for_preceding_kernel();
      copy(cute::Int<1 - kWeights>{}, false);
      for (int i = 0; i < early; ++i) ++k_tile;
      stage.advance(early);
      k_tiles -= early;
    }
    Base::load(params, pipeline, stage, operands, block, k_tile, k_tiles, thread, rank_in_cluster, shared);
  }

private:
  bool first_tile_ = true;

  // One operand of consecutive stages.
  template <int kOperand, class Operands, class Block, class KTile>
  CUTLASS_DEVICE static void copy_tiles(Params const& params, typename Base::MainloopPipeline& pipeline, typename Base::PipelineState stage,
                                        Operands const& operands, Block const& block, KTile k_tile, int count, bool acquire, uint32_t rank_in_cluster,
                                        typename Base::TensorStorage& shared) {
    using namespace cute;
    constexpr bool kFirst = kOperand == 0;
    using Copy = conditional_t<kFirst, typename Base::GmemTiledCopyA, typename Base::GmemTiledCopyB>;
    const auto tma = [&] {
      if constexpr (kFirst)
        return &params.tma_load_a;
      else
        return &params.tma_load_b;
    }();
    const auto to_shared = [&] {
      if constexpr (kFirst)
        return make_tensor(make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{});
      else
        return make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{});
    }();
    const Layout<typename Base::DispatchPolicy::ClusterShape> blocks{};
    const uint32_t x = rank_in_cluster % size<0>(blocks), y = rank_in_cluster / size<0>(blocks);
    const auto slice = tma->get_slice(kFirst ? y : x);
    const auto from = slice.partition_S(get<kOperand>(operands)(_, _, get<kOperand>(block), _, get<3>(block)));
    auto to = slice.partition_D(to_shared);
    uint16_t receivers = 0; // blocks of the cluster that get the same tile
    if constexpr (is_same_v<Copy, SM90_TMA_LOAD_MULTICAST>) {
      for (int i = 0; i < int(kFirst ? size<1>(blocks) : size<0>(blocks)); ++i) {
        receivers |= uint16_t(1) << (kFirst ? blocks(x, i, 0) : blocks(i, y, 0));
      }
    }
    for (int i = 0; i < count; ++i, ++stage, ++k_tile) {
      if (acquire) pipeline.producer_acquire(stage);
      copy(tma->with(*pipeline.producer_get_barrier(stage), receivers), from(_, _, _, *k_tile), to(_, _, _, stage.index()));
    }
  }
};

} // namespace scaled_mm::c3x
