// Groupwise quantization to int8: a scale for a block of kBlock elements of a row, or for kBlock x kBlock elements of a weight.
#pragma once

#include "rowwise/kernel.cuh"

namespace scaled_mm::rowwise {

constexpr int kInt8Block = 128, kSmallInt8Block = 64;
constexpr int kInt8BlockThreads = 256;

struct Int8Blocks {
  uint32_t blocks, blocks_k, blocks_n; // all; along K; along N of a weight
  int64_t N;                           // rows of a matrix of the batch
  int K;
  bool truncates; // quotients are rounded toward zero; else to the nearest integer
  Matrix x, out;
  int64_t x_stride_batch, out_stride_batch;
  float* scale;
  int64_t scale_stride_batch, scale_stride_n, scale_stride_k;
  const int32_t* rows_end; // rows of tokens from this one on are not computed, or nullptr
};

__device__ inline Chunk<int8_t> int8_block_chunk(const Int8Blocks& p, const float (&y)[kChunk], const Quantizer& quantizer) {
  return p.truncates ? truncate(y, quantizer) : quantize(y, quantizer);
}

// A block of a token's row: the part of one thread of the half or quarter warp that has it.
template <class X, int kBlock = kInt8Block>
struct TokenBlock {
  static constexpr int kAcross = kBlock / kChunk; // threads of a block
  bool inside;                                    // false past the last row; such threads stay for the warp's shuffles
  int64_t row;
  int column, k;
  float y[kChunk] = {};
  Quantizer quantizer;

  static constexpr uint32_t kEach = kInt8BlockThreads / kAcross; // blocks of a thread block

  // first: the index of the thread block's first block, divided by kEach.
  __device__ TokenBlock(const Int8Blocks& p, uint32_t first) {
    const uint32_t block = first * kEach + threadIdx.x / kAcross;
    row = block / p.blocks_k;
    inside = block < p.blocks && !is_absent(row, p.N, p.rows_end);
    column = int(block % p.blocks_k);
    k = column * kBlock + int(threadIdx.x) % kAcross * kChunk;
    if (inside) load_chunk<X>(p.x, row, k, p.K, y);
    uint32_t bits = magnitude_bits(largest_of(y, 0));
#pragma unroll
    for (int step = kAcross / 2; step > 0; step /= 2) {
      const uint32_t other = __shfl_xor_sync(~0u, bits, step);
      bits = other > bits ? other : bits;
    }
    quantizer = Quantizer::of_largest(bits);
  }
  // q: y, quantized.
  __device__ void write(const Int8Blocks& p, int64_t to, const Chunk<int8_t>& q) const {
    if (threadIdx.x % kAcross == 0) p.scale[to * p.scale_stride_n + column * p.scale_stride_k] = quantizer.scale;
    store_chunk(p.out, to, k, p.K, q);
  }
};

// Half a warp quantizes a block of 128 elements, a quarter of a warp one of 64.
template <class X, int kBlock>
__global__ void __launch_bounds__(kInt8BlockThreads) int8_block_token_kernel(const __grid_constant__ Int8Blocks p) {
  wait_for_preceding_kernel();
  using Block = TokenBlock<X, kBlock>;
  for (uint32_t first = blockIdx.x; first * Block::kEach < p.blocks; first += gridDim.x) {
    if (is_absent(first * Block::kEach / p.blocks_k, p.N, p.rows_end)) return; // and all blocks after it
    const Block block(p, first);
    if (block.inside) block.write(p, block.row, int8_block_chunk(p, block.y, block.quantizer));
  }
}

// A thread block has a block, in registers.
template <class X, int kBlock>
__global__ void __launch_bounds__(kInt8BlockThreads) int8_block_weight_kernel(const __grid_constant__ Int8Blocks p) {
  wait_for_preceding_kernel();
  const Group<kInt8BlockThreads> group;
  constexpr int kAcross = kBlock / kChunk, kDown = kInt8BlockThreads / kAcross,
                kHeld = kBlock / kDown; // chunks of a row; rows at once; chunks of a thread
  const uint32_t column = blockIdx.x % p.blocks_k, rest = blockIdx.x / p.blocks_k;
  const uint32_t block_row = rest % p.blocks_n;
  const int64_t batch = rest / p.blocks_n, first = int64_t(block_row) * kBlock + group.thread / kAcross;
  const int k = int(column) * kBlock + group.thread % kAcross * kChunk;
  const Matrix x = {static_cast<X*>(p.x.data) + batch * p.x_stride_batch, p.x.stride_row, p.x.stride_k, p.x.vectors};
  const Matrix out = {static_cast<int8_t*>(p.out.data) + batch * p.out_stride_batch, p.out.stride_row, p.out.stride_k, p.out.vectors};
  float held[kHeld][kChunk] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * kDown < p.N) load_chunk<X>(x, first + i * kDown, k, p.K, held[i]);
  }
  float most = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) most = largest_of(held[i], most);
  const Quantizer quantizer = Quantizer::of_largest(group.largest(magnitude_bits(most)));
  if (group.thread == 0) p.scale[batch * p.scale_stride_batch + block_row * p.scale_stride_n + column * p.scale_stride_k] = quantizer.scale;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * kDown >= p.N) continue;
    store_chunk(out, first + i * kDown, k, p.K, int8_block_chunk(p, held[i], quantizer));
  }
}

} // namespace scaled_mm::rowwise
