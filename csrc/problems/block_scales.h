// Scales of blocks: of a for one row and 128 k, of b for 128 k and as many columns.
#pragma once

#include "problems/gemm.h"

namespace scaled_mm {

// a_scale [M, ceil(K / 128)] and b_scale [ceil(K / 128), ceil(N / 128)] of the product in info, whose strides are filled in.
scaledMMStatus_t check_block_scales(const scaledMMTensorDesc_t* a_scale, const scaledMMTensorDesc_t* b_scale, ProductInfo* info);
// The same with b_scale [E, ceil(K / 128), ceil(N / 128)], whose stride from expert to expert is *stride_e. M is called tokens.
scaledMMStatus_t check_block_scales_of_experts(const scaledMMTensorDesc_t* a_scale, const scaledMMTensorDesc_t* b_scale, int64_t experts,
                                               ProductInfo* info, int64_t* stride_e);
// What validate_gemm gets in place of the scales: one value.
inline constexpr scaledMMTensorDesc_t kOneScale = {SCALED_MM_DTYPE_FLOAT32, 0, {}, {}, 4, 0};

} // namespace scaled_mm
