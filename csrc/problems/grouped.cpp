// The grouped product, a mixture of experts: the validation of one expert's product, and checks of what each expert adds.
#include <iterator>
#include <string>

#include "core/status.h"
#include "problems/experts.h"

namespace scaled_mm {
namespace {

struct GroupedTensors {
  const scaledMMTensorDesc_t *out, *a, *b, *a_scale, *b_scale, *bias, *expert_offsets, *a_zero_point, *b_zero_point, *a_row_sums, *b_column_sums;
};

// Values of each expert or of each expert's columns: one value, [E], [E,1,1], [E,N], [E,1,N] and [E,N,1]. Checkpoints store scales of output channels
// as [E,N,1]. name: b_scale or b_zero_point.
scaledMMStatus_t check_of_b(const char* name, Dtypes dtypes, const scaledMMTensorDesc_t& t, int64_t E, int64_t N, int64_t* stride_e,
                            int64_t* stride_n) {
  if (scaledMMStatus_t s = check_operand(name, "", dtypes, -1, &t)) return s;
  *stride_e = *stride_n = 0;
  bool one_value = true;
  for (int i = 0; i < t.ndim; ++i) one_value = one_value && t.shape[i] == 1;
  if (one_value) return SCALED_MM_STATUS_SUCCESS;
  const bool per_expert = t.ndim >= 1 && t.shape[0] == E;
  // The dimension along N; -1: one scale per expert; -2: neither.
  int along = t.ndim == 1 ? -1 : -2;
  if (t.ndim == 2 && t.shape[1] == N) along = 1;
  if (t.ndim == 3 && t.shape[1] == 1) along = t.shape[2] == N ? 2 : t.shape[2] == 1 ? -1 : -2;
  if (t.ndim == 3 && t.shape[2] == 1 && t.shape[1] == N) along = 1;
  if (!per_expert || along == -2) {
    const std::string e = std::to_string(E), n = std::to_string(N);
    const std::string forms =
        "one value, [" + e + "], [" + e + ", 1, 1], [" + e + ", " + n + "], [" + e + ", 1, " + n + "] or [" + e + ", " + n + ", 1]";
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s (E = %s, N = %s), got %s", name, forms.c_str(), e.c_str(), n.c_str(),
                tensor_shape(t).c_str());
  }
  *stride_e = E > 1 ? t.strides[0] : 0;
  *stride_n = along >= 0 && N > 1 ? t.strides[along] : 0;
  return SCALED_MM_STATUS_SUCCESS;
}

// [E,N] or [E,1,N].
scaledMMStatus_t check_column_sums(const scaledMMTensorDesc_t& t, int64_t E, int64_t N, int64_t* stride_e, int64_t* stride_n) {
  if (scaledMMStatus_t s = check_operand("b_column_sums", "", {SCALED_MM_DTYPE_INT32}, -1, &t)) return s;
  const bool flat = t.ndim == 2 && t.shape[0] == E && t.shape[1] == N, apart = t.ndim == 3 && t.shape[0] == E && t.shape[1] == 1 && t.shape[2] == N;
  if (!flat && !apart) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "b_column_sums: expected [E, N] or [E, 1, N] with E = %lld and N = %lld, got %s",
                static_cast<long long>(E), static_cast<long long>(N), tensor_shape(t).c_str());
  }
  *stride_e = E > 1 ? t.strides[0] : 0;
  *stride_n = N > 1 ? t.strides[t.ndim - 1] : 0;
  return SCALED_MM_STATUS_SUCCESS;
}

// Stand-in for the checks of one expert's product: one value with the operand's dtype and alignment.
scaledMMTensorDesc_t one_value(const scaledMMTensorDesc_t& t) { return {t.dtype, 0, {}, {}, t.alignment, 0}; }

class Grouped : public ExpertsProblem {
public:
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (scaledMMStatus_t s = read_option(options)) return s;
    return validate({t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10]});
  }

  scaledMMStatus_t workspace(const Kernel& kernel, size_t* bytes) const override {
    *bytes = kernel.grouped_workspace_size ? size_t(kernel.grouped_workspace_size(groups_.experts, info.multiprocessors)) : 0;
    return SCALED_MM_STATUS_SUCCESS;
  }

  // More than any kernel of int8/grouped needs: six tensor maps of 128 bytes for each SM, and eight small fields for each expert.
  size_t workspace_in_advance(const scaledMMTimeModel_t&) const override {
    return size_t(1024) * size_t(info.multiprocessors) + size_t(128) * size_t(groups_.experts) + 4096;
  }

