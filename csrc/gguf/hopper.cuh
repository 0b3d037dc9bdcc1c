// Shared by the SM90 kernels: barriers, bulk copies, stages.
#pragma once

#include "gguf/instructions.cuh"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cutlass/arch/barrier.h"
#include "int8/c3x/grid_dependency.cuh"
#include "int8/launch.cuh"

namespace scaled_mm::gguf {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// CUTLASS's barriers have no "memory" clobber, so the compiler might move accesses of shared memory past them.
__device__ inline void wait(FullBarrier& barrier, uint32_t phase) {
  barrier.wait(phase);
  asm volatile("" ::: "memory");
}
__device__ inline void arrive(EmptyBarrier& barrier) {
  asm volatile("" ::: "memory");
  barrier.arrive();
}
// A warp has read a stage. arrivals: of its lanes.
__device__ inline void release_stage(EmptyBarrier& barrier, int lane, int arrivals) {
  __syncwarp();
  if (lane < arrivals) arrive(barrier);
}

// A barrier of some warps of the thread block. __syncthreads has number 0.
__device__ inline void sync_threads(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

__device__ inline void load_bytes(FullBarrier& barrier, void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(cute::cast_smem_ptr_to_uint(to)),
               "l"(from), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(&barrier))
               : "memory");
}

__device__ inline void load_box(FullBarrier& barrier, void* to, const CUtensorMap* map, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                   cute::cast_smem_ptr_to_uint(to)),
               "l"(map), "r"(cute::cast_smem_ptr_to_uint(&barrier)), "r"(x), "r"(y)
               : "memory");
}

__device__ inline void store_box(const CUtensorMap* map, const void* from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(cute::cast_smem_ptr_to_uint(from)),
               "r"(x), "r"(y)
               : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the stores of this thread have read shared memory.
__device__ inline void wait_until_stores_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// What this thread has written to shared memory is seen by bulk copies that are issued after a barrier.
__device__ inline void show_to_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void store_shared(uint32_t at, float value) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory"); }

// Volatile, so that the compiler does not hoist it: hoisted loads spill.
__device__ inline float4 load_shared(const float2* two) {
  float4 v;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(cute::cast_smem_ptr_to_uint(two))
               : "memory");
  return v;
}

// ldmatrix from rows of 128 bytes in the 128-byte swizzle. Lane i's `row` and 16-byte `chunk` are row i % 8 of matrix i / 8.
__device__ inline uint4 load_swizzled(const uint8_t* rows, int row, int chunk) {
  return load_matrices(cute::cast_smem_ptr_to_uint(rows) + row * 128 + ((chunk ^ (row % 8)) * 16));
}

__device__ inline int load_shared(const int* one) {
  int v;
  asm volatile("ld.volatile.shared.s32 %0, [%1];" : "=r"(v) : "r"(cute::cast_smem_ptr_to_uint(one)) : "memory");
  return v;
}

// Keeps a shared-memory address in a register. The compiler would recompute a symbol's address at every use, tens of cycles each time.
__device__ inline char* kept(char* shared) {
  uint32_t address = cute::cast_smem_ptr_to_uint(shared);
  asm volatile("" : "+r"(address));
  return static_cast<char*>(__cvta_shared_to_generic(address));
}

// The position in a ring of stages.
template <int kStages>
struct Stages {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

} // namespace scaled_mm::gguf
