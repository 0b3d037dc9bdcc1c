// The exchanges of a warp on gpu.h, for kernels that use shared memory and shuffles alone. __shared__ is static: one block runs at a time.
#pragma once

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

template <class T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int lane = int(gpu::thread_index.x % gpu::kLanes);
  return gpu::exchange(value, unsigned(lane >= step ? lane - step : lane));
}
inline unsigned __match_any_sync(unsigned, int value) {
  unsigned lanes = 0;
  for (int lane = 0; lane < gpu::kLanes; ++lane) lanes |= unsigned(gpu::exchange(value, unsigned(lane)) == value) << lane;
  return lanes;
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  unsigned lanes = 0;
  for (int lane = 0; lane < gpu::kLanes; ++lane) lanes |= unsigned(gpu::exchange(int(predicate), unsigned(lane))) << lane;
  return lanes;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int atomicAdd(int* to, int value) { // threads are coroutines: there is no race
  const int before = *to;
  *to += value;
  return before;
}

inline void __syncwarp() { gpu::meet(); }

#undef __shared__
#define __shared__ static
