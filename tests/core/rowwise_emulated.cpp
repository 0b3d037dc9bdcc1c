// The row-wise kernels on gpu.h, as a library: what they do with chunks, lanes, tails and rounding, without a GPU.
#include "warp.h"
#include "rowwise/launch.cuh"

using namespace scaled_mm::rowwise;

namespace {

template <int kThreads, class Kernel>
void run(Kernel* kernel, Rows p, int spans) {
  p.spans = spans;
  gpu::shared_size = 0;
  for (int64_t block = 0; block < (p.rows + Group<kThreads>::kRows - 1) / Group<kThreads>::kRows * spans; ++block) {
    gpu::run_block(Group<kThreads>::kBlock, unsigned(block), true, [&] { kernel(p); });
  }
}

template <class Source, int kThreads, int kHeld, bool kVectors>
int run_rows(const Rows& p) {
  return run<kThreads>(&row_kernel<Source, kThreads, kHeld, kVectors>, p, 1), 0;
}

template <class Source>
int by_row(const Rows& p, int threads, int held, bool vectors) {
  constexpr int kMany = RowKernels<Source, true, false>::kMany;
  if (vectors) {
    if (threads == 32) return run_rows<Source, 32, 4, true>(p);
    if (threads == 128) return run_rows<Source, 128, 4, true>(p);
    if (threads == 256 && held == 4) return run_rows<Source, 256, 4, true>(p);
    if (threads == 256 && held == 8) return run_rows<Source, kMany, 2048 / kMany, true>(p);
    if (threads == 256 && held == 0) return run_rows<Source, 256, 0, true>(p);
  } else {
    if (threads == 32) return run_rows<Source, 32, 4, false>(p);
    if (threads == 256 && held == 4) return run_rows<Source, 256, 4, false>(p);
    if (threads == 256 && held == 0) return run_rows<Source, 256, 0, false>(p);
  }
  return 1;
}

// threads: 32, or else 256, of which some share what is left over (held = 0), or each has a span.
template <class Source, bool kVectors>
int by_element(const Rows& p, int threads, int held) {
  if (threads == 32) return run<32>(&element_kernel<Source, 32, 4, kVectors>, p, 1), 0;
  const int spans = (p.K + 4095) / 4096;
  return run<256>(&element_kernel<Source, 256, 2, kVectors>, p, held == 0 ? (spans + 1) / 2 : spans), 0;
}

template <class Source>
int by_output(const Rows& p, int threads, int held, bool vectors) {
  if (vectors && !in_chunks(p)) return 2;
  if constexpr (!Source::kReduces) {
    if (!needs_whole_rows(p)) return vectors ? by_element<Source, true>(p, threads, held) : by_element<Source, false>(p, threads, held);
  }
  return by_row<Source>(p, threads, held, vectors);
}

template <class X>
int by_function(const Rows& p, int threads, int held, bool vectors) {
  if (p.function == SCALED_MM_QUANTIZE_INT8) {
    return p.vector.data == nullptr ? by_output<PlainElements<X>>(p, threads, held, vectors)
                                    : by_output<ScaledElements<X>>(p, threads, held, vectors);
  }
  if (p.function < SCALED_MM_SILU_AND_MUL) return by_output<Norm<X>>(p, threads, held, vectors);
  return by_output<Gated<X>>(p, threads, held, vectors);
}

} // namespace

extern "C" int emulate(const Rows* p, int dtype, int threads, int held, int vectors) {
  if (dtype == SCALED_MM_DTYPE_FLOAT16) return by_function<__half>(*p, threads, held, vectors);
  if (dtype == SCALED_MM_DTYPE_BFLOAT16) return by_function<__nv_bfloat16>(*p, threads, held, vectors);
  if (dtype == SCALED_MM_DTYPE_FLOAT32) return by_function<float>(*p, threads, held, vectors);
  return 3;
}
