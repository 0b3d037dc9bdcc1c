// From the sums of blocks to the output: scales and minima, bias, cast, and a store with any strides.
#pragma once

#include <type_traits>

#include "gguf/formats.cuh"
#include "gguf/instructions.cuh"
#include "gguf/stage.cuh"

namespace scaled_mm::gguf {

template <class T>
__device__ inline uint32_t pair_of(float first, float second) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 two = __floats2half2_rn(first, second);
    return reinterpret_cast<const uint32_t&>(two);
  } else {
    const __nv_bfloat162 two = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const uint32_t&>(two);
  }
}

struct Output {
  void* out;
  int64_t stride_m, stride_n;
  const void* bias;
  int64_t bias_stride;
  int32_t dtype, bias_dtype;
  int32_t M, N;              // tokens, rows of the weight
  const float* token_scales; // [M], and room for one more if M is odd; nullptr: 1. Powers of two
  bool pairs;                // the outputs of rows n and n + 1, n even, are one aligned word, for every token

  __device__ float bias_of(int n) const {
    if (bias == nullptr || n >= N) return 0.0f;
    const int64_t at = n * bias_stride;
    if (bias_dtype == SCALED_MM_DTYPE_FLOAT32) return static_cast<const float*>(bias)[at];
    if (bias_dtype == SCALED_MM_DTYPE_FLOAT16) return __half2float(static_cast<const __half*>(bias)[at]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[at]);
  }
  // The scales of tokens m and m + 1, m even. By __ldg, or each load would wait for the store before it, which might have changed it.
  __device__ float2 scales_of(int m) const {
    return token_scales && m < M ? __ldg(reinterpret_cast<const float2*>(token_scales + m)) : float2{1.0f, 1.0f};
  }
  // bias_of_row: that of n.
  __device__ float value_of(float sum, float scale, float bias_of_row) const {
    const float value = sum * scale;
    return bias ? value + bias_of_row : value;
  }
  __device__ void store(int m, int n, float sum, float bias_of_row) const {
    if (m < M) store(m, n, sum, token_scales ? token_scales[m] : 1.0f, bias_of_row);
  }
  __device__ void store(int m, int n, float sum, float scale, float bias_of_row) const {
    dtype == SCALED_MM_DTYPE_FLOAT32 ? store_as<float>(m, n, sum, scale, bias_of_row) : store_as<uint16_t>(m, n, sum, scale, bias_of_row);
  }
  // Stores kFragments fragments of a thread, each with four results: tokens m and m + 1, m even, rows n and n + 8. The next fragment is 8 tokens
  // later. of_rows: the bias of the two rows. All lanes of a warp call it. The dtype's size is checked once: code for both at every store would not
  // fit in the instruction cache.
  template <int kFragments>
  __device__ void store_fragments(int m, int n, const float (*sums)[4], const float (&of_rows)[2]) const {
    if (pairs) return store_pairs<kFragments>(m, n, sums, of_rows);
    dtype == SCALED_MM_DTYPE_FLOAT32 ? store_apart<kFragments, float>(m, n, sums, of_rows) : store_apart<kFragments, uint16_t>(m, n, sums, of_rows);
  }

private:
  // T: float, or uint16_t for both dtypes of 16 bits.
  template <class T>
  __device__ void store_as(int m, int n, float sum, float scale, float bias_of_row) const {
    if (m >= M || n >= N) return;
    const float value = value_of(sum, scale, bias_of_row);
    T& to = static_cast<T*>(out)[m * stride_m + n * stride_n];
    if constexpr (std::is_same_v<T, float>) {
      to = value;
    } else {
      to = dtype == SCALED_MM_DTYPE_FLOAT16 ? __half_as_ushort(__float2half_rn(value)) : __bfloat16_as_ushort(__float2bfloat16_rn(value));
    }
  }
  template <int kFragments, class T>
  __device__ void store_apart(int m, int n, const float (*sums)[4], const float (&of_rows)[2]) const {
#pragma unroll
    for (int i = 0; i < kFragments; ++i, m += 8) {
      const float2 scales = scales_of(m);
#pragma unroll
      for (int j = 0; j < 4; ++j) store_as<T>(m + j % 2, n + 8 * (j / 2), sums[i][j], j % 2 ? scales.y : scales.x, of_rows[j / 2]);
    }
  }
  // Lanes exchange their results, so that each has two rows of one token.
  template <int kFragments>
  __device__ void store_pairs(int m, int n, const float (*sums)[4], const float (&of_rows)[2]) const {
    const int lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4, row = n - g + 2 * t;
#pragma unroll
    for (int i = 0; i < kFragments; ++i, m += 8) {
      const float2 scales = scales_of(m);
      const int token = m - 2 * t + g;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = value_of(sums[i][2 * half], scales.x, of_rows[half]), second = value_of(sums[i][2 * half + 1], scales.y, of_rows[half]);
        const uint32_t word = transposed(dtype == SCALED_MM_DTYPE_FLOAT16 ? pair_of<__half>(first, second) : pair_of<__nv_bfloat16>(first, second));
        if (token < M && row + 8 * half < N) *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + token * stride_m + row + 8 * half) = word;
      }
    }
  }
};

