// Clears the counters of the tiles that a stream-K kernel divides: the workspace is uninitialized.
#pragma once

#include "int8/c3x/grid_dependency.cuh"
#include "int8/launch.cuh"

namespace scaled_mm::c3x {

// A kernel instead of cudaMemsetAsync, so that the stream-K kernel can start before its predecessors end.
template <int kThreads>
__global__ void clear_counters(int* counters, int count) {
  let_next_kernel_start();
  wait_for_preceding_kernel(); // it may use the same counters
  for (int i = int(threadIdx.x); i < count; i += kThreads) counters[i] = 0;
}

constexpr int kClearThreads = 128;
inline DeviceKernel& clear_counters_kernel() {
  static DeviceKernel one(&clear_counters<kClearThreads>);
  return one;
}

inline scaledMMStatus_t launch_clear_counters(void* counters, int64_t bytes, const GemmLaunch& l, char* message, size_t size) {
  LaunchShape shape;
  shape.grid = dim3(1);
  shape.block = dim3(kClearThreads);
  shape.dependent = true;
  int count = int(bytes / int64_t(sizeof(int)));
  void* pointers[] = {&counters, &count};
  return launch_kernel(clear_counters_kernel(), shape, pointers, l, message, size);
}

} // namespace scaled_mm::c3x
