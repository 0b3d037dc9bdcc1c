// The grouped block-scaled kernels on gpu.h, as a library: which rows and scales each tile gets, without a GPU.
// The test appends one EMULATE_C2X or EMULATE_GENERIC line for each row of a tile table.
#include "warp.h"
// Shared memory is gpu::shared_memory: the kernels that declare it are not run.
#undef __shared__
#define __shared__

#include <algorithm>
using std::max;
using std::min;

#include "int8/block_scaled/grouped.cuh"

using namespace scaled_mm;

namespace {

// call() on every thread block of a grid of `blocks`.
template <class Call>
int on_grid(int blocks, int threads, bool eager, const Call& call) {
  gpu::grid_dim.x = unsigned(blocks);
  for (int block = 0; block < blocks; ++block) gpu::run_block(threads, unsigned(block), eager, call);
  return 0;
}

template <class Row>
int run_c2x(const GemmLaunch& l, int blocks, bool eager) {
  using Shape = typename Row::Shape;
  const block_scaled::GroupedProblem<block_scaled::TileProblem> p{grouped::experts_of(l), grouped::expert_strides(l),
                                                                  block_scaled::tile_problem<Shape::kTileM, Shape::kTileN>(l)};
  gpu::shared_size = Shape::kSharedMemory;
  return on_grid(blocks, Shape::kThreads, eager,
                 [&] { block_scaled::compute_grouped_tiles<Shape>(p, int(blockIdx.x), blocks, int(threadIdx.x), gpu::shared_memory); });
}

template <int kTileM, int kTileN, class Out>
int run_generic(const GemmLaunch& l, int blocks, bool eager) {
  const block_scaled::GroupedProblem<block_scaled::GenericProblem> p = block_scaled::grouped_generic_problem<kTileN>(l);
  gpu::shared_size = block_scaled::kGenericBytes<kTileM, kTileN>;
  return on_grid(blocks, block_scaled::kGenericThreads, eager,
                 [&] { block_scaled::compute_grouped_generic_tiles<kTileM, kTileN, Out>(p, int(blockIdx.x), blocks, gpu::shared_memory); });
}

// What the test passes, in the order of its ctypes structure.
struct Product {
  int64_t M, N, K, E;
  const void *a, *b;
  void* out;
  const float *a_scale, *b_scale;
  const void* bias;
  const int32_t* expert_offsets;
  int64_t a_stride_m, a_stride_k, b_stride_e, b_stride_k, b_stride_n, out_stride_m, out_stride_n;
  int64_t a_scale_stride_m, a_scale_stride_k, b_scale_stride_e, b_scale_stride_k, b_scale_stride_n, bias_stride_e, bias_stride_n;
  int32_t bias_dtype, blocks, eager, block_size, zero_unassigned;
};

template <class Run>
int launched(const Product& p, const Run& run) {
  const Groups groups = {p.E, p.b_stride_e, p.b_scale_stride_e, p.bias_stride_e, p.zero_unassigned != 0};
  GemmLaunch l = {};
  l.batch = 1;
  l.M = p.M, l.N = p.N, l.K = p.K;
  l.a = p.a, l.b = p.b, l.out = p.out;
  l.a_stride_m = p.a_stride_m, l.a_stride_k = p.a_stride_k;
  l.b_stride_k = p.b_stride_k, l.b_stride_n = p.b_stride_n;
  l.out_stride_m = p.out_stride_m, l.out_stride_n = p.out_stride_n;
  l.a_scale = p.a_scale, l.b_scale = p.b_scale, l.bias = p.bias;
  l.a_scale_stride = p.a_scale_stride_m, l.a_scale_stride_k = p.a_scale_stride_k;
  l.b_scale_stride = p.b_scale_stride_n, l.b_scale_stride_k = p.b_scale_stride_k;
  l.bias_stride = p.bias_stride_n, l.bias_dtype = p.bias_dtype;
  l.block_size = p.block_size;
  l.groups = &groups, l.expert_offsets = p.expert_offsets;
  return run(l);
}

} // namespace

#define EMULATE_C2X(name, ...)                                                                                                                       \
  extern "C" __attribute__((visibility("default"))) int name(const Product* p) {                                                                     \
    return launched(*p, [&](const GemmLaunch& l) { return run_c2x<__VA_ARGS__>(l, p->blocks, p->eager != 0); });                                     \
  }
#define EMULATE_GENERIC(name, m, n, out)                                                                                                             \
  extern "C" __attribute__((visibility("default"))) int name(const Product* p) {                                                                     \
    return launched(*p, [&](const GemmLaunch& l) { return run_generic<m, n, out>(l, p->blocks, p->eager != 0); });                                   \
  }
