// Validation of the plain product, which grouped and block-scaled products reuse.
#pragma once

#include "core/tensors.h"
#include "problems/kinds.h"

namespace scaled_mm {

struct GemmTensors {
  const scaledMMTensorDesc_t *out, *a, *b, *a_scale, *b_scale, *bias, *a_zero_point, *b_zero_point, *a_row_sums, *b_column_sums;
};

// one_sum: one 32-bit integer sums all of K, which bounds K.
scaledMMStatus_t validate_gemm(const GemmTensors& tensors, ProductInfo* info, bool one_sum = true);

} // namespace scaled_mm
