// The block-scaled product: the validation of the plain product, and scales that are matrices.
#include <iterator>

#include "core/status.h"
#include "problems/block_scales.h"

namespace scaled_mm {
namespace {

struct BlockScaledTensors {
  const scaledMMTensorDesc_t *out, *a, *b, *a_scale, *b_scale, *bias;
};

class BlockScaled : public Problem {
public:
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (scaledMMStatus_t s = check_no_option(options)) return s;
    return validate({t[0], t[1], t[2], t[3], t[4], t[5]});
  }

  BucketKey bucket() const override { return {info.M, info.N, info.K, 0}; }

private:
  scaledMMStatus_t validate(const BlockScaledTensors& t);
};

scaledMMStatus_t BlockScaled::validate(const BlockScaledTensors& t) {
  if (scaledMMStatus_t s = check_operand("out", "[M, N]", {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32}, 2, t.out))
    return s;
  if (scaledMMStatus_t s = check_operand("a", "[M, K]", {SCALED_MM_DTYPE_INT8}, 2, t.a)) return s;
  if (scaledMMStatus_t s = check_operand("b", "[K, N]", {SCALED_MM_DTYPE_INT8}, 2, t.b)) return s;
  // The other operands are validated as a plain product with one value per scale. K is not bounded, because sums over blocks of K are float32.
  if (scaledMMStatus_t s = validate_gemm({t.out, t.a, t.b, &kOneScale, &kOneScale, t.bias, nullptr, nullptr, nullptr, nullptr}, &info, false))
    return s;
  if (scaledMMStatus_t s = check_block_scales(t.a_scale, t.b_scale, &info)) return s;
  info.constant_b = false; // no block-scaled kernel reads weights early
  variant = info.out_dtype;
  return SCALED_MM_STATUS_SUCCESS;
}

constexpr OperandSpec kOperands[] = {
    {"out", offsetof(GemmLaunch, out), Role::kOut}, {"a", offsetof(GemmLaunch, a), Role::kA},   {"b", offsetof(GemmLaunch, b), Role::kB},
    {"a_scale", offsetof(GemmLaunch, a_scale)},     {"b_scale", offsetof(GemmLaunch, b_scale)}, {"bias", offsetof(GemmLaunch, bias)},
};

} // namespace

const ProblemKind kBlockScaled = {"block-scaled GEMM",
                                  "block-scaled ",
                                  std::size(kOperands),
                                  kOperands,
                                  true,
                                  make_problem<BlockScaled>,
                                  {SCALED_MM_TABLE_BLOCK_SCALED_GEMM, " of block-scaled products", 0, "0", "b", false}};

} // namespace scaled_mm
