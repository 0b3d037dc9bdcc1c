// Instructions of the main loop that have no intrinsic. Shared memory goes by its 32-bit address.
#pragma once

#include <cstdint>

namespace scaled_mm::block_scaled {

__device__ inline uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// 16 bytes to shared memory, of which `bytes` (0 to 16) are read and the rest are zeros. Compute capability 8.0.
__device__ inline void copy_async(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// 4 bytes to shared memory. Compute capability 8.0.
__device__ inline void copy_word_async(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared), "l"(global) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Until all but the last kPending groups of this thread's copies have arrived.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

__device__ inline void store_shared(uint32_t shared, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Four matrices of 8 rows of 16 bytes; lane l names row l % 8 of matrix l / 8 and gets, of matrix i, bytes 4 * (l % 4) on of row l / 4.
__device__ inline void load_matrices(uint32_t (&words)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}

} // namespace scaled_mm::block_scaled
