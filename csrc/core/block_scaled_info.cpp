#include "core/block_scaled_info.h"

#include <cstdio>

#include "core/status.h"

namespace scaled_mm {
namespace {

int64_t blocks_of(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

scaledMMStatus_t check_scale(const char* name, const char* shape, const char* sizes, int64_t rows, int64_t columns,
                             const scaledMMTensorDesc_t* t) {
  if (scaledMMStatus_t s = check_operand(name, shape, {SCALED_MM_DTYPE_FLOAT32}, 2, t)) return s;
  if (t->shape[0] == rows && t->shape[1] == columns) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s = [%lld, %lld] (%s), got %s", name, shape,
              static_cast<long long>(rows), static_cast<long long>(columns), sizes, tensor_shape(*t).c_str());
}

// A dimension of one has no stride of its own.
int64_t stride_of(const scaledMMTensorDesc_t& t, int dimension) { return t.shape[dimension] > 1 ? t.strides[dimension] : 0; }

}  // namespace

scaledMMStatus_t make_block_scaled_info(const BlockScaledTensors& t, BlockScaledInfo* info) {
  if (scaledMMStatus_t s = check_operand("out", "[M, N]", {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32},
                                         2, t.out)) return s;
  if (scaledMMStatus_t s = check_operand("a", "[M, K]", {SCALED_MM_DTYPE_INT8}, 2, t.a)) return s;
  if (scaledMMStatus_t s = check_operand("b", "[K, N]", {SCALED_MM_DTYPE_INT8}, 2, t.b)) return s;
  *info = BlockScaledInfo{};
  // One value for each scale: the rest is what a plain product would be refused for. K is a sum of floats here, and not bounded.
  const scaledMMTensorDesc_t one = {SCALED_MM_DTYPE_FLOAT32, 0, {}, {}, 4, 0};
  GemmInfo& gemm = info->gemm;
  if (scaledMMStatus_t s = make_gemm_info({t.out, t.a, t.b, &one, &one, t.bias, nullptr, nullptr, nullptr, nullptr}, &gemm, false)) return s;

  const int64_t blocks_k = blocks_of(gemm.K), blocks_n = blocks_of(gemm.N);
  char sizes[96];
  snprintf(sizes, sizeof(sizes), "M = %lld, K = %lld", static_cast<long long>(gemm.M), static_cast<long long>(gemm.K));
  if (scaledMMStatus_t s = check_scale("a_scale", "[M, ceil(K / 128)]", sizes, gemm.M, blocks_k, t.a_scale)) return s;
  snprintf(sizes, sizeof(sizes), "K = %lld, N = %lld", static_cast<long long>(gemm.K), static_cast<long long>(gemm.N));
  if (scaledMMStatus_t s = check_scale("b_scale", "[ceil(K / 128), ceil(N / 128)]", sizes, blocks_k, blocks_n, t.b_scale)) return s;
  gemm.a_scale_stride = stride_of(*t.a_scale, 0);
  info->a_scale_stride_k = stride_of(*t.a_scale, 1);
  info->b_scale_stride_k = stride_of(*t.b_scale, 0);
  gemm.b_scale_stride = stride_of(*t.b_scale, 1);
  gemm.bytes.a_scale = tensor_extent(*t.a_scale);
  gemm.bytes.b_scale = tensor_extent(*t.b_scale);
  return SCALED_MM_STATUS_SUCCESS;
}

}  // namespace scaled_mm
