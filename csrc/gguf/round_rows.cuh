// float32 activations that may be rounded: each token becomes float16 values and a power of two, so float16's range is wide enough. A product's
// kernel multiplies the float16 values, and the output by the power (Output::token_scales).
#pragma once

#include "gguf/stage.cuh"

namespace scaled_mm::gguf {

struct RoundRowsParams {
  const float* a;
  int64_t stride_m, stride_k; // in elements
  int64_t K;
  __half* values; // [M, K]
  float* scales;  // [M], aligned to 8 bytes
  bool aligned;   // is_aligned
};

constexpr int kRoundThreads = 512, kRoundKept = 8; // a thread keeps up to kRoundKept chunks of 4 values in registers: 16384 values of a token

// One thread block per token. Infinities and NaNs stay; they do not count for the power.
static __global__ void __launch_bounds__(kRoundThreads) round_rows(const __grid_constant__ RoundRowsParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  let_next_kernel_start();
  wait_for_preceding_kernel();
#endif
  const float* const row = p.a + int64_t(blockIdx.x) * p.stride_m;
  const auto load = [&](int64_t k, bool aligned) {
    if (aligned) return *reinterpret_cast<const float4*>(row + k);
    return float4{row[k * p.stride_k], row[(k + 1) * p.stride_k], row[(k + 2) * p.stride_k], row[(k + 3) * p.stride_k]};
  };
  const auto for_kept = [&](auto&& function) {
#pragma unroll
    for (int i = 0; i < kRoundKept; ++i) {
      if (const int k = (i * kRoundThreads + int(threadIdx.x)) * 4; k < p.K) function(i, k);
    }
  };
  const auto for_others = [&](auto&& function) {
    for (int64_t k = (kRoundKept * kRoundThreads + int(threadIdx.x)) * 4; k < p.K; k += kRoundThreads * 4) function(k);
  };
  float largest = 0.0f;
  const auto count = [&](float v) { largest = fabsf(v) < INFINITY ? fmaxf(largest, fabsf(v)) : largest; };
  const auto count_chunk = [&](float4 x) { count(x.x), count(x.y), count(x.z), count(x.w); };
  float4 kept[kRoundKept];
  if (p.aligned) { // apart, so that all loads of a thread are under way together
    for_kept([&](int i, int k) { kept[i] = load(k, true); });
  } else {
    for_kept([&](int i, int k) { kept[i] = load(k, false); });
  }
  for_others([&](int64_t k) { count_chunk(load(k, p.aligned)); });
  for_kept([&](int i, int) { count_chunk(kept[i]); });
  __shared__ float of_warps[kRoundThreads / 32];
  for (int apart = 16; apart > 0; apart /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRoundThreads / 32; ++i) largest = fmaxf(largest, of_warps[i]);
  int exponent = 0;
  if (largest > 0.0f) frexpf(largest, &exponent);
  const int up = min(15 - exponent, 126); // the largest value becomes less than 2^15
  const float power = ldexpf(1.0f, up);   // normal, for up >= -113
  const auto store = [&](int64_t k, float4 x) {
    const __half2 two[2] = {__floats2half2_rn(x.x * power, x.y * power), __floats2half2_rn(x.z * power, x.w * power)};
    *reinterpret_cast<uint2*>(p.values + int64_t(blockIdx.x) * p.K + k) = *reinterpret_cast<const uint2*>(two);
  };
  for_kept([&](int i, int k) { store(k, kept[i]); });
  for_others([&](int64_t k) { store(k, load(k, p.aligned)); });
  if (threadIdx.x == 0) p.scales[blockIdx.x] = ldexpf(1.0f, -up);
}

inline bool rounds_rows(const BlockOperands& o) { return o.round && o.activation == SCALED_MM_DTYPE_FLOAT32; }

inline BlockOperands with_half(BlockOperands o) {
  o.activation = SCALED_MM_DTYPE_FLOAT16;
  return o;
}

// A kernel's workspace with what round_rows writes behind it. of_kernel(operands): the bytes that the kernel needs.
template <class OfKernel>
int64_t with_rounded_rows(int64_t M, int64_t K, const BlockOperands& o, OfKernel&& of_kernel) {
  if (!rounds_rows(o)) return of_kernel(o);
  return tiles_of(of_kernel(with_half(o)), 1024) * 1024 + tiles_of(M * K * 2, 1024) * 1024 + tiles_of(M, 2) * int64_t(sizeof(float2));
}

// Rounds the activations if they are to be, then calls launch(l, token_scales) of the kernel.
template <class OfKernel, class Launch>
scaledMMStatus_t launch_with_rounded_rows(const GemmLaunch& l, bool dependent, OfKernel&& of_kernel, Launch&& launch, char* message, size_t size) {
  if (!rounds_rows(*l.blocks)) return launch(l, nullptr);
  const BlockOperands half = with_half(*l.blocks);
  auto* const values = static_cast<uint8_t*>(l.workspace) + tiles_of(of_kernel(half), 1024) * 1024;
  auto* const scales = reinterpret_cast<float*>(values + tiles_of(l.M * l.K * 2, 1024) * 1024);
  static DeviceKernel kernel(&round_rows);
  RoundRowsParams p = {static_cast<const float*>(l.a), l.a_stride_m, l.a_stride_k, l.K, reinterpret_cast<__half*>(values), scales, is_aligned(l)};
  LaunchShape shape;
  shape.dependent = dependent;
  shape.grid = dim3(unsigned(l.M));
  shape.block = dim3(kRoundThreads);
  void* params[] = {&p};
  if (scaledMMStatus_t status = launch_kernel(kernel, shape, params, l, message, size)) return status;
  GemmLaunch of_half = l;
  of_half.blocks = &half;
  of_half.a = values;
  of_half.a_stride_m = l.K;
  of_half.a_stride_k = 1;
  return launch(of_half, scales);
}

} // namespace scaled_mm::gguf
