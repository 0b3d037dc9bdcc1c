// The row-wise operators of a mixture of experts: the order by expert, tokens quantized to the rows of their experts, the weighted sum.
#include <iterator>

#include "problems/kinds.h"
#include "problems/own_kernel.h"

namespace scaled_mm {
namespace {

// A contiguous int32 matrix [M, choices]; choices -1: any.
scaledMMStatus_t check_rows_of_tokens(const char* name, int64_t M, int64_t choices, const scaledMMTensorDesc_t* t) {
  if (scaledMMStatus_t s = check_operand(name, "[M, choices]", {SCALED_MM_DTYPE_INT32}, 2, t)) return s;
  if (t->shape[0] != M || (choices >= 0 && t->shape[1] != choices)) {
    const std::string columns = choices >= 0 ? std::to_string(choices) : "choices";
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected [M, choices] = [%lld, %s], got %s", name, number(M), columns.c_str(),
                tensor_shape(*t).c_str());
  }
  const bool contiguous = (t->shape[1] <= 1 || t->strides[1] == 1) && (t->shape[0] <= 1 || t->strides[0] == t->shape[1]);
  if (contiguous || t->shape[0] == 0 || t->shape[1] == 0) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "%s: expected a contiguous tensor, got strides [%lld, %lld]", name, number(t->strides[0]),
              number(t->strides[1]));
}

scaledMMStatus_t check_row(const char* name, const scaledMMTensorDesc_t& t) {
  if (t.shape[1] <= kMostRowElements) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected rows of at most %d elements, got %s", name, kMostRowElements, tensor_shape(t).c_str());
}

RowwiseStrides strides_of(const scaledMMTensorDesc_t& t) { return {stride_along(t, 0), stride_along(t, 1)}; }

template <int kKernel>
class Moe : public OwnKernelProblem<kKernel> {
protected:
  Moe() {
    this->info.batch = 1;
    this->info.moe = &operands_;
  }
  MoeOperands operands_{};
};

class Sort : public Moe<6> {
public:
  bool empty() const override { return false; } // ends is written in any case

  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (options.option != 0) return fail(SCALED_MM_STATUS_BAD_PARAM, "function: expected 0 for this kind, got %d", int(options.option));
    if (scaledMMStatus_t s = check_option("function", "0", options)) return s;
    if (scaledMMStatus_t s = check_operand("topk_ids", "[M, choices]", {SCALED_MM_DTYPE_INT32, SCALED_MM_DTYPE_INT64}, 2, t[1])) return s;
    const scaledMMTensorDesc_t& ids = *t[1];
    info.M = ids.shape[0];
    info.N = operands_.choices = ids.shape[1];
    if (info.M > 0 && info.N > INT32_MAX / info.M) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "topk_ids: expected at most %d elements, got %s", INT32_MAX, tensor_shape(ids).c_str());
    }
    operands_.ids = strides_of(ids);
    operands_.wide_ids = ids.dtype == SCALED_MM_DTYPE_INT64;
    variant = info.out_dtype = SCALED_MM_DTYPE_INT32; // one kernel for both dtypes
    operands_.mapped = -1;
    if (t[2] != nullptr) {
      if (scaledMMStatus_t s = check_operand("expert_map", "[G]", {SCALED_MM_DTYPE_INT32}, 1, t[2])) return s;
      operands_.mapped = t[2]->shape[0];
      operands_.map_stride = stride_along(*t[2], 0);
    }
    if (scaledMMStatus_t s = check_indices("out", "[M choices]", info.M * info.N, t[0])) return s;
    if (scaledMMStatus_t s = check_indices("ends", "[E]", -1, t[3])) return s;
    operands_.experts = t[3]->shape[0];
    if (operands_.experts < 1 || operands_.experts > kMostExperts) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "ends: expected [E] with E from 1 to %d, got %s", kMostExperts, tensor_shape(*t[3]).c_str());
    }
    return check_rows_of_tokens("inverse", info.M, info.N, t[4]);
  }
};

