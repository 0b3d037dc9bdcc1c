// Checks of one tensor by itself: dtype, shape, strides, alignment, flags. A refusal names the tensor, what was expected and what came.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "scaled_mm/scaled_mm.h"

namespace scaled_mm {

using Dtypes = std::initializer_list<int32_t>;

std::string tensor_shape(const scaledMMTensorDesc_t& t); // "[16, 4096]"
int64_t tensor_extent(const scaledMMTensorDesc_t& t);    // bytes from the data pointer to the end of the last element, or block

constexpr int64_t kPackedAlignment = 16; // bytes, of a packed weight
// What a data pointer must be a multiple of, whatever the kernel.
int64_t tensor_alignment(const scaledMMTensorDesc_t& t);

scaledMMStatus_t check_dtype(const char* name, Dtypes expected, const scaledMMTensorDesc_t& t);
// Sizes, strides, alignment and flags of a tensor whose dtype was checked before.
scaledMMStatus_t check_tensor(const char* name, const scaledMMTensorDesc_t& t);
// Both, of a tensor that must be there, and its number of dimensions unless ndim is -1. shape: in messages.
scaledMMStatus_t check_operand(const char* name, const char* shape, Dtypes dtypes, int32_t ndim, const scaledMMTensorDesc_t* t);
// Whether no two elements of an output share memory: each dimension must step over all that the ones with smaller strides reach.
scaledMMStatus_t check_no_overlap(const char* name, const scaledMMTensorDesc_t& t);
// Whether a tensor is the one a descriptor was created with: dtype, shape and strides. Either may be absent.
scaledMMStatus_t check_same(const char* name, const scaledMMTensorDesc_t* expected, const scaledMMTensorDesc_t* got);

// A matrix, or a batch of them, as [batch, rows, columns].
struct Matrix {
  int64_t batch, rows, columns;
  int64_t stride_batch, stride_row, stride_column;
};

scaledMMStatus_t check_matrix(const char* name, const char* shape, Dtypes dtypes, const scaledMMTensorDesc_t* t, Matrix* m);

// A vector along M (is_column) or N, of a plain product (batch -1) or one for each of a batch.
struct VectorRule {
  const char* dim;
  int64_t length;
  bool is_column, one_value; // one_value: a single value for the whole vector will do
  int64_t batch;
  bool either_way = false; // along N also as a column [N, 1], which is how checkpoints store scales of output channels
};

// One value, [length], [length, 1] / [1, length], in a batch also [B, length, 1] / [B, 1, length], where B and, if one value
// will do, the length may be 1. The stride is 0 for one value, the batch stride where the batch shares the vector.
scaledMMStatus_t check_vector(const char* name, const VectorRule& rule, const scaledMMTensorDesc_t& t, int64_t* stride, int64_t* batch_stride);
// The same of float32 scales, which must be there.
scaledMMStatus_t check_scale(const char* name, const VectorRule& rule, const scaledMMTensorDesc_t* t, int64_t* stride, int64_t* batch_stride);
// The same of sums, whose rule has no one_value, and of zero points.
scaledMMStatus_t check_integers(const char* name, const VectorRule& rule, Dtypes dtypes, const scaledMMTensorDesc_t& t, int64_t* stride,
                                int64_t* batch_stride);

} // namespace scaled_mm