inline Output output_of(const GemmLaunch& l, const float* token_scales) {
  const bool pairs = l.blocks->out_dtype != SCALED_MM_DTYPE_FLOAT32 && l.out_stride_n == 1 && l.N % 2 == 0 && (l.M == 1 || l.out_stride_m % 2 == 0) &&
                     reinterpret_cast<uintptr_t>(l.out) % 4 == 0;
  return {l.out,        l.out_stride_m, l.out_stride_n, l.bias,       l.bias_stride, l.blocks->out_dtype,
          l.bias_dtype, int32_t(l.M),   int32_t(l.N),   token_scales, pairs};
}

// Scales a block's sums p and adds them to `sums`: four results of a thread's fragment, rows g and g + 8, tokens 2 t and 2 t + 1. d: the scales of
// the two rows. m: their minima; with Factors::kFloats their middles. factors: (factor, addend) of both tokens. With Factors::kSums, Middles
// adds the minima.
template <bool kMinimum, Factors kFactors>
__device__ inline void add_block(float* sums, const float* p, float2 d, float2 m, float4 factors) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scale = i < 2 ? d.x : d.y;
    if constexpr (kFactors == Factors::kNone || kFactors == Factors::kSums) {
      sums[i] = fmaf(scale, p[i], sums[i]);
    } else {
      const float factor = i % 2 ? factors.z : factors.x, addend = i % 2 ? factors.w : factors.y;
      if constexpr (kMinimum) {
        sums[i] = fmaf(i < 2 ? m.x : m.y, addend, fmaf(scale, factor * p[i], sums[i]));
      } else {
        sums[i] = fmaf(scale, fmaf(factor, p[i], addend), sums[i]);
      }
    }
  }
}

// The values of the middle level in a thread's two rows, from their scales and minima.
template <class F>
__device__ inline float2 middles(float2 d, float2 m) {
  constexpr float kMiddle = Centred<F>::kZero;
  return {fmaf(kMiddle, d.x, m.x), fmaf(kMiddle, d.y, m.y)};
}

// The middles of a tile in a band's 16 rows. Tensor cores multiply them by the sums of the activations of each block, in TF32.
struct Middles {
  uint32_t high[4], low[4];

  template <class F>
  __device__ static Middles of(const uint8_t* band, int lane) {
    Middles two;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = (lane / 4 * kTileBlocks + lane % 4 + 4 * i) * 4;
      const auto half2_at = [&](int offset) { return __half22float2(*reinterpret_cast<const __half2*>(band + offset + at)); };
      const float2 rows = middles<F>(half2_at(F::kBandScales), half2_at(F::kBandMinima));
      const float2 first = two_tf32<false>(rows.x), second = two_tf32<false>(rows.y);
      two.high[2 * i] = __float_as_uint(first.x), two.low[2 * i] = __float_as_uint(first.y);
      two.high[2 * i + 1] = __float_as_uint(second.x), two.low[2 * i + 1] = __float_as_uint(second.y);
    }
    return two;
  }
  // 8 tokens. of: the sums of their activations, in the layout of Factors::kSums. The last addition is not left to the tensor cores, which
  // truncate while accumulating.
  __device__ void add(float (&sums)[4], uint4 of) const {
    float sum[4] = {};
    mma_m16n8k8_tf32(sum, low, of.x, of.z);
    mma_m16n8k8_tf32(sum, high, of.y, of.w);
    mma_m16n8k8_tf32(sum, high, of.x, of.z);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += sum[i];
  }
};

} // namespace scaled_mm::gguf
