// Quantizers of the GGUF formats: x [M, K] to GGUF blocks.
#include <iterator>

#include "problems/kinds.h"
#include "problems/own_kernel.h"

namespace scaled_mm {
namespace {

constexpr int64_t kBlock = 32; // values of a GGUF block

#define DTYPE_OF_FORMAT(NAME, ...) SCALED_MM_DTYPE_##NAME,
constexpr Dtypes kFormats = {SCALED_MM_GGUF_FORMATS(DTYPE_OF_FORMAT)};
#undef DTYPE_OF_FORMAT

class GgufQuantize : public OwnKernelProblem<5> {
public:
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (scaledMMStatus_t s = check_option("rule", "scaledMMGgufRule_t", options)) return s;
    if (scaledMMStatus_t s = check_operand("x", "[M, K]", kFloatDtypes, 2, t[1])) return s;
    const scaledMMTensorDesc_t& x = *t[1];
    if (x.shape[1] % kBlock) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "x: expected [M, K] with K a multiple of 32, got %s", tensor_shape(x).c_str());
    }
    if (scaledMMStatus_t s = check_operand("out", "[M, K]", kFormats, 2, t[0])) return s;
    const scaledMMTensorDesc_t& out = *t[0];
    if (out.shape[0] != x.shape[0] || out.shape[1] != x.shape[1]) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out: expected [M, K] = %s, got %s", tensor_shape(x).c_str(), tensor_shape(out).c_str());
    }
    const int64_t bytes = x.shape[1] / kBlock * scaledMMGetBlockBytes(out.dtype); // of a row
    if (bytes > 0 && (out.strides[1] != 1 || (out.shape[0] > 1 && out.strides[0] != bytes))) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "out: expected one block after the other, strides %lld and 1, got %lld and %lld",
                  static_cast<long long>(bytes), static_cast<long long>(out.strides[0]), static_cast<long long>(out.strides[1]));
    }
    operands_.function = options.option;
    operands_.output = out.dtype;
    info.rowwise = &operands_;
    info.batch = 1;
    info.M = x.shape[0];
    info.N = x.shape[1];
    info.a_stride_m = stride_along(x, 0);
    info.a_stride_k = stride_along(x, 1);
    variant = info.out_dtype = x.dtype;
    return SCALED_MM_STATUS_SUCCESS;
  }

private:
  RowwiseOperands operands_{};
};

constexpr OperandSpec kOperands[] = {{"out", offsetof(GemmLaunch, out), Role::kOut}, {"x", offsetof(GemmLaunch, a)}};

} // namespace

const ProblemKind kGgufQuantize = {"GGUF quantizer", "GGUF ", std::size(kOperands), kOperands, false, make_problem<GgufQuantize>, {}};

} // namespace scaled_mm