class Quantize : public Moe<7> {
public:
  // A row without elements has a scale.
  bool empty() const override { return info.M == 0 || operands_.choices == 0 || (info.N == 0 && operands_.block_scales); }

  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (scaledMMStatus_t s = check_option("function", "scaledMMMoeScales_t", options)) return s;
    operands_.block_scales = options.option == SCALED_MM_MOE_BLOCK_SCALES;
    if (scaledMMStatus_t s = check_operand("x", "[M, K]", kFloatDtypes, 2, t[1])) return s;
    const scaledMMTensorDesc_t& x = *t[1];
    info.M = x.shape[0];
    info.N = x.shape[1];
    variant = info.out_dtype = x.dtype;
    operands_.x = strides_of(x);
    if (scaledMMStatus_t s = check_row("x", x)) return s;
    if (scaledMMStatus_t s = check_rows_of_tokens("rows", info.M, -1, t[2])) return s;
    operands_.choices = t[2]->shape[1];
    if (scaledMMStatus_t s = check_operand("out", "[rows, K]", {SCALED_MM_DTYPE_INT8}, 2, t[0])) return s;
    operands_.rows = t[0]->shape[0];
    if (t[0]->shape[1] != info.N) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out: expected [rows, K] with K = %lld as in x, got %s", number(info.N),
                  tensor_shape(*t[0]).c_str());
    }
    operands_.out = strides_of(*t[0]);
    if (scaledMMStatus_t s = check_no_overlap("out", *t[0])) return s;
    if (scaledMMStatus_t s = check_operand("out_scale", "[rows, scales]", {SCALED_MM_DTYPE_FLOAT32}, 2, t[3])) return s;
    const int64_t scales = operands_.block_scales ? (info.N + 127) / 128 : 1;
    if (t[3]->shape[0] != operands_.rows || t[3]->shape[1] != scales) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out_scale: expected [%lld, %lld], got %s", number(operands_.rows), number(scales),
                  tensor_shape(*t[3]).c_str());
    }
    operands_.out_scale = strides_of(*t[3]);
    return check_no_overlap("out_scale", *t[3]);
  }
};

class Combine : public Moe<8> {
public:
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (options.option != 0) return fail(SCALED_MM_STATUS_BAD_PARAM, "function: expected 0 for this kind, got %d", int(options.option));
    if (scaledMMStatus_t s = check_option("function", "0", options)) return s;
    if (scaledMMStatus_t s = check_operand("y", "[rows, N]", kFloatDtypes, 2, t[1])) return s;
    const scaledMMTensorDesc_t& y = *t[1];
    operands_.rows = y.shape[0];
    operands_.y = strides_of(y);
    if (scaledMMStatus_t s = check_row("y", y)) return s;
    variant = info.out_dtype = y.dtype;
    if (scaledMMStatus_t s = check_operand("out", "[M, N]", {y.dtype}, 2, t[0])) return s;
    info.M = t[0]->shape[0];
    info.N = y.shape[1];
    if (t[0]->shape[1] != info.N) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out: expected [M, N] with N = %lld as in y, got %s", number(info.N),
                  tensor_shape(*t[0]).c_str());
    }
    operands_.out = strides_of(*t[0]);
    if (scaledMMStatus_t s = check_no_overlap("out", *t[0])) return s;
    if (scaledMMStatus_t s = check_operand("topk_weights", "[M, choices]", kFloatDtypes, 2, t[2])) return s;
    if (t[2]->shape[0] != info.M) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "topk_weights: expected [M, choices] with M = %lld as in out, got %s", number(info.M),
                  tensor_shape(*t[2]).c_str());
    }
    operands_.choices = t[2]->shape[1];
    operands_.weights = strides_of(*t[2]);
    operands_.weights_dtype = t[2]->dtype;
    return check_rows_of_tokens("rows", info.M, operands_.choices, t[3]);
  }
};

constexpr size_t at(size_t field) { return offsetof(GemmLaunch, moe_pointers) + field; }
#define AT(field) at(offsetof(MoePointers, field))

constexpr OperandSpec kSortOperands[] = {{"out", offsetof(GemmLaunch, out), Role::kOut},
                                         {"topk_ids", offsetof(GemmLaunch, a)},
                                         {"expert_map", AT(expert_map)},
                                         {"ends", AT(ends), Role::kWritten},
                                         {"inverse", AT(inverse), Role::kWritten}};
constexpr OperandSpec kQuantizeOperands[] = {
    {"out", offsetof(GemmLaunch, out), Role::kOut}, {"x", offsetof(GemmLaunch, a)}, {"rows", AT(rows)}, {"out_scale", AT(out_scale), Role::kWritten}};
constexpr OperandSpec kCombineOperands[] = {
    {"out", offsetof(GemmLaunch, out), Role::kOut}, {"y", offsetof(GemmLaunch, a)}, {"topk_weights", AT(weights)}, {"rows", AT(rows)}};

} // namespace

const ProblemKind kMoeSort = {"sort by expert", "row-wise ", std::size(kSortOperands), kSortOperands, false, make_problem<Sort>, {}};
const ProblemKind kMoeQuantize = {"quantizer to rows of experts", "row-wise ", std::size(kQuantizeOperands), kQuantizeOperands, false,
                                  make_problem<Quantize>,         {}};
const ProblemKind kMoeCombine = {"weighted sum over experts", "row-wise ", std::size(kCombineOperands), kCombineOperands, false,
                                 make_problem<Combine>,       {}};

} // namespace scaled_mm
