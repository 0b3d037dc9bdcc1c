// One tile of a block-scaled product by mma.sync, for operands that are contiguous along K and lie on 16 bytes: a ring of stages,
// one block of K each, filled by asynchronous copies, or with two stages through registers as Turing has to.
#pragma once

#include "int8/block_scaled/launch.cuh"

namespace scaled_mm::block_scaled {

// Rows of K bytes: a's rows are m, b's are n.
struct Rows {
  const int8_t* data;
  int64_t count, stride;
};

struct TileProblem {
  Rows a, b;
  int K, tiles_m, tiles_n;
  Scales scales;
  EpilogueOperands epilogue;
  void* out;
  int64_t out_stride;
};

template <int kTileM, int kTileN>
TileProblem tile_problem(const GemmLaunch& l) {
  // A dimension of one has no stride of its own.
  return {{static_cast<const int8_t*>(l.a), l.M, l.M > 1 ? l.a_stride_m : 0},
          {static_cast<const int8_t*>(l.b), l.N, l.N > 1 ? l.b_stride_n : 0},
          int(l.K),
          int((l.M + kTileM - 1) / kTileM),
          int((l.N + kTileN - 1) / kTileN),
          scales_of(l),
          epilogue_operands(l),
          l.out,
          l.M > 1 ? l.out_stride_m : 0};
}

// `bytes` of a chunk, 16 or more for all of it; the rest are zeros.
__device__ inline uint4 load_chunk(const int8_t* data, int bytes) {
  if (bytes >= kChunk) return *reinterpret_cast<const uint4*>(data);
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kChunk - 1; ++i) {
    if (i < bytes) words[i / 4] |= uint32_t(uint8_t(data[i])) << (8 * (i % 4));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A thread's chunks of kRows rows of one operand: the same chunk of every kStep-th row, so that eight neighbours read a row.
template <int kRows, int kThreads>
class TileCopy {
public:
  static constexpr int kStep = kThreads / kChunks, kEach = kRows / kStep;
  static_assert(kThreads % (8 * kChunks) == 0 && kRows % kStep == 0, "whole steps, whose rows are swizzled alike");

  __device__ TileCopy(const Rows& rows, int64_t first, int K, int thread)
      : data_(rows.data + (first + thread / kChunks) * rows.stride + thread % kChunks * kChunk), step_(kStep * rows.stride),
        left_(K - thread % kChunks * kChunk), rows_(rows.count - first - thread / kChunks),
        offset_(Swizzled::offset(thread / kChunks, thread % kChunks)) {}

  __device__ void start(int block, uint32_t shared) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      copy_async(shared + offset_ + i * kStep * Swizzled::kPitch, data_ + i * step_ + int64_t(block) * kBlock, bytes(i, block));
    }
  }

  __device__ void fetch(int block, uint4 (&chunks)[kEach]) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) chunks[i] = load_chunk(data_ + i * step_ + int64_t(block) * kBlock, bytes(i, block));
  }

  __device__ void store(const uint4 (&chunks)[kEach], uint32_t shared) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) store_shared(shared + offset_ + i * kStep * Swizzled::kPitch, chunks[i]);
  }

private:
  __device__ int bytes(int i, int block) const {
    if (i * kStep >= rows_) return 0;
    const int left = left_ - block * kBlock;
    return left < 0 ? 0 : left < kChunk ? left : kChunk;
  }

  const int8_t* data_;
  int64_t step_;
  int left_;     // bytes of a row from the thread's chunk of the first block on
  int64_t rows_; // from the thread's first row on
  uint32_t offset_;
};

template <int kTileM_, int kTileN_, int kWarpM_, int kWarpN_, int kStages_, int kSwizzle_, class Out_>
struct TileShape {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kWarpM = kWarpM_, kWarpN = kWarpN_, kStages = kStages_, kSwizzle = kSwizzle_;
  using Out = Out_;
  static constexpr int kThreads = kTileM / kWarpM * (kTileN / kWarpN) * 32;
  static constexpr int kStageBytes = (kTileM + kTileN) * kBlock;
  // The finished tile takes the place of the stages.
  static constexpr int kOutPitch = kTileN * int(sizeof(Out)) + kChunk;
  static constexpr int kRingBytes = kStages * kStageBytes > kTileM* kOutPitch ? kStages* kStageBytes : kTileM* kOutPitch;
  static constexpr int kBlocks = kScalesOfStage<kTileN>;
  static constexpr int kSharedMemory = kRingBytes + ScaleLoader<kTileM, kBlocks>::kBytes;
  static_assert(kBlock % kTileN == 0, "a tile has one scale of b for a block of K");
  static_assert(kThreads >= kTileM, "a thread has at most one row's scale");
  static_assert(kStages >= 2, "one stage is read while the next is filled");
};