private:
  scaledMMStatus_t validate(const GroupedTensors& t);
};

scaledMMStatus_t Grouped::validate(const GroupedTensors& t) {
  if (scaledMMStatus_t s = check_operand(
          "out", "[tokens, N]", {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32, SCALED_MM_DTYPE_INT32}, 2, t.out))
    return s;
  if (scaledMMStatus_t s = check_experts(t.a, t.b, t.expert_offsets)) return s;

  // The other checks are those of one expert's product.
  const int64_t E = groups_.experts, N = t.b->shape[2];
  const scaledMMTensorDesc_t b = of_one_expert(*t.b);
  scaledMMTensorDesc_t b_scale = {}, bias = {}, b_zero_point = {};
  int64_t b_scale_stride_n = 0;
  const bool scaled = t.out->dtype != SCALED_MM_DTYPE_INT32;
  if (t.b_scale && scaled) {
    if (scaledMMStatus_t s = check_of_b("b_scale", {SCALED_MM_DTYPE_FLOAT32}, *t.b_scale, E, N, &groups_.b_scale_stride, &b_scale_stride_n)) return s;
    b_scale = one_value(*t.b_scale);
  }
  if (t.bias && scaled) {
    if (scaledMMStatus_t s = check_expert_bias(*t.bias, t.out->dtype, N)) return s;
    bias = of_one_expert(*t.bias);
  }
  BatchStrides strides{}; // from one expert to the next
  int64_t b_zero_point_stride_n = 0, b_column_sums_stride_n = 0;
  if (t.b_zero_point) {
    if (scaledMMStatus_t s = check_of_b("b_zero_point", {SCALED_MM_DTYPE_INT32, SCALED_MM_DTYPE_INT8}, *t.b_zero_point, E, N, &strides.b_zero_point,
                                        &b_zero_point_stride_n))
      return s;
    b_zero_point = one_value(*t.b_zero_point);
  }
  if (t.b_column_sums) {
    if (scaledMMStatus_t s = check_column_sums(*t.b_column_sums, E, N, &strides.b_column_sums, &b_column_sums_stride_n)) return s;
  }
  if (scaledMMStatus_t s = validate_gemm({t.out, t.a, &b, t.a_scale, t.b_scale ? &b_scale : nullptr, t.bias ? &bias : nullptr, t.a_zero_point,
                                          t.b_zero_point ? &b_zero_point : nullptr, t.a_row_sums, nullptr},
                                         &info))
    return s;
  info.b_scale_stride = b_scale_stride_n;
  info.b_zero_point_stride = b_zero_point_stride_n;
  info.has_b_column_sums = t.b_column_sums != nullptr;
  info.b_column_sums_stride = b_column_sums_stride_n;
  info.batch_strides = strides;
  if (info.has_a_zero_point || info.has_b_zero_point) {
    info.col_terms_batch_stride = int32_t(N);
    column_terms_offset = (info.M + 1) / 2 * 4; // aligned to 16 bytes
    terms_bytes = size_t(4) * column_terms_offset + size_t(8) * E * N;
  }
  finish();
  return SCALED_MM_STATUS_SUCCESS;
}

constexpr OperandSpec kOperands[] = {
    {"out", offsetof(GemmLaunch, out), Role::kOut},
    {"a", offsetof(GemmLaunch, a), Role::kA},
    {"b", offsetof(GemmLaunch, b), Role::kB},
    {"a_scale", offsetof(GemmLaunch, a_scale)},
    {"b_scale", offsetof(GemmLaunch, b_scale)},
    {"bias", offsetof(GemmLaunch, bias)},
    {"expert_offsets", offsetof(GemmLaunch, expert_offsets)},
    {"a_zero_point", offsetof(GemmLaunch, a_zero_point)},
    {"b_zero_point", offsetof(GemmLaunch, b_zero_point)},
    {"a_row_sums", offsetof(GemmLaunch, a_row_sums)},
    {"b_column_sums", offsetof(GemmLaunch, b_column_sums)},
};

} // namespace

const ProblemKind kGrouped = {"grouped GEMM",
                              "grouped ",
                              std::size(kOperands),
                              kOperands,
                              false,
                              make_problem<Grouped>,
                              {SCALED_MM_TABLE_GROUPED_GEMM, " of grouped products", 0, "0", "b", false}};

} // namespace scaled_mm
