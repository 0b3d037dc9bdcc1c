// The stages of wgmma kernels with slots of kBlock of K, and the threads that fill them: operands by TMA, the scales of blocks by cp.async.
//
// The scales of a block come with its stage. Loaded on demand, a scale would wait behind the tiles' traffic for longer than a block takes.
#pragma once

#include "cutlass/arch/barrier.h"

#include "int8/block_scaled/formula.cuh"
#include "int8/block_scaled/instructions.cuh"
#include "int8/block_scaled/warp_tile.cuh"
#include "int8/decode/pipeline.cuh"

namespace scaled_mm::block_scaled {

using decode::EmptyBarrier;
using decode::FullBarrier;
using decode::Ring;

// Lanes of a warp that arrive at a stage's barrier when all have read their scales: one is enough after __syncwarp. racecheck does not follow
// __syncwarp, so tests/robustness/test_sanitizer.py sets 32 here, with which products take up to 3 % longer.
inline constexpr int kArrivingLanes = 1;

// In shared memory: a stage's scales. For each of its blocks of K one per row of a, and one of b. kRows = 0: kernels without scales of blocks.
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

// A slot holds kBlock elements of K of one operand's tile: one block of scales, or two if blocks have kHalfBlock.
template <int kFirst, int kSecond, int kStages, int kDepth, int kScaleRows, int kScaleBlocks>
struct alignas(1024) WgmmaStorage {
  int8_t first[kStages * kDepth][kFirst * kBlock];
  int8_t second[kStages * kDepth][kSecond * kBlock];
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
  ScaleStages<kStages, kScaleRows, kScaleBlocks> scales;
};

// kDepth: slots of a stage. kSwapAB: the columns of out are those of the MMA's first operand, else of its second. kBlockScales: scales are a part of
// the stages.
template <int kFirst, int kSecond, int kStages, int kDepth, bool kSwapAB, bool kBlockScales = true>
struct WgmmaShape {
  static constexpr int kTokenRows = kSwapAB ? kSecond : kFirst, kWeightRows = kSwapAB ? kFirst : kSecond;
  static constexpr int kScaleRows = kBlockScales ? kTokenRows : 0;
  // With two warpgroups the second branch of the main loop costs 2 to 9 %, so those kernels do not take blocks of kHalfBlock.
  static constexpr int kBlocks = kDepth * (kFirst == 64 ? kScalesOfStage<kWeightRows> : 1);
  static constexpr int kConsumers = kFirst * 2; // threads: a warpgroup for 64 rows
  // setmaxnreg moves registers between whole warpgroups, so the producers are a whole warpgroup.
  static constexpr bool kReconfigure = kFirst > 64;
  // Together those that the thread block starts with: 384 * 168.
  static constexpr int kLoaderRegisters = 56, kConsumerRegisters = 224;
  // A single loading warp takes longer than the MMAs of few columns, so each operand has its own warp and the other warps load scales. Exception:
  // one warpgroup and one slot per stage. Several such thread blocks share an SM, and more loading warps would take their registers.
  static constexpr bool kOneLoader = !kReconfigure && kDepth == 1;
  static constexpr int kProducers = kReconfigure ? 128 : kOneLoader ? 32 : kBlockScales ? 96 : 64;
  static constexpr int kScaleThreads = !kBlockScales ? 0 : kOneLoader ? kProducers : kProducers - 64;
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kArrivals = (kOneLoader ? 1 : 2) + kScaleThreads; // at a full stage's barrier
  using Storage = WgmmaStorage<kFirst, kSecond, kStages, kDepth, kScaleRows, kBlocks>;
  static constexpr int kFit = 228 * 1024 / int(sizeof(Storage) + 1024);
  static constexpr int kResident = kReconfigure ? 1 : kFit < 4 ? kFit : 4; // thread blocks per SM

  // One thread of the thread block, before the others use them.
  __device__ static void init(Storage& s) {
    for (int i = 0; i < kStages; ++i) {
      s.full[i].init(kArrivals);
      s.empty[i].init(kConsumers / 32 * (kBlockScales ? kArrivingLanes : 1));
    }
    cutlass::arch::fence_barrier_init();
    cutlass::arch::fence_view_async_shared();
  }
};

// The number of blocks of scales in a stage of kDepth slots. K: elements left from the stage's first one on.
template <int kDepth>
__device__ inline int blocks_of_stage(const Scales& scales, int K) {
  return (min(K, kDepth * kBlock) + scales.block() - 1) / scales.block();
}

// What a producer thread does: it loads its part of one stage after the other, across tiles.
template <class Shape, int kStages, int kDepth>
class StageLoads {
public:
  __device__ StageLoads(typename Shape::Storage& s, int thread) : s_(s), thread_(thread) {}