// shared: Shape::kSharedMemory bytes on 128. block: of the grid; the blocks go down M over kSwizzle tiles side by side, whose part
// of b stays in L2 meanwhile.
template <class Shape>
__device__ inline void compute_tile(const TileProblem& p, int block, int thread, unsigned char* shared) {
  using Out = typename Shape::Out;
  constexpr int kTileM = Shape::kTileM, kTileN = Shape::kTileN, kStages = Shape::kStages, kThreads = Shape::kThreads;
  const int first_n = block / (Shape::kSwizzle * p.tiles_m) * Shape::kSwizzle;
  const int width = Shape::kSwizzle < p.tiles_n - first_n ? Shape::kSwizzle : p.tiles_n - first_n;
  const int in_group = block - first_n * p.tiles_m;
  const int64_t tile_m = int64_t(in_group / width) * kTileM, tile_n = int64_t(first_n + in_group % width) * kTileN;

  const int warp = thread / 32, lane = thread % 32;
  const int warp_m = warp / (kTileN / Shape::kWarpN) * Shape::kWarpM, warp_n = warp % (kTileN / Shape::kWarpN) * Shape::kWarpN;
  const uint32_t ring = shared_address(shared);
  const auto stage_a = [&](int k) { return ring + uint32_t(k % kStages) * Shape::kStageBytes; };
  const auto stage_b = [&](int k) { return stage_a(k) + kTileM * kBlock; };

  const TileCopy<kTileM, kThreads> copy_a(p.a, tile_m, p.K, thread);
  const TileCopy<kTileN, kThreads> copy_b(p.b, tile_n, p.K, thread);
  ScaleLoader<kTileM, Shape::kBlocks> scales(p.scales, p.a.count, tile_m, tile_n, reinterpret_cast<float*>(shared + Shape::kRingBytes), thread);
  WarpTile<Swizzled, Shape::kWarpM, Shape::kWarpN> tile;
  tile.clear();
  const auto blocks_at = [&](int k) { return p.scales.blocks_of_stage(p.K - k * kBlock); };
  const auto multiply = [&](int k) {
    tile.template multiply_stage<Shape::kBlocks>(
        stage_a(k) + warp_m * kBlock, stage_b(k) + warp_n * kBlock, [&](int i) { return scales.of(k, i) + warp_m; }, p.scales.half, blocks_at(k),
        lane);
  };
  const auto fetch_scales = [&](int k) { scales.fetch(p.scales.half ? 2 * k : k, blocks_at(k)); };

  const int stages = stages_of(p.K);
  if (stages > 0) {
    fetch_scales(0);
    scales.publish(0);
  }
  if constexpr (kStages > 2) {
    // A group of copies for every stage, empty ones past the last: so one count of pending groups is right throughout.
    for (int k = 0; k < kStages - 1; ++k) {
      if (k < stages) {
        copy_a.start(k, stage_a(k));
        copy_b.start(k, stage_b(k));
      }
      commit_copies();
    }
    for (int k = 0; k < stages; ++k) {
      wait_for_copies<kStages - 2>();
      __syncthreads(); // stage k has arrived for every thread, and nobody reads stage k - 1 any more
      if (const int next = k + kStages - 1; next < stages) {
        copy_a.start(next, stage_a(next));
        copy_b.start(next, stage_b(next));
      }
      commit_copies();
      if (k + 1 < stages) fetch_scales(k + 1);
      multiply(k);
      if (k + 1 < stages) scales.publish(k + 1);
    }
  } else {
    uint4 chunks_a[TileCopy<kTileM, kThreads>::kEach], chunks_b[TileCopy<kTileN, kThreads>::kEach];
    if (stages > 0) {
      copy_a.fetch(0, chunks_a);
      copy_b.fetch(0, chunks_b);
      copy_a.store(chunks_a, stage_a(0));
      copy_b.store(chunks_b, stage_b(0));
    }
    for (int k = 0; k < stages; ++k) {
      const bool more = k + 1 < stages;
      if (more) {
        copy_a.fetch(k + 1, chunks_a);
        copy_b.fetch(k + 1, chunks_b);
      }
      __syncthreads(); // as above
      if (more) fetch_scales(k + 1);
      multiply(k);
      if (more) {
        copy_a.store(chunks_a, stage_a(k + 1));
        copy_b.store(chunks_b, stage_b(k + 1));
        scales.publish(k + 1);
      }
    }
  }

  // Through shared memory, so that a thread stores 16 bytes of a row.
  __syncthreads();
  tile.finish(p.epilogue, tile_n + warp_n, p.b.count, lane, [&](int row, int column, float x, float y) {
    cast(reinterpret_cast<Out*>(shared + (warp_m + row) * Shape::kOutPitch) + warp_n + column, x, y);
  });
  __syncthreads();
  constexpr int kVector = kChunk / int(sizeof(Out)), kVectors = kTileN / kVector;
  for (int i = thread; i < kTileM * kVectors; i += kThreads) {
    const int row = i / kVectors, column = i % kVectors * kVector;
    const int64_t m = tile_m + row, n = tile_n + column;
    if (m >= p.a.count || n >= p.b.count) continue;
    const unsigned char* from = shared + row * Shape::kOutPitch + column * int(sizeof(Out));
    Out* to = static_cast<Out*>(p.out) + m * p.out_stride + n;
    if (n + kVector <= p.b.count) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int v = 0; n + v < p.b.count; ++v) to[v] = reinterpret_cast<const Out*>(from)[v];
    }
  }
}

} // namespace scaled_mm::block_scaled
