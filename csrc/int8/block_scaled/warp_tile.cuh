// What every block-scaled kernel does with a tile that lies in shared memory: multiply a block of K, and scale it.
#pragma once

#include "int8/block_scaled/formula.cuh"
#include "int8/block_scaled/instructions.cuh"
#include "int8/mma.cuh"

namespace scaled_mm::block_scaled {

constexpr int kChunk = 16;               // bytes that are moved at once
constexpr int kChunks = kBlock / kChunk; // in a row of a tile

// Where a chunk of a row lies in shared memory. Eight rows' chunks of the same k must lie in different banks, for the instruction
// that loads matrices reads those at once. Swizzled does it by permuting each row's chunks, Padded by a gap after each row.
struct Swizzled {
  static constexpr int kPitch = kBlock;
  __device__ static uint32_t offset(int row, int chunk) { return uint32_t(row * kPitch + (chunk ^ (row % 8)) * kChunk); }
};
struct Padded {
  static constexpr int kPitch = kBlock + kChunk;
  __device__ static uint32_t offset(int row, int chunk) { return uint32_t(row * kPitch + chunk * kChunk); }
};

struct Scales {
  const float *a, *b;
  int64_t a_stride_m, a_stride_k, b_stride_k, b_stride_n;
  bool half; // blocks of kHalfBlock, else of kBlock

  __host__ __device__ int block() const { return half ? kHalfBlock : kBlock; }
  // Blocks of a stage, of K elements from the stage's first one on.
  __host__ __device__ int blocks_of_stage(int64_t K) const { return half && K > kHalfBlock ? 2 : 1; }
};

__host__ __device__ inline int stages_of(int64_t K) { return int((K + kBlock - 1) / kBlock); }

// Scales of a stage, for each of its blocks one for each row of the tile: fetched while the stage before is multiplied, then put into shared memory.
// A thread has the row of its number. kBlocks: that a stage may have.
template <int kTileM, int kBlocks>
class ScaleLoader {
public:
  static constexpr int kBytes = 2 * kBlocks * kTileM * int(sizeof(float));

  __device__ ScaleLoader(const Scales& s, int64_t M, int64_t tile_m, int64_t tile_n, float* shared, int thread)
      : shared_(shared), thread_(thread), active_(thread < kTileM && tile_m + thread < M), a_stride_(s.a_stride_k), b_stride_(s.b_stride_k) {
    if (active_) {
      a_ = s.a + (tile_m + thread) * s.a_stride_m;
      b_ = s.b + (s.half ? tile_n / kHalfBlock : tile_n / kBlock) * s.b_stride_n;
    }
  }
  // first: index along K of the stage's first block. blocks: the number of its blocks.
  __device__ void fetch(int first, int blocks) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (active_ && i < blocks) scales_[i] = combine_scales(a_[(first + i) * a_stride_], b_[(first + i) * b_stride_]);
    }
  }
  __device__ void publish(int stage) const {
    if (thread_ >= kTileM) return;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) shared_[(stage % 2 * kBlocks + i) * kTileM + thread_] = scales_[i];
  }
  __device__ const float* of(int stage, int i) const { return shared_ + (stage % 2 * kBlocks + i) * kTileM; }

private:
  float* shared_; // [2][kBlocks][kTileM]
  int thread_;
  bool active_;
  const float *a_ = nullptr, *b_ = nullptr;
  int64_t a_stride_, b_stride_;
  float scales_[kBlocks] = {};
};

// A warp's part of a tile, in the fragments of mma.m16n8k32.
template <class Layout, int kWarpM, int kWarpN>
struct WarpTile {
  static constexpr int kMmaM = kWarpM / 16, kMmaN = kWarpN / 8;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "whole fragments, those of b two at a time");

  float sums[kMmaM][kMmaN][4];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][j][c] = 0.0f;
      }
    }
  }

  // A block of kElements, from kFirst of the stage on. a, b: the addresses of this warp's rows, whose number in the tile is a multiple of 8; scales:
  // of its rows of a.
  template <int kFirst, int kElements>
  __device__ void multiply_block(uint32_t a, uint32_t b, const float* scales, int lane) {
    int acc[kMmaM][kMmaN][4];
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][j][c] = kStart;
      }
    }
#pragma unroll
    for (int step = kFirst / 32; step < (kFirst + kElements) / 32; ++step) {
      uint32_t words_a[kMmaM][4], words_b[kMmaN][2];
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) load_matrices(words_a[i], a + Layout::offset(i * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < kMmaN; j += 2) {
        uint32_t words[4];
        load_matrices(words, b + Layout::offset(j * 8 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
        words_b[j][0] = words[0];
        words_b[j][1] = words[1];
        words_b[j + 1][0] = words[2];
        words_b[j + 1][1] = words[3];
      }
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) mma_m16n8k32(acc[i][j], words_a[i], words_b[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = scales[i * 16 + half * 8 + lane / 4];
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            float& sum = sums[i][j][half * 2 + column];
            sum = add_block(sum, acc[i][j][half * 2 + column], scale);
          }
        }
      }
    }
  }

  // A stage. scale_of(i): the scales of its block i. blocks: that it has.
  template <int kBlocks, class ScaleOf>
  __device__ void multiply_stage(uint32_t a, uint32_t b, const ScaleOf& scale_of, bool half, int blocks, int lane) {
    if (kBlocks == 1 || !half) {
      multiply_block<0, kBlock>(a, b, scale_of(0), lane);
    } else {
      multiply_block<0, kHalfBlock>(a, b, scale_of(0), lane);
      if (blocks > 1) multiply_block<kHalfBlock, kHalfBlock>(a, b, scale_of(kBlocks - 1), lane);
    }
  }

  // write(row, column, value, value of the next column) for all of them, with their bias; rows and columns count from the warp's
  // first, which is column `n` of out. Columns are even.
  template <class Write>
  __device__ void finish(const EpilogueOperands& e, int64_t n, int64_t N, int lane, Write write) const {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
      const int column = j * 8 + lane % 4 * 2;
      const float bias = n + column < N ? load_bias(e, 0, n + column) : kNoBias;
      const float bias_next = n + column + 1 < N ? load_bias(e, 0, n + column + 1) : kNoBias;
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          write(i * 16 + half * 8 + lane / 4, column, add_bias(sums[i][j][half * 2], bias), add_bias(sums[i][j][half * 2 + 1], bias_next));
        }
      }
    }
  }
};

} // namespace scaled_mm::block_scaled
