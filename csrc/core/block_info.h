// Validation of a block product: from tensor descriptors to what a launch needs, or a status that names the argument.
#pragma once

#include "core/gemm_info.h"

namespace scaled_mm {

struct BlockTensors {
  const scaledMMTensorDesc_t *out, *weight, *activation, *bias;
};

// M and N as the interface has them: rows of the weight, tokens. Strides as BlockOperands says.
struct BlockInfo {
  int64_t M, N, K;
  BlockOperands operands;  // quantize: what `mode` says; AUTO is the table's to decide
  int32_t mode;            // scaledMMBlockMode_t; of q8_1 and float32 activations never AUTO
  bool constant_weight;

  int64_t activation_stride_n, activation_stride_k;
  int64_t weight_stride_m, weight_stride_k;
  int64_t out_stride_m, out_stride_n;
  int64_t bias_stride;
  int32_t bias_dtype;
  bool has_bias;

  int64_t weight_alignment;  // bytes that its data pointer must be a multiple of
  struct {
    int64_t out, weight, activation, bias;
  } bytes;  // from the data pointer to the end of the last element

  // Settles AUTO.
  void set_mode(int32_t settled) {
    mode = settled;
    operands.quantize = settled == SCALED_MM_BLOCK_W4A8 && operands.activation != SCALED_MM_DTYPE_Q8_1;
  }
};

scaledMMStatus_t make_block_info(const BlockTensors& tensors, int32_t mode, BlockInfo* info);

}  // namespace scaled_mm
