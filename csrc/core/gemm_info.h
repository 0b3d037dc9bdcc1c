// Validation, done once: from tensor descriptors to the numbers a launch needs, or a status that names the argument.
#pragma once

#include <initializer_list>
#include <string>

#include "core/kernel_abi.h"

namespace scaled_mm {

// First and one-past-last byte that a tensor touches, relative to its data pointer.
struct GemmExtents {
  int64_t out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums;
};

// The tensors of a product, in the order of the interface.
constexpr int kGemmTensors = 10;
constexpr const char* kGemmTensorNames[kGemmTensors] = {"out",  "a",            "b",            "a_scale",    "b_scale",
                                                        "bias", "a_zero_point", "b_zero_point", "a_row_sums", "b_column_sums"};

// Sizes as a launch has them: a batch that shares b is one product of all its rows where the strides allow that.
struct GemmInfo {
  int64_t M, N, K, batch;  // batch: 1 for a plain product, whose batch strides are 0
  int32_t out_dtype;
  bool has_scales, has_bias, has_a_zero_point, has_b_zero_point, has_a_row_sums, has_b_column_sums;

  int64_t a_stride_m, a_stride_k;
  int64_t b_stride_k, b_stride_n;
  int64_t out_stride_m, out_stride_n;
  int64_t a_scale_stride, b_scale_stride, bias_stride, a_zero_point_stride, b_zero_point_stride;
  int64_t a_row_sums_stride, b_column_sums_stride;
  BatchStrides batch_strides;
  int32_t bias_dtype, a_zero_point_dtype, b_zero_point_dtype;

  int64_t a_alignment, b_alignment, out_alignment;  // bytes, of the data pointers
  bool constant_b;
  GemmExtents bytes;

  bool empty() const { return M == 0 || N == 0 || batch == 0; }
  bool has_zero_point() const { return has_a_zero_point || has_b_zero_point; }
  // How many products' zero-point terms there are: 1 where all of the batch share them.
  int64_t row_term_batches() const { return batch_strides.a || batch_strides.a_zero_point || batch_strides.a_row_sums ? batch : 1; }
  int64_t column_term_batches() const {
    return batch_strides.b || batch_strides.b_zero_point || batch_strides.b_column_sums ? batch : 1;
  }
  int64_t column_terms_offset() const { return (row_term_batches() * M + 1) / 2 * 4; }  // int32s; they start on 16 bytes
  size_t workspace_size() const;  // bytes: the zero-point terms
};

struct GemmTensors {
  const scaledMMTensorDesc_t *out, *a, *b, *a_scale, *b_scale, *bias, *a_zero_point, *b_zero_point, *a_row_sums, *b_column_sums;
};

// Whether a tensor is the one a descriptor was created with: dtype, shape and strides. Either may be absent.
scaledMMStatus_t check_same(const char* name, const scaledMMTensorDesc_t* expected, const scaledMMTensorDesc_t* got);

// One tensor by itself: dtype, sizes, strides, alignment, and the number of dimensions unless that is -1.
scaledMMStatus_t check_operand(const char* name, const char* shape, std::initializer_list<int32_t> dtypes, int32_t ndim,
                               const scaledMMTensorDesc_t* t);
// Whether no two elements of an output share memory.
scaledMMStatus_t check_no_overlap(const char* name, const scaledMMTensorDesc_t& t);
int64_t tensor_extent(const scaledMMTensorDesc_t& t);  // bytes from the data pointer to the end of the last element
std::string tensor_shape(const scaledMMTensorDesc_t& t);

// one_sum: all of K is added up in one 32-bit integer, which bounds K.
scaledMMStatus_t make_gemm_info(const GemmTensors& tensors, GemmInfo* info, bool one_sum = true);

// Whether a tensor of these sizes is small enough for a kernel to reckon its workspace in 64 bits.
scaledMMStatus_t check_workspace_room(const char* row, std::initializer_list<int64_t> sizes);

// What a kernel row asks of the memory it works on, in bytes; see scaledMMTableRow_t.
struct RowNeeds {
  int32_t align_a = 1, align_b = 1, align_out = 1, store_bytes = 1;

  bool any() const { return align_a > 1 || align_b > 1 || align_out > 1 || store_bytes > 1; }
};

// Why a row with these needs cannot take this product; nullptr when it can.
// A row that needs anything needs K contiguous in a and b, N contiguous in out, and row and batch strides that are multiples
// of its alignments.
const char* misfit(const GemmInfo& info, const RowNeeds& needs);

}  // namespace scaled_mm
