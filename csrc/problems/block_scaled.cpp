// The block-scaled product: the validation of the plain product, and scales that are matrices.
#include <cstdio>
#include <iterator>

#include "core/status.h"
#include "problems/gemm.h"

namespace scaled_mm {
namespace {

// A scale of a covers one row and this many k; a scale of b covers this many k and as many columns.
constexpr int64_t kScaleBlock = 128;

struct BlockScaledTensors {
  const scaledMMTensorDesc_t *out, *a, *b, *a_scale, *b_scale, *bias;
};

int64_t blocks_of(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

scaledMMStatus_t check_scale(const char* name, const char* shape, const char* sizes, int64_t rows, int64_t columns, const scaledMMTensorDesc_t* t) {
  if (scaledMMStatus_t s = check_operand(name, shape, {SCALED_MM_DTYPE_FLOAT32}, 2, t)) return s;
  if (t->shape[0] == rows && t->shape[1] == columns) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s = [%lld, %lld] (%s), got %s", name, shape, static_cast<long long>(rows),
              static_cast<long long>(columns), sizes, tensor_shape(*t).c_str());
}

// The stride of a dimension of size 1 is meaningless; 0 is used.
int64_t stride_of(const scaledMMTensorDesc_t& t, int dimension) { return t.shape[dimension] > 1 ? t.strides[dimension] : 0; }

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
  const scaledMMTensorDesc_t one = {SCALED_MM_DTYPE_FLOAT32, 0, {}, {}, 4, 0};
  if (scaledMMStatus_t s = validate_gemm({t.out, t.a, t.b, &one, &one, t.bias, nullptr, nullptr, nullptr, nullptr}, &info, false)) return s;

  const int64_t blocks_k = blocks_of(info.K), blocks_n = blocks_of(info.N);
  char sizes[96];
  snprintf(sizes, sizeof(sizes), "M = %lld, K = %lld", static_cast<long long>(info.M), static_cast<long long>(info.K));
  if (scaledMMStatus_t s = check_scale("a_scale", "[M, ceil(K / 128)]", sizes, info.M, blocks_k, t.a_scale)) return s;
  snprintf(sizes, sizeof(sizes), "K = %lld, N = %lld", static_cast<long long>(info.K), static_cast<long long>(info.N));
  if (scaledMMStatus_t s = check_scale("b_scale", "[ceil(K / 128), ceil(N / 128)]", sizes, blocks_k, blocks_n, t.b_scale)) return s;
  info.a_scale_stride = stride_of(*t.a_scale, 0);
  info.a_scale_stride_k = stride_of(*t.a_scale, 1);
  info.b_scale_stride_k = stride_of(*t.b_scale, 0);
  info.b_scale_stride = stride_of(*t.b_scale, 1);
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
                                  {" of block-scaled products", 0, "0", "b", false}};

} // namespace scaled_mm
