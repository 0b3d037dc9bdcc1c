// The grouped variant of the generic kernel: any strides and alignment of a, b and out, any K.
#pragma once

#include "int8/generic/gemm.cuh"
#include "int8/grouped/launch.cuh"

namespace scaled_mm::grouped {

struct GenericProblem {
  Experts experts;
  ExpertStrides strides;
  generic::Problem all; // of expert 0, as if all tokens were its
};

template <int kTileM, int kTileN, int kTileK, class Out>
__global__ void __launch_bounds__(generic::kThreads) generic_kernel(const __grid_constant__ GenericProblem p) {
  const int tiles_n = p.all.tiles_n;
  Out* const out = static_cast<Out*>(p.all.out);
  TileWalk<kTileM> walk(p.experts, tiles_n);
  for (int number = int(blockIdx.x); walk.find(number); number += int(gridDim.x)) {
    generic::Problem own = p.all;
    own.a.data += walk.begin * own.a.stride_row;
    own.a.rows = walk.rows;
    own.b.data += walk.expert * p.strides.b;
    own.out = out + walk.begin * own.out_stride_m;
    own.epilogue = operands_of_expert(own.epilogue, p.strides, walk.expert, walk.begin);
    // Down M first: consecutive tiles share columns of b, which L2 then has.
    const int tiles_m = (walk.rows + kTileM - 1) / kTileM;
    generic::multiply_tile<kTileM, kTileN, kTileK, Out>(own, 0, int64_t(walk.in_expert % tiles_m) * kTileM,
                                                        int64_t(walk.in_expert / tiles_m) * kTileN);
  }
  clear_rows(out, p.all.out_stride_m, p.all.out_stride_n, walk.rows_end(), p.experts.zeroed, int(p.all.b.rows), int(blockDim.x));
}

template <int kTileM, int kTileN, int kTileK, class Out>
struct Generic {
  static PersistentKernel& kernel() {
    static PersistentKernel one(&generic_kernel<kTileM, kTileN, kTileK, Out>, generic::kThreads, 0);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) { return kernel().prepare(device, message, size); }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    GenericProblem p{experts_of(l), expert_strides(l), generic::problem_of(l, kTileN)};
    // Unless b_stride is a multiple of 16, the weights of most experts are not aligned.
    if (p.all.access_b == generic::Access::kAligned && l.groups->b_stride % 16 != 0) p.all.access_b = generic::Access::kContiguous;
    return kernel().launch(l, kTileM, kTileN, &p, message, size);
  }

  static constexpr Kernel entry(const char* row) { return {row, DtypeOf<Out>::value, int32_t((kTileM + kTileN) * (kTileK + 16)), &prepare, &launch}; }
};

} // namespace scaled_mm::grouped
