// The parts of a decode kernel that talk to the hardware: barriers of its pipeline, sums across a cluster.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"

namespace scaled_mm::decode {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// Adds to a word of another block's shared memory in the cluster, and counts its four bytes at that block's barrier.
__device__ inline void add_remote(uint32_t word, uint32_t barrier, uint32_t rank, int32_t value) {
  const uint32_t there = cute::set_block_rank(word, rank), counted = cute::set_block_rank(barrier, rank);
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];"
               ::"r"(there), "r"(uint32_t(value)), "r"(counted)
               : "memory");
}

// Ends when a barrier's first phase has, with all that other blocks of the cluster added before it.
__device__ inline void wait_for_cluster(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}"
      ::"r"(barrier)
      : "memory");
}

// Where a ring of stages stands: which one is next, and the phase of its barriers.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace scaled_mm::decode
