// exp, erfc and sigmoid of row-wise operators, in operations that each round once: the bits of scaled_mm/rowwise/arithmetic.py, whose formulas are
// in docs/design/numerics.md. Compiled without contraction (-fmad=false), with IEEE divisions and square roots.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace scaled_mm::rowwise {

// The type that an operator on X computes in.
template <class X>
using WideOf = std::conditional_t<std::is_same_v<X, float>, double, float>;

template <class W>
struct Constants;

template <>
struct Constants<float> {
  using Integer = int32_t;
  static constexpr int kBias = 127, kFraction = 23;
  static constexpr float kLow = -110.0f, kHigh = 89.0f; // beyond, exp is 0 or infinite
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194442749023438e-4f;
  __host__ __device__ static float exp_polynomial(float r);
  __host__ __device__ static float erfc_polynomial(float t);
};

template <>
struct Constants<double> {
  using Integer = int64_t;
  static constexpr int kBias = 1023, kFraction = 52;
  static constexpr double kLow = -760.0, kHigh = 710.0;
  static constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  __host__ __device__ static double exp_polynomial(double r);
  __host__ __device__ static double erfc_polynomial(double t);
};

// Horner's rule, the highest power first.
template <class W, int kCount>
__host__ __device__ inline W polynomial(const W (&coefficients)[kCount], W x) {
  W result = coefficients[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) result = result * x + coefficients[i];
  return result;
}

__host__ __device__ inline float Constants<float>::exp_polynomial(float r) {
  constexpr float kCoefficients[] = {0.008357199840247631f, 0.04183380305767059f, 0.16666631400585175f, 0.49999749660491943f};
  return polynomial(kCoefficients, r);
}

__host__ __device__ inline double Constants<double>::exp_polynomial(double r) {
  constexpr double kCoefficients[] = {0.00019890980869750327, 0.0013933641031986701, 0.008333310934448869,
                                      0.04166646500604005,    0.16666666681614256,   0.5000000013457727};
  return polynomial(kCoefficients, r);
}

__host__ __device__ inline float Constants<float>::erfc_polynomial(float t) {
  constexpr float kCoefficients[] = {-0.05235712602734566f, 0.25402361154556274f, -0.42926156520843506f, 0.21884174644947052f, 0.008622662164270878f,
                                     0.19038935005664825f,  0.24550308287143707f, 0.2821437418460846f,   0.28209447860717773f};
  return polynomial(kCoefficients, t);
}

__host__ __device__ inline double Constants<double>::erfc_polynomial(double t) {
  constexpr double kCoefficients[] = {0.01894443785873818, -0.11143371394984673, 0.24191166901429034, -0.1604094898201885,  -0.23574146030525628,
                                      0.5147553742204203,  -0.33215151680603827, 0.08678227962349602, -0.09560490888131576, 0.0026206827902637165,
                                      0.0829424441565841,  0.17636354017793732,  0.24683105283031012, 0.2820948174259401,   0.28209479171672364};
  return polynomial(kCoefficients, t);
}

// 2^n for an integral n within the exponents of normal numbers; NaN: any power.
template <class W>
__host__ __device__ inline W power_of_two(W n) {
  using Integer = typename Constants<W>::Integer;
  const Integer exponent = n == n ? Integer(n) : 0;
  const Integer bits = (exponent + Constants<W>::kBias) << Constants<W>::kFraction;
  W result;
  memcpy(&result, &bits, sizeof(W));
  return result;
}

template <class W>
__host__ __device__ inline W exp_of(W v) {
  using C = Constants<W>;
  v = v < C::kLow ? C::kLow : v > C::kHigh ? C::kHigh : v; // NaN stays
  const W n = rint(v * W(1.4426950408889634));             // log2 e
  const W r = (v - n * C::kLn2High) - n * C::kLn2Low;
  const W e = ((C::exp_polynomial(r) * r) * r + r) + W(1);
  const W half = floor(n * W(0.5));
  return (e * power_of_two(half)) * power_of_two(n - half);
}

template <class W>
__host__ __device__ inline W erfc_of(W z) {
  const W a = z < 0 ? -z : z, t = W(1) / (W(1) + W(0.5) * a);
  const W e = exp_of(-(a * a)) * (Constants<W>::erfc_polynomial(t) * t);
  return z < 0 ? W(2) - e : e;
}

// g * sigmoid(v).
template <class W>
__host__ __device__ inline W sigmoid_times(W g, W v) {
  const W t = exp_of(v < 0 ? v : -v);
  return (v < 0 ? g * t : g) / (W(1) + t);
}

template <class W>
__host__ __device__ inline W silu(W g) {
  return sigmoid_times(g, g);
}

template <class W>
__host__ __device__ inline W gelu(W g) {
  return (W(0.5) * g) * erfc_of(-(g * W(0.70710678118654757)));
}

template <class W>
__host__ __device__ inline W gelu_tanh(W g) {
  return sigmoid_times(g, W(1.5957691216057308) * (g * (W(1) + W(0.044715) * (g * g)))); // 2 sqrt(2 / pi)
}

// `sqrt` of a float is in double where the host's compiler has no overload.
__host__ __device__ inline float inverse_root(float v) { return 1.0f / sqrtf(v); }
__host__ __device__ inline double inverse_root(double v) { return 1.0 / sqrt(v); }

} // namespace scaled_mm::rowwise
