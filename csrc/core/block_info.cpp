#include "core/block_info.h"

#include "core/status.h"

namespace scaled_mm {
namespace {

constexpr int64_t kBlock = 32;                        // values
// Tiles of a packed weight, which hold nothing but its blocks, in another order.
constexpr int64_t kTileRows = 64, kTileValues = 256;
constexpr int64_t kTileAlignment = 16;

long long number(int64_t value) { return static_cast<long long>(value); }

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Of a tensor of blocks that was looked at by itself.
scaledMMStatus_t check_blocks(const char* name, const scaledMMTensorDesc_t& t) {
  if (t.shape[1] % kBlock) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected K a multiple of 32, the values of a block, got %s", name, tensor_shape(t).c_str());
  }
  if ((t.flags & SCALED_MM_TENSOR_PACKED) == 0 && t.shape[1] > 0 && t.strides[1] != 1) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES,
                "%s: expected stride 1 in dimension 1, for the blocks of a row lie one after the other, got %lld", name, number(t.strides[1]));
  }
  return SCALED_MM_STATUS_SUCCESS;
}

int64_t blocks_extent(const scaledMMTensorDesc_t& t) {
  if (t.shape[0] == 0 || t.shape[1] == 0) return 0;
  const int64_t bytes = scaledMMGetBlockBytes(t.dtype);
  if (t.flags & SCALED_MM_TENSOR_PACKED) {
    return ceil_div(t.shape[0], kTileRows) * ceil_div(t.shape[1], kTileValues) * (kTileRows * kTileValues / kBlock * bytes);
  }
  return (t.shape[0] - 1) * t.strides[0] + t.shape[1] / kBlock * bytes;
}

scaledMMStatus_t check_weight(const scaledMMTensorDesc_t* t, BlockInfo* info) {
  if (scaledMMStatus_t s = check_operand("weight", "[M, K]", {SCALED_MM_DTYPE_Q4_0, SCALED_MM_DTYPE_Q4_1, SCALED_MM_DTYPE_Q5_0,
                                         SCALED_MM_DTYPE_Q5_1, SCALED_MM_DTYPE_Q8_0}, 2, t)) return s;
  if (scaledMMStatus_t s = check_blocks("weight", *t)) return s;
  info->M = t->shape[0];
  info->K = t->shape[1];
  info->operands.format = t->dtype;
  info->operands.packed = (t->flags & SCALED_MM_TENSOR_PACKED) != 0;
  info->constant_weight = (t->flags & SCALED_MM_TENSOR_CONSTANT) != 0;
  info->weight_alignment = info->operands.packed ? kTileAlignment : 1;
  if (t->alignment < info->weight_alignment) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT, "weight: expected an alignment of at least %lld bytes for packed tiles, got %lld",
                number(info->weight_alignment), number(t->alignment));
  }
  if (!info->operands.packed) {
    info->weight_stride_m = t->strides[0];
    info->weight_stride_k = scaledMMGetBlockBytes(t->dtype);
  }
  info->bytes.weight = blocks_extent(*t);
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_activation(const scaledMMTensorDesc_t* t, BlockInfo* info) {
  if (scaledMMStatus_t s = check_operand("activation", "[N, K]", {SCALED_MM_DTYPE_Q8_1, SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16,
                                         SCALED_MM_DTYPE_FLOAT32}, 2, t)) return s;
  const bool blocks = t->dtype == SCALED_MM_DTYPE_Q8_1;
  if (blocks) {
    if (scaledMMStatus_t s = check_blocks("activation", *t)) return s;
  }
  if (t->shape[1] != info->K) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "activation: expected [N, K] with K = %lld as in weight [M, K], got %s", number(info->K),
                tensor_shape(*t).c_str());
  }
  info->N = t->shape[0];
  info->operands.activation = t->dtype;
  info->activation_stride_n = t->strides[0];
  info->activation_stride_k = blocks ? scaledMMGetBlockBytes(t->dtype) : t->strides[1];
  info->bytes.activation = blocks ? blocks_extent(*t) : tensor_extent(*t);
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_out(const scaledMMTensorDesc_t* t, BlockInfo* info) {
  if (scaledMMStatus_t s = check_operand("out", "[M, N]", {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32},
                                         2, t)) return s;
  if (t->shape[0] != info->M || t->shape[1] != info->N) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out: expected [M, N] = [%lld, %lld], got %s", number(info->M), number(info->N),
                tensor_shape(*t).c_str());
  }
  if (scaledMMStatus_t s = check_no_overlap("out", *t)) return s;
  info->operands.out_dtype = t->dtype;
  info->out_stride_m = t->strides[0];
  info->out_stride_n = t->strides[1];
  info->bytes.out = tensor_extent(*t);
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_bias(const scaledMMTensorDesc_t* t, BlockInfo* info) {
  if (t == nullptr) return SCALED_MM_STATUS_SUCCESS;
  const int32_t out_dtype = info->operands.out_dtype;
  if (t->dtype != out_dtype && t->dtype != SCALED_MM_DTYPE_FLOAT32) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, "bias: expected out's dtype %s or float32, got %s", dtype_name(out_dtype), dtype_name(t->dtype));
  }
  if (scaledMMStatus_t s = check_operand("bias", "[M]", {out_dtype, SCALED_MM_DTYPE_FLOAT32}, 1, t)) return s;
  if (t->shape[0] != info->M) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "bias: expected [M] with M = %lld as in weight [M, K], got %s", number(info->M),
                tensor_shape(*t).c_str());
  }
  info->has_bias = true;
  info->bias_dtype = t->dtype;
  info->bias_stride = t->strides[0];
  info->bytes.bias = tensor_extent(*t);
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_mode(int32_t mode, BlockInfo* info) {
  if (mode != SCALED_MM_BLOCK_AUTO && mode != SCALED_MM_BLOCK_W4A8 && mode != SCALED_MM_BLOCK_W4A16) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "mode: expected a scaledMMBlockMode_t, got %d", int(mode));
  }
  const int32_t dtype = info->operands.activation;
  const bool only_w4a8 = dtype == SCALED_MM_DTYPE_Q8_1 || dtype == SCALED_MM_DTYPE_FLOAT32;
  if (only_w4a8 && mode == SCALED_MM_BLOCK_W4A16) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "mode: expected auto or w4a8 with %s activations, got w4a16", dtype_name(dtype));
  }
  info->set_mode(only_w4a8 ? int32_t(SCALED_MM_BLOCK_W4A8) : mode);
  return SCALED_MM_STATUS_SUCCESS;
}

}  // namespace

scaledMMStatus_t make_block_info(const BlockTensors& t, int32_t mode, BlockInfo* info) {
  *info = BlockInfo{};
  if (scaledMMStatus_t s = check_weight(t.weight, info)) return s;
  if (scaledMMStatus_t s = check_activation(t.activation, info)) return s;
  if (scaledMMStatus_t s = check_out(t.out, info)) return s;
  if (scaledMMStatus_t s = check_bias(t.bias, info)) return s;
  return check_mode(mode, info);
}

}  // namespace scaled_mm

int64_t scaledMMGetBlockBytes(int32_t dtype) {
  switch (dtype) {
    case SCALED_MM_DTYPE_Q4_0: return 18;
    case SCALED_MM_DTYPE_Q4_1: return 20;
    case SCALED_MM_DTYPE_Q5_0: return 22;
    case SCALED_MM_DTYPE_Q5_1: return 24;
    case SCALED_MM_DTYPE_Q8_0: return 34;
    case SCALED_MM_DTYPE_Q8_1: return 36;
    default: return 0;
  }
}
