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

// Two warpgroups take turns to issue instructions of the tensor cores: one decodes while the other one's are being issued, which holds up its warps.
// Both call next() before and done() after each issue, equally often; `last`: the last time.
template <bool kTurns>
struct Turns {
  int group;

  __device__ explicit Turns(int group) : group(group) {
    if (kTurns && group == 1) arrive(0);
  }
  __device__ void next() const {
    if constexpr (kTurns) asm volatile("bar.sync %0, 256;" ::"r"(kFirst + group) : "memory");
  }
  __device__ void done(bool last) const {
    if (kTurns && !(last && group == 1)) arrive(group ^ 1);
  }

private:
  static constexpr int kFirst = 1; // of two named barriers
  __device__ static void arrive(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(kFirst + group) : "memory"); }
};

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
