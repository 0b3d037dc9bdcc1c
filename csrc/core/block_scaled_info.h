// Validation of a block-scaled product: that of the plain one, with scales that are matrices of blocks.
#pragma once

#include "core/gemm_info.h"

namespace scaled_mm {

// A scale of a belongs to one row and this many k; one of b to this many k and as many columns.
constexpr int64_t kScaleBlock = 128;

struct BlockScaledTensors {
  const scaledMMTensorDesc_t *out, *a, *b, *a_scale, *b_scale, *bias;
};

struct BlockScaledInfo {
  GemmInfo gemm;  // a_scale_stride: from row to row; b_scale_stride: from one block of N to the next
  int64_t a_scale_stride_k, b_scale_stride_k;  // from one block of K to the next
};

scaledMMStatus_t make_block_scaled_info(const BlockScaledTensors& tensors, BlockScaledInfo* info);

}  // namespace scaled_mm
