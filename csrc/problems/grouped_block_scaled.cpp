// The grouped product with block scales: the validation of one expert's product, and checks of what each expert adds.
#include <iterator>

#include "core/status.h"
#include "problems/block_scales.h"
#include "problems/experts.h"

namespace scaled_mm {
namespace {

struct Tensors {
  const scaledMMTensorDesc_t *out, *a, *b, *a_scale, *b_scale, *bias, *expert_offsets;
};

class GroupedBlockScaled : public ExpertsProblem {
public:
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (scaledMMStatus_t s = read_option(options)) return s;
    return validate({t[0], t[1], t[2], t[3], t[4], t[5], t[6]});
  }

private:
  scaledMMStatus_t validate(const Tensors& t);
};

scaledMMStatus_t GroupedBlockScaled::validate(const Tensors& t) {
  if (scaledMMStatus_t s =
          check_operand("out", "[tokens, N]", {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32}, 2, t.out))
    return s;
  if (scaledMMStatus_t s = check_experts(t.a, t.b, t.expert_offsets)) return s;
  const scaledMMTensorDesc_t b = of_one_expert(*t.b);
  scaledMMTensorDesc_t bias = {};
  if (t.bias) {
    if (scaledMMStatus_t s = check_expert_bias(*t.bias, t.out->dtype, t.b->shape[2])) return s;
    bias = of_one_expert(*t.bias);
  }
  if (scaledMMStatus_t s =
          validate_gemm({t.out, t.a, &b, &kOneScale, &kOneScale, t.bias ? &bias : nullptr, nullptr, nullptr, nullptr, nullptr}, &info, false))
    return s;
  if (scaledMMStatus_t s = check_block_scales_of_experts(t.a_scale, t.b_scale, groups_.experts, &info, &groups_.b_scale_stride)) return s;
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
};

} // namespace

const ProblemKind kGroupedBlockScaled = {"grouped block-scaled GEMM",
                                         "grouped block-scaled ",
                                         std::size(kOperands),
                                         kOperands,
                                         false,
                                         make_problem<GroupedBlockScaled>,
                                         {SCALED_MM_TABLE_GROUPED_BLOCK_SCALED_GEMM, " of grouped block-scaled products", 0, "0", "b", false}};

} // namespace scaled_mm
