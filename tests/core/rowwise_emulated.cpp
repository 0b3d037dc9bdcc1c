// The row-wise kernels on gpu.h, as a library: what they do with chunks, lanes, tails and rounding, without a GPU.
#include "warp.h"
#include "rowwise/kernel.cuh"
#include "rowwise/sources.cuh"

using namespace scaled_mm::rowwise;

namespace {

template <class X, class Source, int kThreads, int kHeld>
void run(const Rows& p) {
  const int64_t rows = Group<kThreads>::kRows;
  gpu::shared_size = 0;
  for (int64_t block = 0; block < (p.rows + rows - 1) / rows; ++block) {
    gpu::run_block(Group<kThreads>::kBlock, unsigned(block), true, [&] { kernel<X, Source, kThreads, kHeld>(p); });
  }
}

template <class X, class Source>
int by_length(const Rows& p, int threads, int held) {
  if (threads == 32 && held == 4) return run<X, Source, 32, 4>(p), 0;
  if (threads == 128 && held == 4) return run<X, Source, 128, 4>(p), 0;
  if (threads == 256 && held == 4) return run<X, Source, 256, 4>(p), 0;
  if (threads == 256 && held == 8) return run<X, Source, 256, 8>(p), 0;
  if (threads == 256 && held == 0) return run<X, Source, 256, 0>(p), 0;
  return 1;
}

template <template <class> class Source>
int by_dtype(const Rows& p, int dtype, int threads, int held) {
  if (dtype == SCALED_MM_DTYPE_FLOAT16) return by_length<__half, Source<__half>>(p, threads, held);
  if (dtype == SCALED_MM_DTYPE_BFLOAT16) return by_length<__nv_bfloat16, Source<__nv_bfloat16>>(p, threads, held);
  if (dtype == SCALED_MM_DTYPE_FLOAT32) return by_length<float, Source<float>>(p, threads, held);
  return 1;
}

} // namespace

extern "C" int emulate(const Rows* p, int dtype, int threads, int held) {
  if (p->function == SCALED_MM_QUANTIZE_INT8) return by_dtype<Elements>(*p, dtype, threads, held);
  if (p->function < SCALED_MM_SILU_AND_MUL) return by_dtype<Norm>(*p, dtype, threads, held);
  return by_dtype<Gated>(*p, dtype, threads, held);
}
