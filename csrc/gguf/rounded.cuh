// Values of a packed weight as the tensor cores multiply them if they may be rounded to 16 bits: level * d + m, rounded once to float16, for
// bfloat16 activations again to bfloat16. d and m are multiplied by the power of two of their row first, so float16's range is wide enough.
#pragma once

#include "gguf/levels.cuh"

namespace scaled_mm::gguf {

// The inverse powers of a thread's two rows, g and g + 8 of a band: exact.
__device__ inline float2 inverse_powers(uint32_t powers) {
  const float2 two = __half22float2(Pairs<__half>::of(powers));
  return {1.0f / two.x, 1.0f / two.y};
}

// Two blocks of a thread's two rows.
template <class F>
struct RoundedPair {
  PairLevels<F> levels;
  PairScales scales, minima;

  __device__ void load(const uint8_t* band, int pair, int lane) {
    levels.load(band, pair, lane);
    scales.load(band + F::kBandScales, pair, lane / 4);
    if constexpr (F::kMinimum) minima.load(band + F::kBandMinima, pair, lane / 4);
  }

  // powers: of rows g and g + 8.
  template <class T>
  __device__ Fragments fragments(int block, uint32_t powers) const {
    using P = Pairs<__half>;
    const auto of_rows = [&](const PairScales& s) { return __hmul2(P::of(block ? s.words.y : s.words.x), P::of(powers)); };
    const __half2 d = of_rows(scales), rows_d[2] = {__low2half2(d), __high2half2(d)};
    __half2 rows_m[2] = {};
    if constexpr (F::kMinimum) {
      const __half2 m = of_rows(minima);
      rows_m[0] = __low2half2(m), rows_m[1] = __high2half2(m);
    }
    Fragments f = levels.template fragments<__half>(block);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t& pair = f.a[i / 4][i % 4];
      const int row = i % 2; // Fragments::set
      const __half2 value = F::kMinimum ? __hfma2(P::of(pair), rows_d[row], rows_m[row]) : __hmul2(P::of(pair), rows_d[row]);
      if constexpr (sizeof(T) == 2 && Pairs<T>::kBase == P::kBase) {
        pair = P::bits(value);
      } else {
        const float2 two = __half22float2(value);
        pair = Pairs<T>::bits(__floats2bfloat162_rn(two.x, two.y));
      }
    }
    return f;
  }
};

} // namespace scaled_mm::gguf
