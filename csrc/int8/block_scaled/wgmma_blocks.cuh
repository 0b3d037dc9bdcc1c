// The main loop of block-scaled wgmma kernels: the int32 sum of each block of K leaves the tensor cores, is scaled, and is added in float32.
// The scales of a block come with its stage. Loaded on demand, a scale would wait behind the tiles' traffic for longer than a block takes.
#pragma once

#include "cute/tensor.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"

#include "int8/block_scaled/formula.cuh"
#include "int8/block_scaled/instructions.cuh"
#include "int8/decode/pipeline.cuh"

namespace scaled_mm::block_scaled {

// In shared memory: the scales of a stage, for each of its blocks of K those of kRows rows of a and of b. kRows = 0: kernels without.
template <int kStages, int kRows, int kBlocks>
struct ScaleStages {
  float a[kStages][kBlocks][kRows];
  float b[kStages][kBlocks];
};
template <int kStages, int kBlocks>
struct ScaleStages<kStages, 0, kBlocks> {};

// The scales of a tile of kRows rows, loaded by kThreads threads. Rows past the end have the last row's.
template <int kRows, int kThreads, int kBlocks>
class ScaleLoads {
public:
  // a: the scale of the tile's first row and first block. rows: rows that exist from the tile's first row on. b: the scale of the tile's columns
  // and first block. thread: index below kThreads.
  __device__ ScaleLoads(const Scales& scales, const float* a, int rows, const float* b, int thread)
      : stride_a_(scales.a_stride_k), stride_b_(scales.b_stride_k), b_(b), thread_(thread) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) a_[i] = a + min(thread + i * kThreads, rows - 1) * scales.a_stride_m;
  }
  // The scales of the next `blocks`, to a stage; then an arrival of each thread at the stage's barrier.
  template <int kStages>
  __device__ void load_next(ScaleStages<kStages, kRows, kBlocks>& to, int stage, int blocks, decode::FullBarrier& full) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block >= blocks) break;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int m = thread_ + i * kThreads;
        if (kRows % kThreads == 0 || m < kRows) copy_word_async(shared_address(&to.a[stage][block][m]), a_[i]);
        a_[i] += stride_a_;
      }
      if (thread_ == 0) copy_word_async(shared_address(&to.b[stage][block]), b_);
      b_ += stride_b_;
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<const uint64_t*>(&full));
  }

private:
  static constexpr int kEach = (kRows + kThreads - 1) / kThreads;
  const int64_t stride_a_, stride_b_;
  const float *a_[kEach], *b_;
  const int thread_;
};

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

// kCount steps of K of a stage, from kStep on, in a turn. No MMA is under way when it returns, so that it may stand in a branch.
template <int kStep, int kCount, bool kTwo, class Mma, class First, class Second, class Acc>
__device__ inline void multiply_steps(Mma& mma, const First& first, const Second& second, Acc& acc, int stage, const Turns<kTwo>& turns) {
  using namespace cute;
  turns.wait();
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  CUTLASS_PRAGMA_UNROLL
  for (int k = kStep; k < kStep + kCount; ++k) {
    cute::gemm(mma, first(_, _, k, stage), second(_, _, k, stage), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_wait<0>();
  turns.pass();
  warpgroup_fence_operand(acc);
}

// sums: the thread's elements of a tile. row: its first row of the MMA's tile. first, second: fragments of all stages. acc: the MMA's accumulators.
// kBlocks: that a stage may have. half: blocks of kHalfBlock.
template <bool kSwapAB, int kBlocks, bool kTwo, class Mma, class First, class Second, class Acc, class Ring, class Storage, int kCount>
__device__ inline void sum_blocks(Mma& mma, const First& first, const Second& second, Acc& acc, Ring& ring, Storage& s, int K, bool half,
                                  const Turns<kTwo>& turns, int row, float (&sums)[kCount]) {
  using namespace cute;
  constexpr int kScales = kSwapAB ? kCount / 2 : 2; // rows of a whose elements the thread has
  const int lane = int(threadIdx.x) % 32;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) sums[i] = 0.0f;
  const auto add_block = [&](auto step, auto count, int block, bool is_last) {
    float scales[kScales];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kScales; ++i) {
      const int m = kSwapAB ? i / 2 * 8 + lane % 4 * 2 + i % 2 : row + i * 8;
      scales[i] = combine_scales(s.scales.a[ring.stage][block][m], s.scales.b[ring.stage][block]);
    }
    multiply_steps<decltype(step)::value, decltype(count)::value>(mma, first, second, acc, ring.stage, turns);
    if (is_last) {
      __syncwarp(); // all lanes have read their scales
      if (lane == 0) s.empty[ring.stage].arrive();
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      sums[i] = add_converted(sums[i], acc(i), scales[kSwapAB ? i / 4 * 2 + i % 2 : i / 2 % 2]);
    }
  };
  static_assert(decltype(size<2>(first))::value == kBlock / 32, "steps of a stage");
  for (; K > 0; K -= kBlock, ring.advance()) {
    s.full[ring.stage].wait(ring.phase);
    if (kBlocks == 1 || !half) {
      add_block(Int<0>{}, Int<kBlock / 32>{}, 0, true);
    } else {
      add_block(Int<0>{}, Int<kHalfBlock / 32>{}, 0, K <= kHalfBlock);
      if (K > kHalfBlock) add_block(Int<kHalfBlock / 32>{}, Int<kHalfBlock / 32>{}, kBlocks - 1, true);
    }
  }
}

} // namespace scaled_mm::block_scaled
