// The row-wise kernels on gpu.h, as a library: what they do with chunks, lanes, tails and rounding, without a GPU.
#include "warp.h"
#include "rowwise/launch.cuh"

using namespace scaled_mm::rowwise;

namespace {

// With absent rows: half as many thread blocks as there are rows for, so that each has two.
template <int kThreads, class Kernel>
void run(Kernel* kernel, Rows p, int spans) {
  p.spans = spans;
  gpu::shared_size = 0;
  const int64_t all = (p.rows + Group<kThreads>::kRows - 1) / Group<kThreads>::kRows;
  gpu::grid_dim.x = unsigned((p.rows_end != nullptr ? (all + 1) / 2 : all) * spans);
  for (int64_t block = 0; block < gpu::grid_dim.x; ++block) {
    gpu::run_block(Group<kThreads>::kBlock, unsigned(block), true, [&] { kernel(p); });
  }
}

enum { kRan, kNoSuchKernel, kDoesNotServe };

template <class Kernel>
struct Emulated;

template <class Source, int kThreads, int kHeld, bool kVectors, int kBlocks>
struct Emulated<RowKernel<Source, kThreads, kHeld, kVectors, kBlocks>> {
  static void run_on(const Rows& p, bool) { run<kThreads>(&row_kernel<Source, kThreads, kHeld, kVectors, kBlocks>, p, 1); }
};

// fewer: half as many thread blocks as a row has spans, so that each has two.
template <class Source, int kThreads, int kCount, bool kVectors, int kBlocks>
struct Emulated<ElementKernel<Source, kThreads, kCount, kVectors, kBlocks>> {
  static void run_on(const Rows& p, bool fewer) {
    const int spans = kThreads == 32 ? 1 : int((p.K + ElementKernel<Source, kThreads, kCount, kVectors>::kSpan - 1) / (kThreads * kCount * kChunk));
    run<kThreads>(&element_kernel<Source, kThreads, kCount, kVectors, kBlocks>, p, fewer ? (spans + 1) / 2 : spans);
  }
};

template <class Kernel, int kMost>
struct Emulated<Few<Kernel, kMost>> : Emulated<Kernel> {};

template <int64_t kMost, class Kernel>
struct Emulated<UpTo<kMost, Kernel>> : Emulated<Kernel> {};

template <class Kernel>
struct Emulated<WholeSpans<Kernel>> : Emulated<Kernel> {};

// Runs the kernel at a place of a list.
template <class... Kernels>
int run_at(ByLength<Kernels...>, int at, const Rows& p, bool fewer) {
  constexpr int kEnough = 1 << 20; // multiprocessors
  int status = kNoSuchKernel, i = 0;
  (void)((i++ == at && (status = Kernels::Launch::serves(p, kEnough) ? (Emulated<Kernels>::run_on(p, fewer), kRan) : kDoesNotServe, true)) || ...);
  return status;
}

template <class Source, class Of>
int by_output(const Rows& p, int at, bool fewer) {
  if constexpr (!Source::kReduces) {
    if (!needs_whole_rows(p)) return run_at(typename Of::Elementwise(), at, p, fewer);
  }
  return run_at(typename Of::Rowwise(), at, p, fewer);
}

template <class Source>
int by_source(const Rows& p, int at, bool vectors, bool fewer) {
  if (!vectors) return by_output<Source, typename Kernels<Source>::Any>(p, at, fewer);
  return in_chunks(p) ? by_output<Source, typename Kernels<Source>::Aligned>(p, at, fewer) : kNoSuchKernel;
}

template <class X>
int by_function(const Rows& p, int at, bool vectors, bool fewer) {
  if (p.function == SCALED_MM_QUANTIZE_INT8) {
    return p.vector.data == nullptr ? by_source<PlainElements<X>>(p, at, vectors, fewer) : by_source<ScaledElements<X>>(p, at, vectors, fewer);
  }
  if (p.function < SCALED_MM_SILU_AND_MUL) return by_source<Norm<X>>(p, at, vectors, fewer);
  return by_source<Gated<X>>(p, at, vectors, fewer);
}

} // namespace

extern "C" int emulate(const Rows* p, int dtype, int at, bool vectors, bool fewer) {
  if (dtype == SCALED_MM_DTYPE_FLOAT16) return by_function<__half>(*p, at, vectors, fewer);
  if (dtype == SCALED_MM_DTYPE_BFLOAT16) return by_function<__nv_bfloat16>(*p, at, vectors, fewer);
  return by_function<float>(*p, at, vectors, fewer);
}
