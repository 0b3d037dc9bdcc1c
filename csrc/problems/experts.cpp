#include "problems/experts.h"

#include "core/status.h"

namespace scaled_mm {
namespace {} // namespace

const char* ExpertsProblem::misfit(const RowNeeds& needs) const {
  if (const char* why = scaled_mm::misfit(info, needs)) return why;
  if (groups_.b_stride % needs.align_b != 0) return "the stride of b from expert to expert is not a multiple of the row's alignment";
  return nullptr;
}

scaledMMStatus_t ExpertsProblem::read_option(const Options& options) {
  groups_.zero_unassigned = (options.option & SCALED_MM_UNASSIGNED_ROWS_ANY) == 0;
  expected_rows_ = options.option & ~SCALED_MM_UNASSIGNED_ROWS_ANY;
  if (options.option < 0) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "expected_rows: expected a number of rows below 2^30, or 0 for all, got %d", int(options.option));
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t ExpertsProblem::check_experts(const scaledMMTensorDesc_t* a, const scaledMMTensorDesc_t* b,
                                               const scaledMMTensorDesc_t* expert_offsets) {
  if (scaledMMStatus_t s = check_operand("a", "[tokens, K]", {SCALED_MM_DTYPE_INT8}, 2, a)) return s;
  if (scaledMMStatus_t s = check_operand("b", "[E, K, N]", {SCALED_MM_DTYPE_INT8}, 3, b)) return s;
  if (scaledMMStatus_t s = check_operand("expert_offsets", "[E]", {SCALED_MM_DTYPE_INT32}, 1, expert_offsets)) return s;
  const int64_t E = groups_.experts = b->shape[0];
  if (b->shape[1] != a->shape[1]) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "b: expected [E, K, N] with K = %lld as in a [tokens, K], got %s", number(a->shape[1]),
                tensor_shape(*b).c_str());
  }
  if (expert_offsets->shape[0] != E) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "expert_offsets: expected [E] = [%lld] as in b [E, K, N], got %s", number(E),
                tensor_shape(*expert_offsets).c_str());
  }
  if (E > 1 && expert_offsets->strides[0] != 1) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "expert_offsets: expected a contiguous tensor, got stride %lld",
                number(expert_offsets->strides[0]));
  }
  groups_.b_stride = E > 1 ? b->strides[0] : 0;
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t ExpertsProblem::check_expert_bias(const scaledMMTensorDesc_t& bias, int32_t out_dtype, int64_t N) {
  if (scaledMMStatus_t s = check_operand("bias", "[E, N]", {out_dtype, SCALED_MM_DTYPE_FLOAT32}, 2, &bias)) return s;
  if (bias.shape[0] != groups_.experts || bias.shape[1] != N) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "bias: expected [E, N] = [%lld, %lld], got %s", number(groups_.experts), number(N),
                tensor_shape(bias).c_str());
  }
  groups_.bias_stride = groups_.experts > 1 ? bias.strides[0] : 0;
  return SCALED_MM_STATUS_SUCCESS;
}

void ExpertsProblem::finish() {
  info.groups = &groups_;
  info.constant_b = false; // no kernel reads the weights of experts early
  variant = info.out_dtype;
}

} // namespace scaled_mm
