// The kernels around the products of a mixture of experts on gpu.h, as a library, with the parameters that their launchers make.
#include "warp.h"

#include "rowwise/moe_launch.cuh"
#include "rowwise/moe_sort_launch.cuh"
#include "rowwise/topk_softmax_launch.cuh"

using namespace scaled_mm;

namespace {

template <class Kernel, class Params>
void run(Kernel* kernel, const Params& p, int64_t blocks, int threads) {
  gpu::shared_size = 0;
  gpu::grid_dim.x = unsigned(blocks);
  for (int64_t block = 0; block < blocks; ++block) gpu::run_block(threads, unsigned(block), true, [&] { kernel(p); });
}

// call(X()) for a float dtype.
template <class Call>
int by_dtype(int dtype, const Call& call) {
  if (dtype == SCALED_MM_DTYPE_FLOAT16) return call(__half());
  if (dtype == SCALED_MM_DTYPE_BFLOAT16) return call(__nv_bfloat16());
  return dtype == SCALED_MM_DTYPE_FLOAT32 ? call(float()) : -1;
}

} // namespace

// sizes: tokens, choices, experts, mapped (-1: no expert_map), multiprocessors. strides: of topk_ids, two, and of expert_map.
// pointers: topk_ids, expert_map (may be null), order, ends, inverse. Returns the number of thread blocks.
extern "C" int emulate_sort(int wide, const int64_t* sizes, void* const* pointers, const int64_t* strides) {
  MoeOperands o = {};
  o.choices = sizes[1], o.experts = sizes[2], o.mapped = sizes[3], o.wide_ids = wide;
  o.ids = {strides[0], strides[1]}, o.map_stride = strides[2];
  GemmLaunch l = {};
  l.M = sizes[0], l.N = sizes[1], l.multiprocessors = int(sizes[4]), l.moe = &o;
  l.a = pointers[0], l.out = pointers[2];
  l.moe_pointers.expert_map = pointers[1], l.moe_pointers.ends = pointers[3], l.moe_pointers.inverse = pointers[4];
  const rowwise::MoeSort p = rowwise::moe_sort_of(l);
  const int64_t blocks = rowwise::moe_sort_blocks(p);
  run(&rowwise::moe_sort_kernel<1>, p, blocks, rowwise::kMoeThreads);
  return int(blocks);
}

// kernel: -1 quantizes by blocks, else the kernel with kernels[kernel] threads a token. sizes: tokens, choices, K, rows. strides: of x, out and
// out_scale, two each. pointers: x, rows, out, out_scale. Returns whether x and out lie in whole, aligned chunks; -1: the kernel needs that.
extern "C" int emulate_quantize(int dtype, int kernel, const int64_t* sizes, void* const* pointers, const int64_t* strides) {
  MoeOperands o = {};
  o.choices = sizes[1], o.rows = sizes[3], o.block_scales = kernel < 0;
  o.x = {strides[0], strides[1]}, o.out = {strides[2], strides[3]}, o.out_scale = {strides[4], strides[5]};
  GemmLaunch l = {};
  l.M = sizes[0], l.N = sizes[2], l.moe = &o;
  l.a = pointers[0], l.out = pointers[2], l.moe_pointers.rows = pointers[1], l.moe_pointers.out_scale = pointers[3];
  return by_dtype(dtype, [&](auto of) {
    using X = decltype(of);
    if (kernel < 0) {
      const rowwise::MoeBlocks p = rowwise::moe_blocks_of<X>(l);
      const int64_t each = rowwise::kInt8BlockThreads / rowwise::TokenBlock<X>::kAcross;
      run(&rowwise::moe_quantize_block_kernel<X>, p, (p.of.blocks + each - 1) / each, rowwise::kInt8BlockThreads);
      return int(p.of.x.vectors && p.of.out.vectors);
    }
    const rowwise::MoeRows p = rowwise::moe_rows_of<X>(l);
    const bool vectors = p.of.K % rowwise::kChunk == 0 && p.of.x.vectors && p.of.out.vectors;
    const auto by_token = [&](auto* function, int threads, bool needs_vectors) {
      if (needs_vectors && !vectors) return -1;
      const int block = threads == 32 ? 128 : threads, rows = block / threads;
      run(function, p, (l.M + rows - 1) / rows, block);
      return int(vectors);
    };
    switch (kernel) {
    case 0: return by_token(&rowwise::moe_quantize_kernel<X, 32, 4, true>, 32, true);
    case 1: return by_token(&rowwise::moe_quantize_kernel<X, 128, 4, true>, 128, true);
    case 2: return by_token(&rowwise::moe_quantize_kernel<X, 256, 4, true>, 256, true);
    case 3: return by_token(&rowwise::moe_quantize_kernel<X, 256, 8, true>, 256, true);
    case 4: return by_token(&rowwise::moe_quantize_kernel<X, 256, 0, true>, 256, true);
    case 5: return by_token(&rowwise::moe_quantize_kernel<X, 32, 4, false>, 32, false);
    case 6: return by_token(&rowwise::moe_quantize_kernel<X, 256, 4, false>, 256, false);
    case 7: return by_token(&rowwise::moe_quantize_kernel<X, 256, 0, false>, 256, false);
    case 8: return by_token(&rowwise::moe_quantize_kernel<X, 128, 2, true>, 128, true);
    default: return -2;
    }
  });
}

