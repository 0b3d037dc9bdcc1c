#include "core/grouped_info.h"

#include <string>

#include "core/status.h"

namespace scaled_mm {
namespace {

// A tensor without its first dimension.
scaledMMTensorDesc_t of_one_expert(const scaledMMTensorDesc_t& t) {
  scaledMMTensorDesc_t one = {t.dtype, t.ndim - 1, {}, {}, t.alignment, t.flags};
  for (int i = 1; i < t.ndim; ++i) {
    one.shape[i - 1] = t.shape[i];
    one.strides[i - 1] = t.strides[i];
  }
  return one;
}

// One value, [E], [E,1,1], [E,N], [E,1,N] or [E,N,1], which is how checkpoints store scales of output channels.
scaledMMStatus_t check_b_scale(const scaledMMTensorDesc_t& t, int64_t E, int64_t N, int64_t* stride_e, int64_t* stride_n) {
  if (scaledMMStatus_t s = check_operand("b_scale", "", {SCALED_MM_DTYPE_FLOAT32}, -1, &t)) return s;
  *stride_e = *stride_n = 0;
  bool one_value = true;
  for (int i = 0; i < t.ndim; ++i) one_value = one_value && t.shape[i] == 1;
  if (one_value) return SCALED_MM_STATUS_SUCCESS;
  const bool per_expert = t.ndim >= 1 && t.shape[0] == E;
  // The dimension that runs along N; -1: one scale an expert, -2: neither.
  int along = t.ndim == 1 ? -1 : -2;
  if (t.ndim == 2 && t.shape[1] == N) along = 1;
  if (t.ndim == 3 && t.shape[1] == 1) along = t.shape[2] == N ? 2 : t.shape[2] == 1 ? -1 : -2;
  if (t.ndim == 3 && t.shape[2] == 1 && t.shape[1] == N) along = 1;
  if (!per_expert || along == -2) {
    const std::string e = std::to_string(E), n = std::to_string(N);
    const std::string forms = "one value, [" + e + "], [" + e + ", 1, 1], [" + e + ", " + n + "], [" + e + ", 1, " + n + "] or [" + e + ", " + n + ", 1]";
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "b_scale: expected %s (E = %s, N = %s), got %s", forms.c_str(), e.c_str(), n.c_str(),
                tensor_shape(t).c_str());
  }
  *stride_e = E > 1 ? t.strides[0] : 0;
  *stride_n = along >= 0 && N > 1 ? t.strides[along] : 0;
  return SCALED_MM_STATUS_SUCCESS;
}

}  // namespace

scaledMMStatus_t make_grouped_info(const GroupedTensors& t, GroupedInfo* info) {
  if (scaledMMStatus_t s = check_operand("out", "[tokens, N]", {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16,
                                         SCALED_MM_DTYPE_FLOAT32, SCALED_MM_DTYPE_INT32}, 2, t.out)) return s;
  if (scaledMMStatus_t s = check_operand("a", "[tokens, K]", {SCALED_MM_DTYPE_INT8}, 2, t.a)) return s;
  if (scaledMMStatus_t s = check_operand("b", "[E, K, N]", {SCALED_MM_DTYPE_INT8}, 3, t.b)) return s;
  if (scaledMMStatus_t s = check_operand("expert_offsets", "[E]", {SCALED_MM_DTYPE_INT32}, 1, t.expert_offsets)) return s;
  *info = GroupedInfo{};
  const int64_t E = t.b->shape[0], K = t.b->shape[1], N = t.b->shape[2];
  info->experts = E;
  if (K != t.a->shape[1]) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "b: expected [E, K, N] with K = %lld as in a [tokens, K], got %s",
                static_cast<long long>(t.a->shape[1]), tensor_shape(*t.b).c_str());
  }
  if (t.expert_offsets->shape[0] != E) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "expert_offsets: expected [E] = [%lld] as in b [E, K, N], got %s",
                static_cast<long long>(E), tensor_shape(*t.expert_offsets).c_str());
  }
  if (E > 1 && t.expert_offsets->strides[0] != 1) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "expert_offsets: expected a contiguous tensor, got stride %lld",
                static_cast<long long>(t.expert_offsets->strides[0]));
  }
  info->b_stride = E > 1 ? t.b->strides[0] : 0;

  // The rest is what one expert's product would be refused for.
  const scaledMMTensorDesc_t b = of_one_expert(*t.b);
  scaledMMTensorDesc_t b_scale = {}, bias = {};
  int64_t b_scale_stride_n = 0;
  const bool scaled = t.out->dtype != SCALED_MM_DTYPE_INT32;
  if (t.b_scale && scaled) {
    if (scaledMMStatus_t s = check_b_scale(*t.b_scale, E, N, &info->b_scale_stride, &b_scale_stride_n)) return s;
    b_scale = {t.b_scale->dtype, 0, {}, {}, t.b_scale->alignment, 0};
  }
  if (t.bias && scaled) {
    if (scaledMMStatus_t s = check_operand("bias", "[E, N]", {t.out->dtype, SCALED_MM_DTYPE_FLOAT32}, 2, t.bias)) return s;
    if (t.bias->shape[0] != E || t.bias->shape[1] != N) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "bias: expected [E, N] = [%lld, %lld], got %s", static_cast<long long>(E),
                  static_cast<long long>(N), tensor_shape(*t.bias).c_str());
    }
    bias = of_one_expert(*t.bias);
    info->bias_stride = E > 1 ? t.bias->strides[0] : 0;
  }
  GemmInfo& gemm = info->gemm;
  if (scaledMMStatus_t s = make_gemm_info({t.out, t.a, &b, t.a_scale, t.b_scale ? &b_scale : nullptr,
                                           t.bias ? &bias : nullptr, nullptr, nullptr, nullptr, nullptr}, &gemm)) return s;
  gemm.b_scale_stride = b_scale_stride_n;
  gemm.bytes.b = tensor_extent(*t.b);
  if (t.b_scale) gemm.bytes.b_scale = tensor_extent(*t.b_scale);
  if (t.bias) gemm.bytes.bias = tensor_extent(*t.bias);
  info->offsets_bytes = tensor_extent(*t.expert_offsets);
  return SCALED_MM_STATUS_SUCCESS;
}

const char* misfit(const GroupedInfo& info, const RowNeeds& needs) {
  if (const char* why = misfit(info.gemm, needs)) return why;
  if (info.b_stride % needs.align_b != 0) return "the stride of b from expert to expert is not a multiple of the row's alignment";
  return nullptr;
}

}  // namespace scaled_mm
