// The activations of few tokens, 16-bit floats, read in place: warps copy them to shared memory beside the weight, so that no staging kernel
// runs first. From Ampere on.
#pragma once

#include <type_traits>

#include "gguf/copies.cuh"
#include "gguf/instructions.cuh"
#include "gguf/stage.cuh"

namespace scaled_mm::gguf {

struct RowsParams {
  const uint8_t* from; // every token's row is aligned to 16 bytes
  int64_t stride;      // bytes from token to token
  int32_t K, tokens;
};

// How a kernel reads its activations: staged in the workspace, in place (Rows), or in place for one or two tokens (Few).
enum class Activations { kStaged, kRows, kFew };

// A slot holds the activations for the K of one tile of the weight: first a row of 16-bit floats per token, then, if needed, the sums of
// its blocks per token, in the layout of Factors::kSums.
struct Rows {
  static constexpr int kTileBytes = kTileK * 2, kRowBytes = kTileBytes + 16; // padded: rows begin in different banks
  static constexpr int kSumBytes = kTileBlocks * int(sizeof(float2));

  const RowsParams& p;

  __host__ __device__ static int slot_bytes(int tokens, bool sums) { return tokens * (kRowBytes + (sums ? kSumBytes : 0)); }

  // A warp starts the copies of a slot. Zeros past K.
  __device__ void load(uint8_t* slot, int tile, int lane) const {
    const int at = tile * kTileBytes + lane * 16;
    const bool there = at < p.K * 2;
    const uint8_t* from = p.from + (there ? at : 0);
    uint8_t* to = slot + lane * 16;
#pragma unroll 1
    for (int token = 0; token < p.tokens; ++token, to += kRowBytes, from += p.stride) copy_or_clear_async(to, from, there);
  }

  // The operand of a block: 32 k of the 8 tokens of tile `tile`. Lanes past the last token load its row; their products are not stored.
  __device__ uint4 operand(const uint8_t* slot, int block, int tile, int lane) const {
    const uint8_t* row = slot + min(tile * 8 + lane % 8, p.tokens - 1) * kRowBytes + lane / 8 * 16 + block * kBlock * 2;
    return load_matrices(uint32_t(__cvta_generic_to_shared(row)));
  }

  // A warp sums each block of a tile's tokens, in a slot that it has loaded and waited for, by multiplying by ones.
  template <class T>
  __device__ void add_up(uint8_t* slot, int tile, int lane) const {
    constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00 : 0x3f803f80;
    constexpr uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
    const int own = lane / 4, token = tile * 8 + lane % 4 * 2; // this lane stores the sums of block `own` for `token` and token + 1
    float sums[2] = {};
#pragma unroll
    for (int block = 0; block < kTileBlocks; ++block) {
      const uint4 v = operand(slot, block, tile, lane);
      float sum[4] = {};
      mma_m16n8k16<T>(sum, ones, v.x, v.y);
      mma_m16n8k16<T>(sum, ones, v.z, v.w);
      if (block == own) sums[0] = sum[0], sums[1] = sum[1];
    }
    uint8_t* to = slot + p.tokens * kRowBytes + token * kSumBytes + (own % 4 * 2 + own / 4) * int(sizeof(float2));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (token + i < p.tokens) *reinterpret_cast<float2*>(to + i * kSumBytes) = two_tf32(sums[i]);
    }
  }
  __device__ uint4 sums(const uint8_t* slot, int tile, int lane) const {
    return *reinterpret_cast<const uint4*>(slot + p.tokens * kRowBytes + min(tile * 8 + lane / 4, p.tokens - 1) * kSumBytes + lane % 4 * 16);
  }
};

// Synchronizes `warps` warps of a thread block. barrier: 1 to 15.
__device__ inline void meet(int barrier, int warps) {
  if (warps > 1) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(warps * 32) : "memory");
  } else {
    __syncwarp();
  }
}

} // namespace scaled_mm::gguf
