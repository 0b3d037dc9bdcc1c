// A main loop with its own loads in two cases: weights while the preceding kernel of the stream still runs, and tiles that reach past an
// operand's end (partial_tile.cuh).
//
// Weights only where the caller promises that they are constant (GemmLaunch::constant_b): what a preceding kernel writes must not be
// read before that kernel has ended. Everything else waits for it: activations, scales, bias, and writing out.
#pragma once

#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "int8/c3x/grid_dependency.cuh"
#include "int8/c3x/partial_tile.cuh"

namespace scaled_mm::c3x {

// Base: one of CUTLASS's TMA main loops, compiled without its own waits. kWeights: which of the MMA's operands they are, 0 or 1.
template <class Base, int kWeights>
struct Loads : Base {
  using Partial0 = PartialTile<Base, 0>;
  using Partial1 = PartialTile<Base, 1>;

  struct Arguments : Base::Arguments {
    bool early_weights;
  };
  struct Params : Base::Params {
    typename Partial0::Params partial_0;
    typename Partial1::Params partial_1;
    bool early_weights;
  };

  template <class Problem>
  static constexpr Params to_underlying_arguments(Problem const& problem, Arguments const& arguments, void* workspace) {
    const auto [M, N, K, L] = problem;
    return {Base::to_underlying_arguments(problem, arguments, workspace), Partial0::params_of(arguments.ptr_A, M, K, L, arguments.dA),
            Partial1::params_of(arguments.ptr_B, N, K, L, arguments.dB), arguments.early_weights};
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    if (params.partial_0.last.is_needed()) cute::prefetch_tma_descriptor(params.partial_0.last.get_tma_descriptor());
    if (params.partial_1.last.is_needed()) cute::prefetch_tma_descriptor(params.partial_1.last.get_tma_descriptor());
  }

  // Called by all lanes of the producer's warp, once for each tile of the block.
  template <class Operands, class Block, class KTile>
  CUTLASS_DEVICE void load(Params const& params, typename Base::MainloopPipeline pipeline, typename Base::PipelineState stage,
                           Operands const& operands, Block const& block, KTile k_tile, int k_tiles, int thread, uint32_t rank_in_cluster,
                           typename Base::TensorStorage& shared) {
    const auto copy_0 = [&] { return copier<0>(params, pipeline, operands, block, rank_in_cluster, shared); };
    const auto copy_1 = [&] { return copier<1>(params, pipeline, operands, block, rank_in_cluster, shared); };
    if (first_tile_) {
      first_tile_ = false;
      const int early = params.early_weights ? cute::min(k_tiles, int(Base::DispatchPolicy::Stages)) : 0;
      const auto for_the_early = [&](auto&& copy, bool acquire) {
        if (cute::elect_one_sync()) {
          auto early_stage = stage;
          auto early_k = k_tile;
          CUTLASS_PRAGMA_NO_UNROLL
          for (int i = 0; i < early; ++i, ++early_stage, ++early_k) {
            if (acquire) pipeline.producer_acquire(early_stage); // the stage's barrier now expects both operands
            copy(early_stage, *early_k);
          }
        }
        __syncwarp();
      };
      if (early > 0) {
        if constexpr (kWeights == 0)
          for_the_early(copy_0(), true);
        else
          for_the_early(copy_1(), true);
      }
      wait_for_preceding_kernel();
      if (early > 0) {
        if constexpr (kWeights == 0)
          for_the_early(copy_1(), false);
        else
          for_the_early(copy_0(), false);
      }
      for (int i = 0; i < early; ++i) ++k_tile;
      stage.advance(early);
      k_tiles -= early;
    }
    if (params.partial_0.tiles.is_whole(cute::get<0>(block)) && params.partial_1.tiles.is_whole(cute::get<1>(block))) {
      Base::load(params, pipeline, stage, operands, block, k_tile, k_tiles, thread, rank_in_cluster, shared);
    } else if (cute::elect_one_sync()) {
      const auto first = copy_0();
      const auto second = copy_1();
      CUTLASS_PRAGMA_NO_UNROLL
      for (; k_tiles > 0; --k_tiles, ++k_tile, ++stage) {
        pipeline.producer_acquire(stage);
        first(stage, *k_tile);
        second(stage, *k_tile);
      }
    }
  }

private:
  bool first_tile_ = true;

  // Returns f(stage, k_tile), which copies this thread block's part of one operand's tile. The caller has acquired the stage.
  template <int kOperand, class Operands, class Block>
  CUTLASS_DEVICE static auto copier(Params const& params, typename Base::MainloopPipeline& pipeline, Operands const& operands, Block const& block,
                                    uint32_t rank_in_cluster, typename Base::TensorStorage& shared) {
    using namespace cute;
    constexpr bool kFirst = kOperand == 0;
    using Partial = PartialTile<Base, kOperand>;
    using Copy = conditional_t<kFirst, typename Base::GmemTiledCopyA, typename Base::GmemTiledCopyB>;
    constexpr bool kMulticast = is_same_v<Copy, SM90_TMA_LOAD_MULTICAST>;
    const auto* const tma = [&] {
      if constexpr (kFirst)
        return &params.tma_load_a;
      else
        return &params.tma_load_b;
    }();
    const auto& partial = [&]() -> typename Partial::Params const& {
      if constexpr (kFirst)
        return params.partial_0;
      else
        return params.partial_1;
    }();
    const auto to_shared = [&] {
      if constexpr (kFirst)
        return make_tensor(make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{});
      else
        return make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{});
    }();
    const Layout<typename Base::DispatchPolicy::ClusterShape> blocks{};
    const uint32_t x = rank_in_cluster % size<0>(blocks), y = rank_in_cluster / size<0>(blocks);
    const int index = kFirst ? y : x, tile = get<kOperand>(block), batch = get<3>(block);
    const auto slice = tma->get_slice(index);
    const auto from = slice.partition_S(get<kOperand>(operands)(_, _, tile, _, batch));
    const auto to = slice.partition_D(to_shared);
    uint16_t receivers = 0; // blocks of the cluster that get the same tile
    if constexpr (kMulticast) {
      for (int i = 0; i < int(kFirst ? size<1>(blocks) : size<0>(blocks)); ++i) {
        receivers |= uint16_t(1) << (kFirst ? blocks(x, i, 0) : blocks(i, y, 0));
      }
    }
    const typename Partial::Part part(partial, tile, index, batch);
    int8_t* const stages = reinterpret_cast<int8_t*>(raw_pointer_cast(to_shared.data()));
    return [=, &pipeline](typename Base::PipelineState const& stage, int k_tile) {
      auto* const barrier = pipeline.producer_get_barrier(stage);
      if (part.is_whole()) {
        copy(tma->with(*barrier, receivers), from(_, _, _, k_tile), to(_, _, _, stage.index()));
      } else {
        part.template load<kMulticast>(reinterpret_cast<uint64_t*>(barrier), stages + stage.index() * Partial::kRows * Partial::kTileK, k_tile,
                                       receivers);
      }
      part.expect_no_more(reinterpret_cast<uint64_t*>(barrier));
    };
  }
};

} // namespace scaled_mm::c3x