// sizes: tokens, choices, N, rows. strides: of y, topk_weights and out, two each. pointers: y, topk_weights, rows, out.
extern "C" int emulate_combine(int dtype, int weights_dtype, const int64_t* sizes, void* const* pointers, const int64_t* strides) {
  MoeOperands o = {};
  o.choices = sizes[1], o.rows = sizes[3], o.weights_dtype = weights_dtype;
  o.y = {strides[0], strides[1]}, o.weights = {strides[2], strides[3]}, o.out = {strides[4], strides[5]};
  GemmLaunch l = {};
  l.M = sizes[0], l.N = sizes[2], l.moe = &o;
  l.a = pointers[0], l.out = pointers[3], l.moe_pointers.weights = pointers[1], l.moe_pointers.rows = pointers[2];
  return by_dtype(dtype, [&](auto of) {
    using X = decltype(of);
    const rowwise::MoeCombine p = rowwise::moe_combine_of<X>(l);
    const bool vectors = p.K % rowwise::kChunk == 0 && p.y.vectors && p.out.vectors;
    auto* const kernel = vectors ? &rowwise::moe_combine_kernel<X, true> : &rowwise::moe_combine_kernel<X, false>;
    run(kernel, p, p.tokens * p.spans, rowwise::kCombineThreads);
    return int(vectors);
  });
}

// sizes: rows, experts, choices. strides: of logits, weights and ids, two each. pointers: logits, weights, ids. Returns the logits of a lane.
extern "C" int emulate_router(int dtype, int renormalize, const int64_t* sizes, void* const* pointers, const int64_t* strides) {
  MoeOperands o = {};
  o.experts = sizes[1], o.choices = sizes[2], o.renormalize = renormalize;
  o.x = {strides[0], strides[1]}, o.out = {strides[2], strides[3]}, o.ids = {strides[4], strides[5]};
  GemmLaunch l = {};
  l.M = sizes[0], l.N = sizes[1], l.moe = &o;
  l.a = pointers[0], l.out = pointers[1], l.moe_pointers.ids = pointers[2];
  return by_dtype(dtype, [&](auto of) {
    const rowwise::TopkSoftmax p = rowwise::topk_softmax_of(l);
    int held = 0;
    rowwise::TopkSoftmaxKernels<decltype(of)>::choose(p.experts, [&](auto kernel) {
      held = kernel.kCount;
      run(kernel.pointer(), p, rowwise::topk_softmax_blocks(p), rowwise::kTopkThreads);
      return SCALED_MM_STATUS_SUCCESS;
    });
    return held;
  });
}
