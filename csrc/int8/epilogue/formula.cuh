// The epilogue's arithmetic, in one place for every kernel family (docs/design/numerics.md).
//
// Each float operation is an intrinsic that rounds once: the compiler may not contract a multiplication and an addition
// into an fma, whatever its flags, so every kernel, and the CPU, gives the same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/kernel_abi.h"

namespace scaled_mm {

template <class T> struct DtypeOf;
template <> struct DtypeOf<int32_t> {
  static constexpr int32_t value = SCALED_MM_DTYPE_INT32;
};
template <> struct DtypeOf<float> {
  static constexpr int32_t value = SCALED_MM_DTYPE_FLOAT32;
};
template <> struct DtypeOf<__half> {
  static constexpr int32_t value = SCALED_MM_DTYPE_FLOAT16;
};
template <> struct DtypeOf<__nv_bfloat16> {
  static constexpr int32_t value = SCALED_MM_DTYPE_BFLOAT16;
};

// What the epilogue reads besides the accumulators: the operands of the fused formula.
struct EpilogueOperands {
  const float* a_scale;
  const float* b_scale;
  const void* bias;
  int64_t a_scale_stride, b_scale_stride, bias_stride;
  int32_t bias_dtype;
  const int2* row_terms; // {za, rowsum}, nullptr without zero points
  const int2* col_terms; // {colsum - K*zb, zb}
  // From one product of a batch to the next, in elements of each; 0 where they share it.
  int64_t a_scale_batch, b_scale_batch, bias_batch;
  int32_t row_terms_batch, col_terms_batch;
};

inline EpilogueOperands epilogue_operands(const GemmLaunch& l) {
  return {l.a_scale,
          l.b_scale,
          l.bias,
          l.a_scale_stride,
          l.b_scale_stride,
          l.bias_stride,
          l.bias_dtype,
          reinterpret_cast<const int2*>(l.row_terms),
          reinterpret_cast<const int2*>(l.col_terms),
          l.batch_strides.a_scale,
          l.batch_strides.b_scale,
          l.batch_strides.bias,
          l.row_terms_batch_stride,
          l.col_terms_batch_stride};
}

// x + (-0.0) is x for every x, -0.0 and NaN included: the bias where there is none.
constexpr float kNoBias = -0.0f;

__device__ inline float load_bias(const EpilogueOperands& e, int batch, int64_t n) {
  if (e.bias == nullptr) return kNoBias;
  const int64_t i = batch * e.bias_batch + n * e.bias_stride;
  if (e.bias_dtype == SCALED_MM_DTYPE_FLOAT32) return static_cast<const float*>(e.bias)[i];
  if (e.bias_dtype == SCALED_MM_DTYPE_FLOAT16) return __half2float(static_cast<const __half*>(e.bias)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(e.bias)[i]);
}

__device__ inline float load_a_scale(const EpilogueOperands& e, int batch, int64_t m) {
  return e.a_scale[batch * e.a_scale_batch + m * e.a_scale_stride];
}
__device__ inline float load_b_scale(const EpilogueOperands& e, int batch, int64_t n) {
  return e.b_scale[batch * e.b_scale_batch + n * e.b_scale_stride];
}

// Of one product; only where there are zero points.
__device__ inline const int2* row_terms_of(const EpilogueOperands& e, int batch) { return e.row_terms + int64_t(batch) * e.row_terms_batch; }
__device__ inline const int2* col_terms_of(const EpilogueOperands& e, int batch) { return e.col_terms + int64_t(batch) * e.col_terms_batch; }

// acc - (za * (colsum - K*zb) + zb * rowsum), modulo 2^32: exact because the true result fits.
__device__ inline int32_t subtract_zero_points(int32_t acc, int2 row, int2 col) {
  const uint32_t correction = uint32_t(row.x) * uint32_t(col.x) + uint32_t(col.y) * uint32_t(row.y);
  return int32_t(uint32_t(acc) - correction);
}

__device__ inline float scale_and_bias(int32_t acc, float a_scale, float b_scale, float bias) {
  return __fadd_rn(__fmul_rn(__fmul_rn(__int2float_rn(acc), b_scale), a_scale), bias);
}

} // namespace scaled_mm
