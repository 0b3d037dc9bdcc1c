// How the tiles of the output are dealt to thread blocks, as many as a GPU holds at once. Each has as many whole tiles as the others. What is
// left is shared, if that takes less than a round of whole tiles: the steps of K of those tiles, one after another, are dealt evenly, so
// that a thread block has a part of one tile, or the end of one and the start of the next. It leaves its sums in the workspace; a kernel
// of its own adds those of each tile, in the order of K, so that the result is the same every time.
#pragma once

#include <climits>

#include "gguf/output.cuh"

namespace scaled_mm::gguf {

// The tiles of an output, and how they are numbered: panel after panel of up to kPanel tiles of tokens, those of the same rows in a panel one
// after another. What a GPU computes at once then needs few rows and few tokens, which its L2 holds.
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
  // number: one beyond the last has a place as well, beyond theirs (Share).
  __host__ __device__ Place place_of(int number) const {
    const int first = number / (row_tiles * panel) * panel, in_panel = number - first * row_tiles, width = max(1, min(panel, token_tiles - first));
    return {in_panel / width, first + in_panel % width};
  }
};

struct Shares {
  int32_t whole;         // tiles of the output, the first ones, that are not shared
  int32_t tiles;         // that are
  int32_t blocks;        // thread blocks that share them, the first ones
  int32_t steps;         // of a tile: along K, 256 each
  int32_t each, longer;  // steps of a thread block; the first `longer` have one more
  int32_t thread_blocks; // of the kernel
  float4* sums;          // [blocks + tiles - 1][tiles of 8 tokens][threads that multiply]: of block b's part of tile t at b + t

  __host__ __device__ int first_step(int block) const { return block * each + min(block, longer); }
  // Of the sums of a thread block's part of a tile, in units of whole tiles of them.
  __host__ __device__ int64_t place_of(int block, int tile) const { return int64_t(block) + tile - whole; }
  __host__ __device__ int block_of(int step) const {
    const int of_longer = longer * (each + 1);
    return step < of_longer ? step / (each + 1) : longer + (step - of_longer) / each;
  }
};

// Shares the tiles that are left after whole rounds of `slots`, which is how many thread blocks the GPU holds at once, if that is
// reckoned to take less time. most: thread blocks to a tile, on average. tokens: of a tile.
inline Shares share_tiles(int64_t tiles, int64_t steps, int64_t slots, int64_t most, int tokens) {
  // In tenths of a step: starting, adding sums afterwards, and that a thread block has parts of two tiles (from times of rows by hand).
  const int64_t kStart = 10, kAdd = 20, kSecond = tokens > 128 ? 100 : 1;
  const int64_t rest = slots > 0 ? tiles % slots : 0;
  int64_t best = 0, least = 10 * steps + kStart;
  const auto consider = [&](int64_t blocks) {
    if (blocks <= rest || blocks > slots || blocks > rest * most || blocks > rest * steps) return;
    const int64_t cost = tiles_of(10 * rest * steps, blocks) + (blocks % rest ? kSecond : 0) + kStart + kAdd;
    if (cost < least) best = blocks, least = cost;
  };
  if (rest > 0 && rest <= INT_MAX / (steps > 0 ? steps : 1)) {
    for (int64_t parts = 2; parts <= most; ++parts) consider(rest * parts);
    consider(slots);
  }
  const bool rounds = slots > 0 && steps > 0 && tiles > slots;
  Shares s = {int32_t(tiles), 0, 0, int32_t(steps), 0, 0, int32_t(rounds ? slots : tiles), nullptr};
  if (best == 0) return s;
  s.whole = int32_t(tiles - rest), s.tiles = int32_t(rest), s.blocks = int32_t(best);
  s.each = int32_t(rest * steps / best), s.longer = int32_t(rest * steps % best);
  if (!rounds) s.thread_blocks = s.blocks;
  return s;
}

// Steps `begin`, begin + 1, ... of a tile that is shared.
struct Part {
  int tile, begin, count;
};

// Where a thread block is with its work: at a whole tile, of which those of a thread block are as many apart as there are thread blocks, or
// at a part of its share, the first or the last. One number, the same for all threads: there are hardly any registers for more.
struct Work {
  static constexpr int kFirst = -2, kLast = -1;
  int at;

  __host__ __device__ static Work begin(const Shares& shares, int block) { return {block < shares.whole ? block : int(kFirst)}; }
  __host__ __device__ bool whole() const { return at >= 0; }
  // On to what is next; false: that was all.
  __host__ __device__ bool advance(const Shares& shares, int block, int thread_blocks) {
    if (at >= 0) {
      const bool more = at < shares.whole - thread_blocks;
      at = more ? at + thread_blocks : int(kFirst);
      return more || block < shares.blocks;
    }
    return ++at <= kLast;
  }
};

// The share of a thread block, in shared memory. The last part may have no steps.
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
  int32_t tokens; // of a tile; its rows are half its threads
};

// A thread block for 8 tokens of a tile.
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
  const float bias[2] = {p.output.bias_of(row), p.output.bias_of(row + 8)}, sums[4] = {sum.x, sum.y, sum.z, sum.w};
  p.output.store_fragment(token, row, sums, bias);
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
