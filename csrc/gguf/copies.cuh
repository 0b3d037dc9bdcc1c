// cp.async, 16 bytes per thread from device memory to shared memory. Before Ampere: a load and a store.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace scaled_mm::gguf {

__device__ inline void copy_async(void* to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
#else
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}
// For data that other warps of the SM read too: cached in L1. there: false writes zeros.
__device__ inline void copy_or_clear_async(void* to, const void* from, bool there) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 16 : 0)
               : "memory");
#else
  *static_cast<uint4*>(to) = there ? *static_cast<const uint4*>(from) : uint4{};
#endif
}
// Commits a thread's group of copies.
__device__ inline void end_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits, for the whole warp, until at most the latest kLeft groups are in flight.
template <int kLeft>
__device__ inline void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
  __syncwarp();
}

} // namespace scaled_mm::gguf
