// The row-wise kernels on gpu.h, as a library: what they do with chunks, lanes, tails and rounding, without a GPU.
#include "gpu.h"

#include <cmath>

namespace gpu {

// A value of another lane of the warp.
template <class T>
T exchange(T value, unsigned from) {
  static T values[1024];
  const unsigned t = thread_index.x;
  values[t] = value;
  meet();
  const T result = values[t / kLanes * kLanes + from % kLanes];
  meet();
  return result;
}

} // namespace gpu

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return gpu::exchange(value, (gpu::thread_index.x % gpu::kLanes) ^ unsigned(mask));
}
template <class T>
T __shfl_down_sync(unsigned, T value, int step) {
  const unsigned lane = gpu::thread_index.x % gpu::kLanes;
  return gpu::exchange(value, lane + unsigned(step) < gpu::kLanes ? lane + unsigned(step) : lane);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return gpu::exchange(value, unsigned(lane));
}

template <class To, class From>
To bits_of(From from) {
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
inline int __float_as_int(float x) { return bits_of<int>(x); }
inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }

#undef __shared__
#define __shared__ static

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
