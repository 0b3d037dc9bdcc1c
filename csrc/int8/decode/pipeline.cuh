// The parts of a decode kernel that talk to the hardware or count: barriers of its pipeline, sums across a cluster, the tiles of a block.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"

namespace scaled_mm::decode {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// Stores four words into another block's shared memory in the cluster, and counts their bytes at that block's barrier. Both addresses are
// those that cute::set_block_rank gives.
__device__ inline void store_remote(uint32_t words, uint32_t barrier, int x, int y, int z, int w) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(words), "r"(x), "r"(y), "r"(z),
               "r"(w), "r"(barrier)
               : "memory");
}

// Ends when a barrier's phase has, with all that other blocks of the cluster did before they arrived.
__device__ inline void wait_for_cluster(uint32_t barrier, uint32_t phase) {
  asm volatile("{\n"
               ".reg .pred done;\n"
               "again:\n"
               "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;\n"
               "}" ::"r"(barrier),
               "r"(phase)
               : "memory");
}

// Arrives at another block's barrier: what this thread did before is visible to whoever waits there.
__device__ inline void arrive_remote(uint32_t barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(cute::set_block_rank(barrier, rank)) : "memory");
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

// A tile's place: its rows of a, the columns that its cluster computes at once, its product of the batch.
struct Place {
  int row_tile, group, batch;
};

// The tiles of a cluster, one after the other: every `stride`-th of all; of a kernel that is not persistent, one. Those of one product's
// columns come side by side, for they need the same weights.
template <bool kPersistent>
struct Tiles {
  int row_tiles, groups, count; // along M; along N; in all products of the batch
  int index, stride;

  __device__ bool valid() const { return index < count; }
  __device__ void next() { index = kPersistent ? index + stride : count; }
  __device__ Place place() const { return {index % row_tiles, index / row_tiles % groups, index / row_tiles / groups}; }
  __device__ int left() const { return !valid() ? 0 : kPersistent ? (count - index + stride - 1) / stride : 1; }
};

} // namespace scaled_mm::decode
