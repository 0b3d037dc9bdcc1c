// The main loop of block-scaled wgmma kernels: the int32 sum of each block of K leaves the tensor cores, is scaled, and is added in float32.
#pragma once

#include <utility>

#include "cute/tensor.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"

#include "int8/block_scaled/formula.cuh"
#include "int8/block_scaled/instructions.cuh"
#include "int8/block_scaled/wgmma_stages.cuh"

namespace scaled_mm::block_scaled {

// Two warpgroups multiply in turn, so that one can scale its sums meanwhile. Measured: faster with tiles of 128 x 64 only (docs/decisions/0023).
// A single warpgroup has no turns.
template <bool kTwo>
class Turns {
public:
  // Once in each warpgroup, before the first turn, which is the first warpgroup's.
  __device__ Turns() : own_(int(threadIdx.x) / 128) {
    if (kTwo && own_ == 1) cutlass::arch::NamedBarrier::arrive(256, 0);
  }
  __device__ void wait() const {
    if constexpr (kTwo) cutlass::arch::NamedBarrier::sync(256, uint32_t(own_));
  }
  __device__ void pass() const {
    if constexpr (kTwo) cutlass::arch::NamedBarrier::arrive(256, uint32_t(1 - own_));
  }

private:
  const int own_;
};

// Starts the MMAs of kSlots slots from `slot` on, one batch for each: steps [kStep, kStep + kCount). Waits for this warpgroup's turn first.
template <int kStep, int kCount, int kSlots, bool kTwo, class Mma, class First, class Second, class Acc>
__device__ inline void start_sums(Mma& mma, const First& first, const Second& second, Acc (&acc)[kSlots], int slot, const Turns<kTwo>& turns) {
  using namespace cute;
  turns.wait();
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < kSlots; ++j) warpgroup_fence_operand(acc[j]);
  warpgroup_arrive();
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < kSlots; ++j) {
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int k = kStep; k < kStep + kCount; ++k) {
      cute::gemm(mma, first(_, _, k, slot + j), second(_, _, k, slot + j), acc[j]);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  }
}

// sums: the thread's elements of a tile. row: its first row of the MMA's tile. first, second: fragments of all slots; a slot is kBlock of K, and a
// stage has kDepth of them. kBlocks: the most blocks of scales in a stage. half: blocks of kHalfBlock.
//
// If a stage is full and blocks have kBlock, the MMAs of all its slots overlap: with few columns an MMA's latency far exceeds its issue time.
template <bool kSwapAB, int kDepth, int kBlocks, bool kTwo, class Mma, class First, class Second, class Ring, class Storage, int kCount>
__device__ inline void sum_blocks(Mma& mma, const First& first, const Second& second, Ring& ring, Storage& s, int K, bool half,
                                  const Turns<kTwo>& turns, int row, float (&sums)[kCount]) {
  using namespace cute;
  using Acc = decltype(partition_fragment_C(mma, cute::Shape<Int<kTwo ? 128 : 64>, Int<kCount * 2>>{}));
  constexpr int kSteps = kBlock / 32; // MMA instructions along K in a slot
  static_assert(decltype(size(std::declval<Acc>()))::value == kCount && decltype(size<2>(first))::value == kSteps);
  constexpr int kScales = kSwapAB ? kCount / 2 : 2; // rows of a whose elements the thread has
  const int lane = int(threadIdx.x) % 32;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) sums[i] = 0.0f;
  const auto load_scales = [&](int block, float(&scales)[kScales]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kScales; ++i) {
      const int m = kSwapAB ? i / 2 * 8 + lane % 4 * 2 + i % 2 : row + i * 8;
      scales[i] = combine_scales(s.scales.a[ring.stage][block][m], s.scales.b[ring.stage][block]);
    }
  };
  const auto add_scaled = [&](const Acc& acc, const float(&scales)[kScales]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) sums[i] = add_converted(sums[i], acc(i), scales[kSwapAB ? i / 4 * 2 + i % 2 : i / 2 % 2]);
  };
  const auto free_stage = [&] {
    __syncwarp(); // all lanes have read their scales
    if (kArrivingLanes > 1 || lane == 0) s.empty[ring.stage].arrive();
  };
  // Adds one block of scales: `count` steps of a slot. On return no MMA is in flight, so it may be called in a branch.
  const auto add_block = [&](auto step, auto count, int slot, int block, bool is_last) {
    float scales[kScales];
    Acc acc[1];
    load_scales(block, scales);
    start_sums<decltype(step)::value, decltype(count)::value>(mma, first, second, acc, ring.stage * kDepth + slot, turns);
    warpgroup_wait<0>();
    turns.pass();
    warpgroup_fence_operand(acc[0]);
    if (is_last) free_stage();
    add_scaled(acc[0], scales);
  };
  const auto add_whole_stage = [&] {
    float scales[kDepth][kScales];
    Acc acc[kDepth];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kDepth; ++j) load_scales(j, scales[j]);
    start_sums<0, kSteps>(mma, first, second, acc, ring.stage * kDepth, turns);
    for_each(make_seq<kDepth>{}, [&](auto j) {
      constexpr int kPending = kTwo ? 0 : kDepth - 1 - decltype(j)::value; // two warpgroups: wait for all MMAs, pass the turn, then scale
      warpgroup_wait<kPending>();
      if (j == (kTwo ? 0 : kDepth - 1)) {
        turns.pass();
        free_stage();
      }
      warpgroup_fence_operand(acc[j]);
      add_scaled(acc[j], scales[j]);
    });
  };
  for (; K > 0; K -= kDepth * kBlock, ring.advance()) {
    s.full[ring.stage].wait(ring.phase);
    if (kDepth > 1 && !half && K > (kDepth - 1) * kBlock) {
      add_whole_stage();
      continue;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < kDepth; ++slot) {
      const int left = K - slot * kBlock;
      if (slot > 0 && left <= 0) break;
      const bool is_last = slot == kDepth - 1 || left <= kBlock;
      if (kBlocks == kDepth || !half) {
        add_block(Int<0>{}, Int<kSteps>{}, slot, slot, is_last);
      } else {
        add_block(Int<0>{}, Int<kSteps / 2>{}, slot, 2 * slot, is_last && left <= kHalfBlock);
        if (left > kHalfBlock) add_block(Int<kSteps / 2>{}, Int<kSteps / 2>{}, slot, 2 * slot + 1, is_last);
      }
    }
  }
}

} // namespace scaled_mm::block_scaled
