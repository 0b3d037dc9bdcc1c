// The grouped variants of the mma.sync kernels of block-scaled products: one launch, whose thread blocks go from tile to tile of all experts.
#pragma once

#include "int8/block_scaled/c2x_tile.cuh"
#include "int8/block_scaled/generic.cuh"
#include "int8/grouped/launch.cuh"

namespace scaled_mm::block_scaled {

using grouped::Experts;
using grouped::ExpertStrides;
using grouped::TileWalk;

// The scales with rows and experts counted from those of one expert.
__device__ inline Scales scales_of_expert(Scales scales, const ExpertStrides& strides, int expert, int begin) {
  scales.a += begin * scales.a_stride_m;
  scales.b += expert * strides.b_scale;
  return scales;
}

// Problem: of expert 0, as if all tokens were its.
template <class Problem>
struct GroupedProblem {
  Experts experts;
  ExpertStrides strides; // b_scale: of the matrices of scales
  Problem all;
};

// ---- aligned operands -------------------------------------------------------------------------------------------------------------------

// shared: Shape::kSharedMemory bytes on 128. block, blocks: of the grid.
template <class Shape>
__device__ inline void compute_grouped_tiles(const GroupedProblem<TileProblem>& p, int block, int blocks, int thread, unsigned char* shared) {
  using Out = typename Shape::Out;
  Out* const out = static_cast<Out*>(p.all.out);
  TileWalk<Shape::kTileM> walk(p.experts, p.all.tiles_n);
  for (int number = block; walk.find(number); number += blocks) {
    TileProblem own = p.all;
    own.a.data += walk.begin * own.a.stride;
    own.a.count = walk.rows;
    own.b.data += walk.expert * p.strides.b;
    own.tiles_m = (walk.rows + Shape::kTileM - 1) / Shape::kTileM;
    own.scales = scales_of_expert(own.scales, p.strides, walk.expert, walk.begin);
    own.epilogue = grouped::operands_of_expert(own.epilogue, p.strides, walk.expert, walk.begin);
    own.out = out + walk.begin * own.out_stride;
    __syncthreads(); // shared memory still holds the finished tile before
    compute_tile<Shape>(own, walk.in_expert, thread, shared);
  }
  grouped::clear_rows(out, p.all.out_stride, 1, walk.rows_end(), p.experts.zeroed, int(p.all.b.count), int(blockDim.x));
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) grouped_tile_kernel(const __grid_constant__ GroupedProblem<TileProblem> p) {
  extern __shared__ __align__(128) unsigned char shared[];
  compute_grouped_tiles<Shape>(p, int(blockIdx.x), int(gridDim.x), int(threadIdx.x), shared);
}

template <int kTileM, int kTileN, int kWarpM, int kWarpN, int kStages, int kSwizzle, class Out>
struct GroupedC2x {
  using Shape = TileShape<kTileM, kTileN, kWarpM, kWarpN, kStages, kSwizzle, Out>;
  static constexpr int kSharedMemory = Shape::kSharedMemory;

  static grouped::PersistentKernel& kernel() {
    static grouped::PersistentKernel one(&grouped_tile_kernel<Shape>, Shape::kThreads, kSharedMemory);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) { return kernel().prepare(device, message, size); }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    GroupedProblem<TileProblem> p{grouped::experts_of(l), grouped::expert_strides(l), tile_problem<kTileM, kTileN>(l)};
    return kernel().launch(l, kTileM, kTileN, &p, message, size);
  }

  static constexpr Kernel entry(const char* row) { return {row, DtypeOf<Out>::value, kSharedMemory, &prepare, &launch}; }
};

// ---- any operands -----------------------------------------------------------------------------------------------------------------------

// shared: kGenericBytes on 16.
template <int kTileM, int kTileN, class Out>
__device__ inline void compute_grouped_generic_tiles(const GroupedProblem<GenericProblem>& p, int block, int blocks, unsigned char* shared) {
  Out* const out = static_cast<Out*>(p.all.out);
  TileWalk<kTileM> walk(p.experts, p.all.tiles_n);
  for (int number = block; walk.find(number); number += blocks) {
    GenericProblem own = p.all;
    own.a.data += walk.begin * own.a.stride_row;
    own.a.rows = walk.rows;
    own.b.data += walk.expert * p.strides.b;
    own.scales = scales_of_expert(own.scales, p.strides, walk.expert, walk.begin);
    own.epilogue = grouped::operands_of_expert(own.epilogue, p.strides, walk.expert, walk.begin);
    own.out = out + walk.begin * own.out_stride_m;
    compute_generic_tile<kTileM, kTileN, Out>(own, walk.in_expert, shared);
  }
  grouped::clear_rows(out, p.all.out_stride_m, p.all.out_stride_n, walk.rows_end(), p.experts.zeroed, int(p.all.b.rows), int(blockDim.x));
}

template <int kTileM, int kTileN, class Out>
__global__ void __launch_bounds__(kGenericThreads, 1) grouped_generic_kernel(const __grid_constant__ GroupedProblem<GenericProblem> p) {
  __shared__ alignas(16) unsigned char shared[kGenericBytes<kTileM, kTileN>];
  compute_grouped_generic_tiles<kTileM, kTileN, Out>(p, int(blockIdx.x), int(gridDim.x), shared);
}

template <int kTileN>
GroupedProblem<GenericProblem> grouped_generic_problem(const GemmLaunch& l) {
  GroupedProblem<GenericProblem> p{grouped::experts_of(l), grouped::expert_strides(l), generic_problem<kTileN>(l)};
  // Unless b_stride is a multiple of 16, the weights of most experts are not aligned.
  if (p.all.access_b == generic::Access::kAligned && l.groups->b_stride % 16 != 0) p.all.access_b = generic::Access::kContiguous;
  return p;
}

template <int kTileM, int kTileN, class Out>
struct GroupedGeneric {
  static grouped::PersistentKernel& kernel() {
    static grouped::PersistentKernel one(&grouped_generic_kernel<kTileM, kTileN, Out>, kGenericThreads, 0);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) { return kernel().prepare(device, message, size); }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    GroupedProblem<GenericProblem> p = grouped_generic_problem<kTileN>(l);
    return kernel().launch(l, kTileM, kTileN, &p, message, size);
  }

  static constexpr Kernel entry(const char* row) { return {row, DtypeOf<Out>::value, kGenericBytes<kTileM, kTileN>, &prepare, &launch}; }
};

} // namespace scaled_mm::block_scaled
