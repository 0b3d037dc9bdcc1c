// The rotary position embedding of query and key.
#include <iterator>

#include "problems/kinds.h"
#include "problems/own_kernel.h"

namespace scaled_mm {
namespace {

class Rope : public OwnKernelProblem<3> {
public:
  bool empty() const override { return info.M == 0 || info.N == 0 || operands_.query_heads + operands_.key_heads == 0; }

  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (scaledMMStatus_t s = check_option("pairs", "scaledMMRopePairs_t", options)) return s;
    operands_.interleaved = options.option == SCALED_MM_ROPE_INTERLEAVED;
    info.batch = 1;
    info.rope = &operands_;
    if (scaledMMStatus_t s = check_operand("query", "[M, HQ, D]", kFloatDtypes, 3, t[1])) return s;
    const scaledMMTensorDesc_t& query = *t[1];
    if (query.shape[2] % 2) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "query: expected [M, HQ, D] with an even D, got %s", tensor_shape(query).c_str());
    }
    info.M = query.shape[0];
    info.N = query.shape[2];
    variant = info.out_dtype = query.dtype;
    if (scaledMMStatus_t s = check_operand("key", "[M, HK, D]", {query.dtype}, 3, t[2])) return s;
    operands_.query_heads = query.shape[1];
    operands_.key_heads = t[2]->shape[1];
    if (scaledMMStatus_t s = heads("query", operands_.query_heads, t[1], &operands_.query)) return s;
    if (scaledMMStatus_t s = heads("key", operands_.key_heads, t[2], &operands_.key)) return s;
    if (scaledMMStatus_t s = heads("out", operands_.query_heads, t[0], &operands_.out_query)) return s;
    if (scaledMMStatus_t s = heads("out_key", operands_.key_heads, t[5], &operands_.out_key)) return s;
    if (scaledMMStatus_t s = check_no_overlap("out", *t[0])) return s;
    if (scaledMMStatus_t s = check_no_overlap("out_key", *t[5])) return s;
    if (scaledMMStatus_t s = angles("cos", t[3], &operands_.cos, &operands_.cos_dtype)) return s;
    if (scaledMMStatus_t s = angles("sin", t[4], &operands_.sin, &operands_.sin_dtype)) return s;
    operands_.angles = t[3]->shape[1];
    if (t[4]->shape[1] == operands_.angles) return SCALED_MM_STATUS_SUCCESS;
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "sin: expected %s as cos, got %s", tensor_shape(*t[3]).c_str(), tensor_shape(*t[4]).c_str());
  }

private:
  scaledMMStatus_t heads(const char* name, int64_t count, const scaledMMTensorDesc_t* t, HeadStrides* strides) {
    if (scaledMMStatus_t s = check_operand(name, "[M, H, D]", {info.out_dtype}, 3, t)) return s;
    if (t->shape[0] != info.M || t->shape[1] != count || t->shape[2] != info.N) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected [%lld, %lld, %lld], got %s", name, number(info.M), number(count), number(info.N),
                  tensor_shape(*t).c_str());
    }
    *strides = {stride_along(*t, 0), stride_along(*t, 1), stride_along(*t, 2)};
    return SCALED_MM_STATUS_SUCCESS;
  }

  scaledMMStatus_t angles(const char* name, const scaledMMTensorDesc_t* t, RowwiseStrides* strides, int32_t* dtype) {
    if (scaledMMStatus_t s = check_operand(name, "[M, D]", kFloatDtypes, 2, t)) return s;
    if (t->shape[0] != info.M || (t->shape[1] != info.N && t->shape[1] != info.N / 2)) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected [%lld, %lld] or [%lld, %lld], got %s", name, number(info.M), number(info.N),
                  number(info.M), number(info.N / 2), tensor_shape(*t).c_str());
    }
    *strides = {stride_along(*t, 0), stride_along(*t, 1)};
    *dtype = t->dtype;
    return SCALED_MM_STATUS_SUCCESS;
  }

  RopeOperands operands_{};
};

constexpr size_t at(size_t field) { return offsetof(GemmLaunch, rope_pointers) + field; }
#define AT(field) at(offsetof(RopePointers, field))

constexpr OperandSpec kOperands[] = {
    {"out", offsetof(GemmLaunch, out), Role::kOut}, {"query", offsetof(GemmLaunch, a)}, {"key", AT(key)}, {"cos", AT(cos)}, {"sin", AT(sin)},
    {"out_key", AT(out_key), Role::kWritten}};

} // namespace

const ProblemKind kRope = {"rotary position embedding", "row-wise ", std::size(kOperands), kOperands, false, make_problem<Rope>, {}};

} // namespace scaled_mm
