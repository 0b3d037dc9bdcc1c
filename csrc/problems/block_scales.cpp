#include "problems/block_scales.h"

#include <cstdio>

#include "core/status.h"
#include "core/tensors.h"

namespace scaled_mm {
namespace {

constexpr int32_t kBlock = 128, kSmallBlock = 64;

int64_t blocks_of(int64_t size, int32_t block) { return (size + block - 1) / block; }

// The block size follows from the number of scales along K. If K <= 64, both sizes have one, and the number along N decides. 128 if neither fits.
int32_t block_size_of(const ProductInfo& info, const scaledMMTensorDesc_t* a_scale, const scaledMMTensorDesc_t* b_scale) {
  const auto tells = [](int64_t size, const scaledMMTensorDesc_t* scales) {
    if (scales == nullptr || (scales->ndim != 2 && scales->ndim != 3)) return false; // refused later
    return blocks_of(size, kSmallBlock) != blocks_of(size, kBlock) && scales->shape[scales->ndim - 1] == blocks_of(size, kSmallBlock);
  };
  return tells(info.K, a_scale) || (info.K <= kSmallBlock && tells(info.N, b_scale)) ? kSmallBlock : kBlock;
}

// "[M, ceil(K / 128)]" from "[M, ceil(K / %d)]".
std::string with_block(const char* shape, int32_t block) {
  char text[64];
  snprintf(text, sizeof(text), shape, block, block);
  return text;
}

// The stride of a dimension of size 1 is meaningless; 0 is used.
int64_t stride_of(const scaledMMTensorDesc_t& t, int dimension) { return t.shape[dimension] > 1 ? t.strides[dimension] : 0; }

// expected: the sizes, ndim of them. where: the sizes of the product, in messages.
scaledMMStatus_t check_sizes(const char* name, const char* shape, const char* where, int ndim, const int64_t* expected,
                             const scaledMMTensorDesc_t* t) {
  if (scaledMMStatus_t s = check_operand(name, shape, {SCALED_MM_DTYPE_FLOAT32}, ndim, t)) return s;
  scaledMMTensorDesc_t wanted = {};
  wanted.ndim = ndim;
  bool equal = true;
  for (int i = 0; i < ndim; ++i) {
    wanted.shape[i] = expected[i];
    equal = equal && t->shape[i] == expected[i];
  }
  if (equal) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s = %s (%s), got %s", name, shape, tensor_shape(wanted).c_str(), where,
              tensor_shape(*t).c_str());
}

scaledMMStatus_t check_a(const char* rows, const scaledMMTensorDesc_t* a_scale, ProductInfo* info) {
  const std::string shape = with_block(("[" + std::string(rows) + ", ceil(K / %d)]").c_str(), info->block_size);
  char where[96];
  snprintf(where, sizeof(where), "%s = %lld, K = %lld", rows, number(info->M), number(info->K));
  const int64_t expected[] = {info->M, blocks_of(info->K, info->block_size)};
  if (scaledMMStatus_t s = check_sizes("a_scale", shape.c_str(), where, 2, expected, a_scale)) return s;
  info->a_scale_stride = stride_of(*a_scale, 0);
  info->a_scale_stride_k = stride_of(*a_scale, 1);
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace

scaledMMStatus_t check_block_scales(const scaledMMTensorDesc_t* a_scale, const scaledMMTensorDesc_t* b_scale, ProductInfo* info) {
  const int32_t block = info->block_size = block_size_of(*info, a_scale, b_scale);
  if (scaledMMStatus_t s = check_a("M", a_scale, info)) return s;
  char where[96];
  snprintf(where, sizeof(where), "K = %lld, N = %lld", number(info->K), number(info->N));
  const int64_t expected[] = {blocks_of(info->K, block), blocks_of(info->N, block)};
  if (scaledMMStatus_t s = check_sizes("b_scale", with_block("[ceil(K / %d), ceil(N / %d)]", block).c_str(), where, 2, expected, b_scale)) return s;
  info->b_scale_stride_k = stride_of(*b_scale, 0);
  info->b_scale_stride = stride_of(*b_scale, 1);
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_block_scales_of_experts(const scaledMMTensorDesc_t* a_scale, const scaledMMTensorDesc_t* b_scale, int64_t experts,
                                               ProductInfo* info, int64_t* stride_e) {
  const int32_t block = info->block_size = block_size_of(*info, a_scale, b_scale);
  if (scaledMMStatus_t s = check_a("tokens", a_scale, info)) return s;
  char where[96];
  snprintf(where, sizeof(where), "E = %lld, K = %lld, N = %lld", number(experts), number(info->K), number(info->N));
  const int64_t expected[] = {experts, blocks_of(info->K, block), blocks_of(info->N, block)};
  if (scaledMMStatus_t s = check_sizes("b_scale", with_block("[E, ceil(K / %d), ceil(N / %d)]", block).c_str(), where, 3, expected, b_scale))
    return s;
  *stride_e = stride_of(*b_scale, 0);
  info->b_scale_stride_k = stride_of(*b_scale, 1);
  info->b_scale_stride = stride_of(*b_scale, 2);
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace scaled_mm
