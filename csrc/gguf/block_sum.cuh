// The sum of the 32 values of a GGUF block, in the order that is part of q8_1's definition. Four adjacent threads share a block.
#pragma once

namespace scaled_mm::gguf {

constexpr int kEach = 8, kSharers = 4; // values per thread; adjacent threads per block

// The sum of a block, in all its threads. The order is that of scaled_mm/gguf/quantize.py: pairs 16, 8, 4, 2, 1 elements apart. Two threads that
// exchange elements continue with half of the sums each.
__device__ inline float block_sum(const float (&x)[kEach]) {
  const bool upper = threadIdx.x & 2, right = threadIdx.x & 1;
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) { // of elements 0, 1, 4, 5, or of 2, 3, 6, 7
    const float low = x[i / 2 * 4 + i % 2], high = x[i / 2 * 4 + i % 2 + 2];
    four[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    two[i] = (right ? four[2 * i + 1] : four[2 * i]) + __shfl_xor_sync(~0u, right ? four[2 * i] : four[2 * i + 1], 1);
  }
  float sum = two[0] + two[1];
  sum += __shfl_xor_sync(~0u, sum, 2);
  return sum + __shfl_xor_sync(~0u, sum, 1);
}

} // namespace scaled_mm::gguf
