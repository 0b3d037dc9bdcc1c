// Values of a packed weight as the tensor cores multiply them if they may be rounded to 16 bits: 2^e (level * d + m). Each row has an e, by which
// no step overflows (formats.cuh). Levels are left at their place in a word, as subnormal numbers (levels.cuh). One multiply-add multiplies two of
// them by a multiple of 2^e d and adds what level 0 stands for, 2^e m or -zero * 2^e d, and rounds:
//
//   activations   format            rounded
//   float16       all               to float16
//   bfloat16      without a minimum d to bfloat16, then the value to bfloat16
//   bfloat16      with a minimum    to float16, then to bfloat16: level * d and m nearly cancel, so bfloat16 has too few bits for them
#pragma once

#include <type_traits>

#include "gguf/levels.cuh"

namespace scaled_mm::gguf {

// The stored power of a row is kPower * 2^e.
constexpr float kPower = 1 << 9;

// Two blocks of a thread's two rows, as values of type T.
template <class F, class T>
struct RoundedPair {
  using U = std::conditional_t<F::kMinimum, __half, T>; // what the multiply-adds compute in
  using P = Pairs<U>;
  static constexpr bool kHalf = std::is_same_v<U, __half>;

  PairLevels<F> levels;
  PairScales scales, minima;

  __device__ void load(const uint8_t* band, int pair, int lane) {
    levels.load(band, pair, lane);
    scales.load(band + F::kBandScales, pair, lane / 4);
    if constexpr (F::kMinimum) minima.load(band + F::kBandMinima, pair, lane / 4);
  }

  // Two stored numbers, float16, as a pair of U.
  __device__ static uint32_t as_pair(uint32_t stored) {
    if constexpr (kHalf) {
      return stored;
    } else {
      const float2 two = __half22float2(Pairs<__half>::of(stored));
      return P::bits(__floats2bfloat162_rn(two.x, two.y));
    }
  }

  // powers: as_pair of the stored powers of rows g and g + 8.
  __device__ Fragments fragments(int block, uint32_t powers) const {
    constexpr double kUnit = (kHalf ? 0x1p24 : 0x1p133) / kPower; // times kPower 2^e d: the factor of a level's bits
    constexpr int kZero = F::kBits == 8 ? 128 : F::kZero;         // bytes are used as level + 128
    const auto of_rows = [&](const PairScales& s) { return __hmul2(P::of(as_pair(s.word(block))), P::of(powers)); };
    const auto d = of_rows(scales), zero = F::kMinimum ? P::times(of_rows(minima), 1 / kPower) : P::times(d, -kZero / kPower);
    const auto low = P::times(d, kUnit), high = P::times(d, kUnit / (F::kBits == 5 ? 32 : 16)); // factors of levels whose `one` is 1, and of others
    Fragments f = levels.template fragments<Subnormal<U>>(block);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t& pair = f.a[i / 4][i % 4];
      const bool second = i % 2; // of the two rows: Fragments::set
      const auto value = __hfma2(P::of(pair), P::both(PairLevels<F>::template one<U>(block, i) == 1 ? low : high, second), P::both(zero, second));
      pair = P::bits(value);
      if constexpr (!std::is_same_v<T, U>) {
        const float2 two = __half22float2(value);
        pair = Pairs<T>::bits(__floats2bfloat162_rn(two.x, two.y));
      }
    }
    return f;
  }

  // 2^-e of a thread's two rows, exact.
  __device__ static float2 inverse_powers(uint32_t powers) {
    const auto two = P::of(powers);
    return {kPower / __low2float(two), kPower / __high2float(two)};
  }
};

} // namespace scaled_mm::gguf
