// The arithmetic of block-scaled products, in one place for every kernel (docs/design/numerics.md). As in epilogue/formula.cuh each
// operation is an intrinsic that rounds once, so that no compiler contracts a multiplication and an addition into an fma.
#pragma once

#include "int8/epilogue/formula.cuh"

namespace scaled_mm::block_scaled {

// A scale of a belongs to one row and kBlock of K, one of b to kBlock of K and kBlock columns; or kHalfBlock in place of kBlock. A stage of kBlock
// then has two blocks. Only kernels whose tile has a number of columns that divides kHalfBlock take these.
constexpr int kBlock = 128, kHalfBlock = 64;

template <int kColumns>
constexpr int kScalesOfStage = kHalfBlock % kColumns == 0 ? 2 : 1;

// Accumulators of mma.sync start at the bits of 1.5 * 2^23. A block's sum is an integer of at most 128 * 128 * 128 = 2^21, so adding it to the
// bits adds it to the number. To subtract the number converts exactly, and faster than a conversion instruction.
// wgmma can overwrite its accumulators, so with a conversion instruction nothing has to reset them: three instructions for a sum and a block
// instead of four (docs/decisions/0023).
constexpr int32_t kStart = 0x4b400000;
constexpr float kStartValue = 12582912.0f;

__device__ inline float exact_sum(int32_t acc) { return __fsub_rn(__int_as_float(acc), kStartValue); }

__device__ inline float combine_scales(float a_scale, float b_scale) { return __fmul_rn(a_scale, b_scale); }

// Blocks come in the order of k.
__device__ inline float add_block(float sum, int32_t acc, float scale) { return __fadd_rn(sum, __fmul_rn(exact_sum(acc), scale)); }

// The same for an accumulator that started at zero.
__device__ inline float add_converted(float sum, int32_t acc, float scale) { return __fadd_rn(sum, __fmul_rn(__int2float_rn(acc), scale)); }

__device__ inline float add_bias(float sum, float bias) { return __fadd_rn(sum, bias); }

__device__ inline void cast(float* out, float value) { *out = value; }
__device__ inline void cast(__half* out, float value) { *out = __float2half_rn(value); }
__device__ inline void cast(__nv_bfloat16* out, float value) { *out = __float2bfloat16_rn(value); }

// Two adjacent values. out: aligned for a store of both at once.
__device__ inline void cast(float* out, float x, float y) { *reinterpret_cast<float2*>(out) = make_float2(x, y); }
__device__ inline void cast(__half* out, float x, float y) { *reinterpret_cast<__half2*>(out) = __floats2half2_rn(x, y); }
__device__ inline void cast(__nv_bfloat16* out, float x, float y) { *reinterpret_cast<__nv_bfloat162*>(out) = __floats2bfloat162_rn(x, y); }

} // namespace scaled_mm::block_scaled
