// Scales of blocks: of a for one row and 128 or 64 k, of b for as many k and columns. The sizes of the scales tell the size of the blocks.
#pragma once

#include "problems/gemm.h"

namespace scaled_mm {

// a_scale [M, ceil(K / B)] and b_scale [ceil(K / B), ceil(N / B)] of the product in info, whose block size B and strides are filled in.
scaledMMStatus_t check_block_scales(const scaledMMTensorDesc_t* a_scale, const scaledMMTensorDesc_t* b_scale, ProductInfo* info);
// The same with b_scale [E, ceil(K / B), ceil(N / B)], whose stride from expert to expert is *stride_e. M is called tokens.
scaledMMStatus_t check_block_scales_of_experts(const scaledMMTensorDesc_t* a_scale, const scaledMMTensorDesc_t* b_scale, int64_t experts,
                                               ProductInfo* info, int64_t* stride_e);
// What validate_gemm gets in place of the scales: one value.
inline constexpr scaledMMTensorDesc_t kOneScale = {SCALED_MM_DTYPE_FLOAT32, 0, {}, {}, 4, 0};

} // namespace scaled_mm
