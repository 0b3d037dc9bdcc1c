// Shared by the kinds of product: why a kernel config cannot take a product, and the limit of workspaces.
#include <algorithm>
#include <climits>

#include "core/problem.h"
#include "core/status.h"

namespace scaled_mm {
namespace {

// A tensor map holds strides below 2^40 bytes; the driver refuses larger ones.
constexpr int64_t kStrideLimit = int64_t(1) << 40;
// CUDA's limit on the grid's third dimension, which some kernels use for the batch.
constexpr int64_t kBatchLimit = 65535;

const char* batch_misfit(const ProductInfo& info, const RowNeeds& needs) {
  const BatchStrides& s = info.batch_strides;
  const int64_t out_bytes = dtype_bytes(info.out_dtype);
  if (info.batch > kBatchLimit) return "the batch has more than 65535 products";
  // Kernels index the zero-point terms of a batch's rows and columns in 32 bits.
  if ((info.has_a_zero_point || info.has_b_zero_point) && info.batch * std::max(info.M, info.N) > INT_MAX)
    return "the batch has 2^31 rows or columns or more";
  if (s.a % needs.align_a != 0) return "the batch stride of a is not a multiple of the row's alignment";
  if (s.b % needs.align_b != 0) return "the batch stride of b is not a multiple of the row's alignment";
  if (s.out * out_bytes % needs.align_out != 0) return "the batch stride of out is not a multiple of the row's alignment";
  if (s.a >= kStrideLimit || s.b >= kStrideLimit || s.out >= kStrideLimit / out_bytes) return "a batch stride is 2^40 bytes or more";
  return nullptr;
}

} // namespace

const char* misfit(const ProductInfo& info, const RowNeeds& needs) {
  if (info.block_size < needs.block_size) return "the blocks of scales are smaller than the row's kernel takes";
  if (!needs.any()) return nullptr;
  // The stride of a dimension of size 1 is not used, so it is not checked.
  const int64_t out_bytes = dtype_bytes(info.out_dtype);
  if (info.K == 0) return "K is 0";
  constexpr int64_t kRoomForTiles = 2048; // the coordinates of tiles and clusters, including their far corners, are 32-bit
  if (info.M > INT32_MAX - kRoomForTiles || info.N > INT32_MAX - kRoomForTiles) return "M or N is within a tile of 2^31";
  if (info.K > 1 && info.a_stride_k != 1) return "a is not contiguous along K";
  if (info.M > 1 && info.a_stride_m % needs.align_a != 0) return "the row stride of a is not a multiple of the row's alignment";
  if (info.M > 1 && info.a_stride_m < info.K) return "the rows of a overlap";
  if ((info.M > 1 && (info.a_stride_m >= kStrideLimit || info.out_stride_m >= kStrideLimit / out_bytes)) ||
      (info.N > 1 && info.b_stride_n >= kStrideLimit)) {
    return "a row stride is 2^40 bytes or more";
  }
  if (info.a_alignment < needs.align_a) return "the data pointer of a is not aligned";
  if (info.K > 1 && info.b_stride_k != 1) return "b is not contiguous along K";
  if (info.N > 1 && info.b_stride_n % needs.align_b != 0) return "the column stride of b is not a multiple of the row's alignment";
  if (info.N > 1 && info.b_stride_n < info.K) return "the columns of b overlap";
  if (info.b_alignment < needs.align_b) return "the data pointer of b is not aligned";
  if (info.N > 1 && info.out_stride_n != 1) return "out is not contiguous along N";
  if (info.M > 1 && info.out_stride_m * out_bytes % needs.align_out != 0) {
    return "the row stride of out is not a multiple of the row's alignment";
  }
  if (info.N * out_bytes % needs.store_bytes != 0) return "the row's kernel stores whole vectors, and the rows of out end within one";
  if (info.out_alignment < needs.align_out) return "the data pointer of out is not aligned";
  return info.batch > 1 ? batch_misfit(info, needs) : nullptr;
}

scaledMMStatus_t check_no_option(const Options& options) {
  if (options.option == 0) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_PARAM, "option: expected 0, for this kind of product has none, got %d", int(options.option));
}

scaledMMStatus_t check_workspace_room(const char* row, std::initializer_list<int64_t> sizes) {
  int64_t elements = 1;
  bool fits = true;
  std::string text;
  for (int64_t size : sizes) {
    fits = fits && !__builtin_mul_overflow(elements, size, &elements);
    text += (text.empty() ? "[" : ", ") + std::to_string(size);
  }
  if (fits && elements <= int64_t(1) << 48) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "kernel: row %s has a workspace for at most 2^48 elements, got sizes %s]", row, text.c_str());
}

} // namespace scaled_mm
