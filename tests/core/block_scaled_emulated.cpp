// The block-scaled kernels on gpu.h, as a library: what they do with indices, fragments, copies and tails, without a GPU.
// The test appends one EMULATE_C2X or EMULATE_GENERIC line for each row of a tile table.
#include "gpu.h"

#include "int8/block_scaled/c2x.cuh"
#include "int8/block_scaled/generic.cuh"

using namespace scaled_mm;

namespace {

template <class Row>
int run_c2x(const GemmLaunch* l, bool eager) {
  using Shape = typename Row::Shape;
  const block_scaled::TileProblem p = block_scaled::tile_problem<Shape::kTileM, Shape::kTileN>(*l);
  gpu::shared_size = Shape::kSharedMemory;
  for (int block = 0; block < p.tiles_m * p.tiles_n; ++block) {
    gpu::run_block(Shape::kThreads, unsigned(block), eager,
                   [&] { block_scaled::compute_tile<Shape>(p, int(blockIdx.x), int(threadIdx.x), gpu::shared_memory); });
  }
  return 0;
}

template <int kTileM, int kTileN, class Out>
int run_generic(const GemmLaunch* l, bool eager) {
  const block_scaled::GenericProblem p = block_scaled::generic_problem<kTileN>(*l);
  gpu::shared_size = block_scaled::kGenericBytes<kTileM, kTileN>;
  const int tiles = p.tiles_n * int((l->M + kTileM - 1) / kTileM);
  for (int block = 0; block < tiles; ++block) {
    gpu::run_block(block_scaled::kGenericThreads, unsigned(block), eager,
                   [&] { block_scaled::compute_generic_tile<kTileM, kTileN, Out>(p, int(blockIdx.x), gpu::shared_memory); });
  }
  return 0;
}

// What the test passes, in the order of its ctypes structure.
struct Product {
  int64_t M, N, K;
  const void *a, *b;
  void* out;
  const float *a_scale, *b_scale;
  const void* bias;
  int64_t a_stride_m, a_stride_k, b_stride_k, b_stride_n, out_stride_m, out_stride_n;
  int64_t a_scale_stride_m, a_scale_stride_k, b_scale_stride_k, b_scale_stride_n, bias_stride;
  int32_t bias_dtype, eager, block_size;
};

GemmLaunch launch_of(const Product& p) {
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
  l.bias_stride = p.bias_stride, l.bias_dtype = p.bias_dtype;
  l.block_size = p.block_size;
  return l;
}

} // namespace

#define EMULATE_C2X(name, ...)                                                                                                                       \
  extern "C" __attribute__((visibility("default"))) int name(const Product* p) {                                                                     \
    const GemmLaunch l = launch_of(*p);                                                                                                              \
    return run_c2x<__VA_ARGS__>(&l, p->eager != 0);                                                                                                  \
  }
#define EMULATE_GENERIC(name, m, n, out)                                                                                                             \
  extern "C" __attribute__((visibility("default"))) int name(const Product* p) {                                                                     \
    const GemmLaunch l = launch_of(*p);                                                                                                              \
    return run_generic<m, n, out>(&l, p->eager != 0);                                                                                                \
  }
