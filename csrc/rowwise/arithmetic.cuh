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

// The type that norms, activations and rope of X compute in.
template <class X>
using WideOf = std::conditional_t<std::is_same_v<X, float>, double, float>;

template <class W>
struct Constants;

template <>
struct Constants<float> {
  using Integer = int32_t;
  static constexpr int kBias = 127, kFraction = 23;
  static constexpr float kLow = -110.0f; // below, exp is 0
  __host__ __device__ static float exp_polynomial(float f);
  __host__ __device__ static float erfc_polynomial(float t);
};

template <>
struct Constants<double> {
  using Integer = int64_t;
  static constexpr int kBias = 1023, kFraction = 52;
  static constexpr double kLow = -760.0;
  __host__ __device__ static double exp_polynomial(double f);
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

__host__ __device__ inline float Constants<float>::exp_polynomial(float f) {
  constexpr float kCoefficients[] = {0.009656710550189018f, 0.05583828315138817f, 0.24022530019283295f, 0.6931367516517639f};
  return polynomial(kCoefficients, f);
}

__host__ __device__ inline double Constants<double>::exp_polynomial(double f) {
  constexpr double kCoefficients[] = {1.5297323675330583e-05, 0.00015461444703785432, 0.0013333502386492506, 0.009618056678507231,
                                      0.055504108839093375,   0.2402265092228889,     0.6931471805599453};
  return polynomial(kCoefficients, f);
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

// The larger of two numbers, NaN if one of them is.
__host__ __device__ inline float larger(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return b > a || b != b ? b : a;
#endif
}
__host__ __device__ inline float smaller(float a, float b) { return -larger(-a, -b); }

constexpr float kMagic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold

// exp(v) for v <= 0 and NaN: 2^n * (1 + f * polynomial), n + f = v * log2 e.
__host__ __device__ inline double exp_of(double v) {
  v = v < Constants<double>::kLow ? Constants<double>::kLow : v; // NaN stays
  const double x = v * 1.4426950408889634, n = rint(x), f = x - n, half = floor(n * 0.5);
  return ((Constants<double>::exp_polynomial(f) * f + 1.0) * power_of_two(half)) * power_of_two(n - half);
}

// The same in fewer instructions: the product by 2^(n + 64) is exact.
__host__ __device__ inline float exp_of(float v) {
  const float x = larger(v, Constants<float>::kLow) * 1.44269504f, moved = x + kMagic, f = x - (moved - kMagic);
  uint32_t bits;
  memcpy(&bits, &moved, 4);
  bits = (bits << 23) + ((127u + 64) << 23); // 2^(n + 64)
  float power;
  memcpy(&power, &bits, 4);
  return ((Constants<float>::exp_polynomial(f) * f + 1.0f) * power) * 5.42101086e-20f; // 2^-64
}

template <class W>
__host__ __device__ inline W erfc_of(W z) {
  const W a = z < 0 ? -z : z, t = W(1) / (W(1) + W(0.5) * a);
  const W e = exp_of(-(a * a)) * (Constants<W>::erfc_polynomial(t) * t);
  return z < 0 ? W(2) - e : e;
}

// 1 / d, correctly rounded, for 1 <= d <= 2 and NaN.
__host__ __device__ inline double inverse_of(double d) { return 1.0 / d; }
__host__ __device__ inline float inverse_of(float d) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return fmaf(r, fmaf(-d, r, 1.0f), r); // of every float32 in [1, 2]: tests/rowwise/test_kernels.py
#else
  return 1.0f / d;
#endif
}

// g * sigmoid(v).
template <class W>
__host__ __device__ inline W sigmoid_times(W g, W v) {
  const W t = exp_of(-(v < 0 ? -v : v));
  if (v < 0) g = g * t;
  return g * inverse_of(W(1) + t);
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
