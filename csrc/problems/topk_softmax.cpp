// The router of a mixture of experts: softmax and the largest logits of each row.
#include <algorithm>
#include <iterator>

#include "problems/kinds.h"
#include "problems/own_kernel.h"

namespace scaled_mm {
namespace {

class TopkSoftmax : public OwnKernelProblem<9> {
public:
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (scaledMMStatus_t s = check_option("function", "scaledMMTopkWeights_t", options)) return s;
    info.batch = 1;
    info.moe = &operands_;
    operands_.renormalize = options.option == SCALED_MM_TOPK_RENORMALIZED;
    if (scaledMMStatus_t s = check_operand("logits", "[M, E]", kFloatDtypes, 2, t[1])) return s;
    const scaledMMTensorDesc_t& logits = *t[1];
    info.M = logits.shape[0];
    info.N = operands_.experts = logits.shape[1];
    if (info.N < 1 || info.N > kMostExperts) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "logits: expected [M, E] with E from 1 to %d, got %s", kMostExperts,
                  tensor_shape(logits).c_str());
    }
    variant = info.out_dtype = logits.dtype;
    operands_.x = strides_of(logits);
    if (scaledMMStatus_t s = check_operand("out", "[M, k]", {SCALED_MM_DTYPE_FLOAT32}, 2, t[0])) return s;
    operands_.choices = t[0]->shape[1];
    const int64_t most = std::min<int64_t>(info.N, kMostChoices);
    if (t[0]->shape[0] != info.M || operands_.choices < 1 || operands_.choices > most) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out: expected [M, k] with M = %lld and k from 1 to %lld, got %s", number(info.M), number(most),
                  tensor_shape(*t[0]).c_str());
    }
    operands_.out = strides_of(*t[0]);
    if (scaledMMStatus_t s = check_no_overlap("out", *t[0])) return s;
    if (scaledMMStatus_t s = check_operand("ids", "[M, k]", {SCALED_MM_DTYPE_INT32}, 2, t[2])) return s;
    if (t[2]->shape[0] != info.M || t[2]->shape[1] != operands_.choices) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "ids: expected %s as out, got %s", tensor_shape(*t[0]).c_str(), tensor_shape(*t[2]).c_str());
    }
    operands_.ids = strides_of(*t[2]);
    return check_no_overlap("ids", *t[2]);
  }

private:
  static RowwiseStrides strides_of(const scaledMMTensorDesc_t& t) { return {stride_along(t, 0), stride_along(t, 1)}; }

  MoeOperands operands_{};
};

constexpr OperandSpec kOperands[] = {{"out", offsetof(GemmLaunch, out), Role::kOut},
                                     {"logits", offsetof(GemmLaunch, a)},
                                     {"ids", offsetof(GemmLaunch, moe_pointers) + offsetof(MoePointers, ids), Role::kWritten}};

} // namespace

const ProblemKind kTopkSoftmax = {"router of experts", "row-wise ", std::size(kOperands), kOperands, false, make_problem<TopkSoftmax>, {}};

} // namespace scaled_mm
