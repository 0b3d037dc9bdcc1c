// Deals the tiles of the output to persistent thread blocks, as many as a GPU holds at once, as in stream-K. Every thread block gets the same
// number of whole tiles. The remaining tiles are shared if that takes less time than one more round of whole tiles: their steps of K,
// concatenated, are dealt evenly. A thread block then has a part of one tile, or the end of one and the start of the next. It writes its
// partial sums to the workspace. A second kernel adds them for each tile in the order of K, so the result is deterministic. Clusters
// (wgmma_cluster.cuh) compute whole tiles only.
#pragma once

#include "core/sharing.h"
#include "gguf/output.cuh"

namespace scaled_mm::gguf {

// The tiles of an output and their numbers: panel by panel of up to kPanel tiles of tokens; within a panel, tiles of the same rows are
// consecutive. The tiles that a GPU computes at a time then need few rows and few tokens, which fit in L2.
struct OutputTiles {
  static constexpr int kPanel = 4;
  int32_t row_tiles, token_tiles, panel;

  struct Place {
    int row_tile, token_tile;
  };
  // row_tiles * token_tiles: at most INT_MAX.
  static OutputTiles of(int64_t row_tiles, int64_t token_tiles) {
    return {int32_t(row_tiles), int32_t(token_tiles), int32_t(token_tiles < kPanel ? token_tiles : kPanel)};
  }
  // number: may be one past the last tile, which gets a place of its own (Share::fill makes such a part, without steps).
  __host__ __device__ Place place_of(int number) const {
    const int first = number / (row_tiles * panel) * panel, in_panel = number - first * row_tiles, width = max(1, min(panel, token_tiles - first));
    return {in_panel / width, first + in_panel % width};
  }
};

struct Shares {
  int32_t whole;         // the first `whole` tiles of the output are not shared
  int32_t tiles;         // shared tiles, which follow
  int32_t blocks;        // the first `blocks` thread blocks share them
  int32_t steps;         // per tile: 256 elements of K each
  int32_t each, longer;  // shared steps per thread block; the first `longer` thread blocks have one more
  int32_t thread_blocks; // of the kernel's grid; with clusters, the number of clusters
  float4* sums;          // [blocks + tiles - 1][tiles of 8 tokens][consumer threads]: thread block b's part of shared tile t is at b + t

  __host__ __device__ int first_step(int block) const { return block * each + min(block, longer); }
  // The first index of `sums` for a thread block's part of a tile.
  __host__ __device__ int64_t place_of(int block, int tile) const { return int64_t(block) + tile - whole; }
  __host__ __device__ int block_of(int step) const {
    const int of_longer = longer * (each + 1);
    return step < of_longer ? step / (each + 1) : longer + (step - of_longer) / each;
  }
};

// Shares the tiles that remain after whole rounds, if the estimate says that this takes less time (sharing_blocks, which also explains steps, most
// and tokens). tiles: of the output. slots: thread blocks that the GPU holds at once.
inline Shares share_tiles(int64_t tiles, int64_t steps, int64_t slots, int64_t most, int tokens) {
  const int64_t rest = slots > 0 ? tiles % slots : 0;
  const int64_t best = sharing_blocks(rest, steps, slots, most, tokens);
  const bool rounds = slots > 0 && steps > 0 && tiles > slots;
  Shares s = {int32_t(tiles), 0, 0, int32_t(steps), 0, 0, int32_t(rounds ? slots : tiles), nullptr};
  if (best == 0) return s;
  s.whole = int32_t(tiles - rest), s.tiles = int32_t(rest), s.blocks = int32_t(best);
  s.each = int32_t(rest * steps / best), s.longer = int32_t(rest * steps % best);
  if (!rounds) s.thread_blocks = s.blocks;
  return s;
}

// `count` steps of a tile, from `begin` on.
struct Part {
  int tile, begin, count;
};

// A thread block's position in its work: the number of a whole tile, or kFirst or kLast for the parts of its share. Its whole tiles are
// Shares::thread_blocks apart. One number, uniform across threads, because registers are scarce.
struct Work {
  static constexpr int kFirst = -2, kLast = -1;
  int at;

  __host__ __device__ static Work begin(const Shares& shares, int block) { return {block < shares.whole ? block : int(kFirst)}; }
  __host__ __device__ bool whole() const { return at >= 0; }
  // Moves to the next piece of work; false if there is none.
  __host__ __device__ bool advance(const Shares& shares, int block, int thread_blocks) {
    if (at >= 0) {
      const bool more = at < shares.whole - thread_blocks;
      at = more ? at + thread_blocks : int(kFirst);
      return more || block < shares.blocks;
    }
    return ++at <= kLast;
  }
};

// A thread block's share, in shared memory. The last part may have no steps.
struct Share {
  Part part[2];

  __host__ __device__ void fill(const Shares& shares, int block) {
    if (block >= shares.blocks) return;
    const int first = shares.first_step(block), all = shares.first_step(block + 1) - first, begin = first % shares.steps;
    const int tile = shares.whole + first / shares.steps, own = min(all, shares.steps - begin);
    part[0] = {tile, begin, own};
    part[1] = {tile + 1, 0, all - own};
  }
  __host__ __device__ const Part& operator[](Work work) const { return part[work.at - Work::kFirst]; }
};

struct AddParams {
  Shares shares;
  Output output;
  OutputTiles tiles;
  int32_t tokens; // per tile
};

// One thread block per 8 tokens of a shared tile, with two threads per row of the tile.
static __global__ void add_shares(const __grid_constant__ AddParams p) {
  let_next_kernel_start();
  const int parts = p.tokens / 8, tile = int(blockIdx.x) / parts, part = int(blockIdx.x) % parts;
  const int first = p.shares.block_of(tile * p.shares.steps), last = p.shares.block_of((tile + 1) * p.shares.steps - 1);
  const int lane = int(threadIdx.x) % 32, number = p.shares.whole + tile;
  const OutputTiles::Place at = p.tiles.place_of(number);
  const int row = at.row_tile * (int(blockDim.x) / 2) + int(threadIdx.x) / 32 * 16 + lane / 4;
  const int token = at.token_tile * p.tokens + part * 8 + lane % 4 * 2;
  wait_for_preceding_kernel();
  float4 sum{};
#pragma unroll 4
  for (int block = first; block <= last; ++block) {
    const float4 one = p.shares.sums[(p.shares.place_of(block, number) * parts + part) * blockDim.x + threadIdx.x];
    sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
  }
  const float bias[2] = {p.output.bias_of(row), p.output.bias_of(row + 8)}, sums[1][4] = {{sum.x, sum.y, sum.z, sum.w}};
  p.output.store_fragments<1>(token, row, sums, bias);
}

static DeviceKernel& add_shares_kernel() {
  static DeviceKernel one(&add_shares);
  return one;
}

static scaledMMStatus_t launch_add_shares(const AddParams& p, int rows, const GemmLaunch& l, char* message, size_t size) {
  LaunchShape shape;
  shape.grid = dim3(unsigned(p.shares.tiles * (p.tokens / 8)));
  shape.block = dim3(rows * 2);
  shape.dependent = true;
  void* params[] = {const_cast<AddParams*>(&p)};
  return launch_kernel(add_shares_kernel(), shape, params, l, message, size);
}

} // namespace scaled_mm::gguf
