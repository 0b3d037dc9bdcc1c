// The minima of formats that have them: added once a step, for all its blocks, if the activations come with their sums.
#pragma once

#include "gguf/levels.cuh"
#include "gguf/output.cuh"
#include "gguf/wgmma_shape.cuh"

namespace scaled_mm::gguf {

// band: the warp's 16 rows of the weight's tile. Adds nothing for other formats and activations.
template <class F, class S, Factors kFactors>
__device__ __forceinline__ void add_minima(typename S::Storage& s, const uint8_t* band, int stage, int lane, float (&sums)[S::kTokens / 8][4]) {
  if constexpr (kFactors == Factors::kSums) {
    const Middles minima = Middles::of<F>(band, lane);
#pragma unroll
    for (int tile = 0; tile < S::kTokens / 8; ++tile) minima.add(sums[tile], s.sums_of_values[stage][tile * 32 + lane]);
  }
}

} // namespace scaled_mm::gguf
