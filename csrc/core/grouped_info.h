// Validation of a grouped product: that of its experts' common two-dimensional product, and what is added per expert.
#pragma once

#include "core/gemm_info.h"

namespace scaled_mm {

struct GroupedTensors {
  const scaledMMTensorDesc_t *out, *a, *b, *a_scale, *b_scale, *bias, *expert_offsets;
};

struct GroupedInfo {
  GemmInfo gemm;  // M: tokens; b, b_scale and bias of one expert, extents of all of them
  int64_t experts;
  int64_t b_stride, b_scale_stride, bias_stride;  // from one expert to the next
  int64_t offsets_bytes;

  // What the buckets' m bounds: rows per expert on average.
  int64_t rows_per_expert() const { return experts > 0 ? (gemm.M + experts - 1) / experts : gemm.M; }
};

scaledMMStatus_t make_grouped_info(const GroupedTensors& tensors, GroupedInfo* info);

// As misfit() of a GemmInfo.
const char* misfit(const GroupedInfo& info, const RowNeeds& needs);

}  // namespace scaled_mm
