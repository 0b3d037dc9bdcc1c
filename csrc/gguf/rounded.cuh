// Values of a packed weight as the tensor cores multiply them if they may be rounded to 16 bits: level * d + m, rounded once to float16, for
// bfloat16 activations again to bfloat16. Levels are left at their place in a word, as subnormal float16 numbers (levels.cuh): one multiply-add
// multiplies two of them by 2^(24 + e) d and adds 2^e times what level 0 stands for, m or -zero * d. Each row has an e, by which none of these
// overflows (formats.cuh).
#pragma once

#include <type_traits>

#include "gguf/levels.cuh"

namespace scaled_mm::gguf {

// The stored power of a row is kPower * 2^e.
constexpr float kPower = 1 << 9;

// 2^-e of a thread's two rows, g and g + 8 of a band: exact.
__device__ inline float2 inverse_powers(uint32_t powers) {
  const float2 two = __half22float2(Pairs<__half>::of(powers));
  return {kPower / two.x, kPower / two.y};
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

  // powers: of rows g and g + 8, as stored.
  template <class T>
  __device__ Fragments fragments(int block, uint32_t powers) const {
    using P = Pairs<__half>;
    constexpr float kUnit = float(1 << 24) / kPower;      // 2^15: turns the stored power times d, 2^(e + 9) d, into 2^(e + 24) d
    constexpr int kZero = F::kBits == 8 ? 128 : F::kZero; // bytes are used as level + 128
    const auto of_rows = [&](const PairScales& s) { return __hmul2(P::of(block ? s.words.y : s.words.x), P::of(powers)); };
    const auto times = [](__half2 value, float power) { return __hmul2(value, __float2half2_rn(power)); };
    const __half2 d = of_rows(scales);
    const __half2 zero = F::kMinimum ? times(of_rows(minima), 1 / kPower) : times(d, -kZero / kPower);
    const __half2 plain = times(d, kUnit), higher = times(d, kUnit / (F::kBits == 5 ? 32 : 16));
    Fragments f = levels.template fragments<Subnormal>(block);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t& pair = f.a[i / 4][i % 4];
      const __half2 rows_d = PairLevels<F>::one(block, i) == 1 ? plain : higher;
      const bool second = i % 2; // of the two rows: Fragments::set
      const __half2 value =
          __hfma2(P::of(pair), second ? __high2half2(rows_d) : __low2half2(rows_d), second ? __high2half2(zero) : __low2half2(zero));
      if constexpr (std::is_same_v<T, __half>) {
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