  // rows_first, rows_second: the rows that a copy to a slot loads. load_first, load_second (barrier, slot, k): start a copy. a, b: the tile's first
  // scales. rows: rows of a that exist from the tile's first one on.
  template <class LoadFirst, class LoadSecond>
  __device__ void load_tile(int K, int rows_first, const LoadFirst& load_first, int rows_second, const LoadSecond& load_second, const Scales& scales,
                            const float* a, int rows, const float* b) {
    const int warp = thread_ / 32;
    if constexpr (Shape::kOneLoader) {
      load_all(K, (rows_first + rows_second) * kBlock, load_first, load_second, scales, a, rows, b);
    } else if (warp == 0) {
      load_operand(K, rows_first, s_.first, load_first);
    } else if (warp == 1) {
      load_operand(K, rows_second, s_.second, load_second);
    } else if constexpr (Shape::kScaleThreads > 0) {
      load_scales(K, scales, a, rows, b);
    }
  }

private:
  // One thread loads an operand.
  template <int kSlots, int kBytes, class Load>
  __device__ void load_operand(int K, int rows, int8_t (&slots)[kSlots][kBytes], const Load& load) {
    if (thread_ % 32 != 0) return;
    for (int left = K; left > 0; left -= kDepth * kBlock, advance()) {
      wait_until_empty();
      auto& full = s_.full[ring_.stage];
      const int count = kDepth == 1 ? 1 : min((left + kBlock - 1) / kBlock, kDepth);
      full.arrive_and_expect_tx(rows * kBlock * count);
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (i < count) load(reinterpret_cast<uint64_t*>(&full), slots[ring_.stage * kDepth + i], K - left + i * kBlock);
      }
    }
  }
  // Warps load the scales.
  __device__ void load_scales(int K, const Scales& scales, const float* a, int rows, const float* b) {
    ScaleLoads<Shape::kScaleRows, Shape::kScaleThreads, Shape::kBlocks> loads(scales, a, rows, b, thread_ - 64);
    for (int left = K; left > 0; left -= kDepth * kBlock, advance()) {
      wait_until_empty();
      loads.load_next(s_.scales, ring_.stage, blocks_of_stage<kDepth>(scales, left), s_.full[ring_.stage]);
    }
  }
  // One warp loads everything; its first thread starts the copies of operands. bytes: of both.
  template <class LoadFirst, class LoadSecond>
  __device__ void load_all(int K, int bytes, const LoadFirst& load_first, const LoadSecond& load_second, const Scales& scales, const float* a,
                           int rows, const float* b) {
    const auto start = [&](int k) {
      auto& full = s_.full[ring_.stage];
      full.arrive_and_expect_tx(bytes);
      load_first(reinterpret_cast<uint64_t*>(&full), s_.first[ring_.stage], k);
      load_second(reinterpret_cast<uint64_t*>(&full), s_.second[ring_.stage], k);
    };
    if constexpr (Shape::kScaleThreads > 0) {
      ScaleLoads<Shape::kScaleRows, Shape::kScaleThreads, Shape::kBlocks> loads(scales, a, rows, b, thread_);
      for (int left = K; left > 0; left -= kBlock, advance()) {
        wait_until_empty();
        if (thread_ == 0) start(K - left);
        loads.load_next(s_.scales, ring_.stage, blocks_of_stage<1>(scales, left), s_.full[ring_.stage]);
      }
    } else if (thread_ == 0) {
      for (int left = K; left > 0; left -= kBlock, advance()) {
        wait_until_empty();
        start(K - left);
      }
    }
  }
  __device__ void wait_until_empty() {
    if (loaded_ >= kStages) s_.empty[ring_.stage].wait(ring_.phase ^ 1);
  }
  __device__ void advance() {
    ++loaded_;
    ring_.advance();
  }

  typename Shape::Storage& s_;
  const int thread_;
  Ring<kStages> ring_;
  int64_t loaded_ = 0;
};

} // namespace scaled_mm::block_scaled
