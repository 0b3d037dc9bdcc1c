// The threads of one row: a warp, or a whole thread block. Their reductions.
#pragma once

#include "rowwise/rows.cuh"

namespace scaled_mm::rowwise {

// A barrier for the compiler: chunks that are under way at once would need more registers. Every thread of a warp must come here.
__device__ inline void one_after_the_other() {
#if defined(__CUDA_ARCH__)
  asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
#endif
}

template <int kThreads>
struct Group {
  static_assert(kThreads % 32 == 0 && (kThreads == 32 || kThreads >= 128), "whole warps, and four of them at least in a thread block");
  static constexpr int kBlock = kThreads == 32 ? 128 : kThreads; // threads of a thread block: a row each of four warps, or one row
  static constexpr int kRows = kBlock / kThreads;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kLanesPerThread = kLanes / kThreads;

  // The lanes of a row sum that a thread needs for `count` chunks: a power of two, as the tree of the sum wants them.
  static constexpr int used_lanes(int count) {
    int lanes = 1;
    while (lanes < count && lanes < kLanesPerThread) lanes *= 2;
    return lanes;
  }

  int thread = int(threadIdx.x) % kThreads;
  int64_t row = int64_t(blockIdx.x) * kRows + int(threadIdx.x) / kThreads;

  // The largest value. Of the bits of float32 numbers above 0: a NaN is larger than infinity.
  __device__ uint32_t largest(uint32_t value) const {
    value = largest_of_warp(value);
    if constexpr (kWarps == 1) return value;
    __shared__ uint32_t of_warps[kWarps];
    if (thread % 32 == 0) of_warps[thread / 32] = value;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) value = of_warps[warp] > value ? of_warps[warp] : value;
    return value;
  }
  __device__ static uint32_t largest_of_warp(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, value);
#else
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const uint32_t other = __shfl_xor_sync(~0u, value, step);
      value = other > value ? other : value;
    }
    return value;
#endif
  }

  // Between two calls of the same reduction, which use the same shared memory.
  __device__ void again() const {
    if constexpr (kWarps > 1) __syncthreads();
  }

  // Sums modulo 2^32.
  __device__ int32_t sum(int32_t value) const {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if constexpr (kWarps == 1) return value;
    __shared__ int32_t of_warps[kWarps];
    if (thread % 32 == 0) of_warps[thread / 32] = value;
    __syncthreads();
    value = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) value += of_warps[warp];
    return value;
  }

  // The tree of a row sum: lane l + lane l + h, for h = 512, 256, ..., 1. lanes: those of this thread, thread + kThreads * i; the others are 0.
  template <class W, int kCount>
  __device__ W tree(W (&lanes)[kCount]) const {
    static_assert(kThreads * kCount <= kLanes, "the tree starts within a thread, and ends in a warp");
    W value = within(lanes);
    if constexpr (kWarps > 1) {
      __shared__ W of_threads[kThreads];
      of_threads[thread] = value;
      __syncthreads();
      W of_warps[kWarps];
#pragma unroll
      for (int i = 0; i < kWarps; ++i) of_warps[i] = of_threads[thread % 32 + 32 * i];
      value = within(of_warps);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = value + __shfl_down_sync(~0u, value, step); // lane 0's is the tree's
    return __shfl_sync(~0u, value, 0);
  }
  template <class W, int kCount, int kHalf = kCount / 2>
  __device__ static W within(W (&values)[kCount]) {
    static_assert((kCount & (kCount - 1)) == 0, "a tree of a power of two");
#pragma unroll
    for (int i = 0; i < kHalf; ++i) values[i] = values[i] + values[i + kHalf];
    if constexpr (kHalf > 1) {
      return within<W, kCount, kHalf / 2>(values);
    } else {
      return values[0];
    }
  }
};

} // namespace scaled_mm::rowwise
