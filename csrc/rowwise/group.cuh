// The threads of one row: a warp, or a whole thread block. Their reductions.
#pragma once

#include "rowwise/rows.cuh"

namespace scaled_mm::rowwise {

template <int kThreads>
struct Group {
  static_assert(kThreads == 32 || kThreads % 128 == 0, "a thread block has four warps at least");
  static constexpr int kBlock = kThreads == 32 ? 128 : kThreads; // threads of a thread block: a row each of four warps, or one row
  static constexpr int kRows = kBlock / kThreads;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kLanesPerThread = kThreads < kLanes ? kLanes / kThreads : 1;

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

  // Before a reduction of the same kind as one before.
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

  // The tree of a row sum: lane l + lane l + h, for h = 128, 64, ..., 1. lanes: those of this thread, thread + kThreads * i.
  template <class W>
  __device__ W tree(W (&lanes)[kLanesPerThread]) const {
    static_assert(kThreads <= kLanes, "the tree starts within a thread, and ends in a warp");
    W values[8]; // those that lane thread % 32 of a warp reduces, 32 apart
    if constexpr (kWarps == 1) {
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = lanes[i];
    } else {
      if constexpr (kThreads == 128) lanes[0] = lanes[0] + lanes[1];
      __shared__ W of_lanes[kThreads];
      of_lanes[thread] = lanes[0];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kWarps; ++i) values[i] = of_lanes[thread % 32 + 32 * i];
    }
#pragma unroll
    for (int half = (kWarps == 1 ? 8 : kWarps) / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) values[i] = values[i] + values[i + half];
    }
    W value = values[0];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = value + __shfl_down_sync(~0u, value, step); // lane 0's is the tree's
    return __shfl_sync(~0u, value, 0);
  }
};

} // namespace scaled_mm::rowwise
