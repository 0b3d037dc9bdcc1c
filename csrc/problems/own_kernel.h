// A kind without a table: one kernel for each dtype of its input.
#pragma once

#include "core/problem.h"
#include "core/status.h"
#include "core/tensors.h"

namespace scaled_mm {

inline constexpr Dtypes kFloatDtypes = {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32};

// kKernel: index in kRowwiseKernels.
template <int kKernel>
class OwnKernelProblem : public Problem {
public:
  BucketKey bucket() const override { return {info.M, info.N, 0, 0}; }
  const char* own_kernel() const override { return kRowwiseKernels[kKernel]; }
  KernelSlot* own_slot(Arch* arch) const override { return &arch->rowwise[kKernel][variant]; }

protected:
  // An option from 0 to `most`.
  static scaledMMStatus_t check_option(const char* name, const char* type, const Options& options, int32_t most = 1) {
    if (options.option < 0 || options.option > most) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected a %s, got %d", name, type, int(options.option));
    }
    if (options.output == 0 && options.epsilon == 0) return SCALED_MM_STATUS_SUCCESS;
    return fail(SCALED_MM_STATUS_BAD_PARAM, "output, epsilon: expected 0, for this kind has none, got %d, %g", int(options.output), options.epsilon);
  }
};

// A contiguous int32 vector.
inline scaledMMStatus_t check_indices(const char* name, const char* shape, int64_t length, const scaledMMTensorDesc_t* t) {
  if (scaledMMStatus_t s = check_operand(name, shape, {SCALED_MM_DTYPE_INT32}, 1, t)) return s;
  if (length >= 0 && t->shape[0] != length) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s = [%lld], got %s", name, shape, number(length), tensor_shape(*t).c_str());
  }
  if (t->shape[0] > 1 && t->strides[0] != 1) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "%s: expected a contiguous tensor, got stride %lld", name, number(t->strides[0]));
  }
  return SCALED_MM_STATUS_SUCCESS;
}

// The operand expert_offsets [E] of a kind that computes only the rows of experts; nullptr: all rows.
inline scaledMMStatus_t check_expert_offsets(const scaledMMTensorDesc_t* t, int64_t* count) {
  if (t == nullptr) return SCALED_MM_STATUS_SUCCESS;
  if (scaledMMStatus_t s = check_indices("expert_offsets", "[E]", -1, t)) return s;
  *count = t->shape[0];
  if (*count > 0) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "expert_offsets: expected [E] with E of at least 1, got %s", tensor_shape(*t).c_str());
}

// The stride of a dimension of size 1 is meaningless, 0 is used.
inline int64_t stride_along(const scaledMMTensorDesc_t& t, int dim) { return t.shape[dim] > 1 ? t.strides[dim] : 0; }

} // namespace scaled_mm
