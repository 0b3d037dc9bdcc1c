// Checks of a single tensor: dtype, shape, strides, alignment, flags. A message names the tensor, what was expected and what was given.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "scaled_mm/scaled_mm.h"

namespace scaled_mm {

using Dtypes = std::initializer_list<int32_t>;

std::string tensor_shape(const scaledMMTensorDesc_t& t); // "[16, 4096]"
int64_t tensor_extent(const scaledMMTensorDesc_t& t);    // bytes from the data pointer to the end of the last element or GGUF block

// For %lld of a message.
inline long long number(int64_t value) { return static_cast<long long>(value); }

constexpr int64_t kPackedAlignment = 16; // bytes, of a packed weight
// The alignment in bytes that a data pointer must have for any kernel.
int64_t tensor_alignment(const scaledMMTensorDesc_t& t);

scaledMMStatus_t check_dtype(const char* name, Dtypes expected, const scaledMMTensorDesc_t& t);
// Checks sizes, strides, alignment and flags. The dtype must have been checked.
scaledMMStatus_t check_tensor(const char* name, const scaledMMTensorDesc_t& t);
// Both checks, for a required tensor. ndim: its number of dimensions, -1 for any. shape: for messages.
scaledMMStatus_t check_operand(const char* name, const char* shape, Dtypes dtypes, int32_t ndim, const scaledMMTensorDesc_t* t);
// Checks that no two elements of an output alias: each stride must exceed the extent covered by the dimensions with smaller strides.
scaledMMStatus_t check_no_overlap(const char* name, const scaledMMTensorDesc_t& t);
// Checks that a tensor has the dtype, shape and strides that the descriptor was created with. nullptr: absent.
scaledMMStatus_t check_same(const char* name, const scaledMMTensorDesc_t* expected, const scaledMMTensorDesc_t* got);

// A matrix, or a batch of them, as [batch, rows, columns].
struct Matrix {
  int64_t batch, rows, columns;
  int64_t stride_batch, stride_row, stride_column;
};

scaledMMStatus_t check_matrix(const char* name, const char* shape, Dtypes dtypes, const scaledMMTensorDesc_t* t, Matrix* m);

// The rule for a vector along M (is_column) or N. batch: the batch size, -1 for a product that is not batched.
struct VectorRule {
  const char* dim;
  int64_t length;
  bool is_column, one_value; // one_value: a single value may stand for the whole vector
  int64_t batch;
  bool either_way = false;   // a vector along N may also be a column [N, 1], as checkpoints store scales of output channels
  const char* rows_of = "a"; // in messages: the operand that has M rows
};

// Accepts one value, [length], and [length, 1] or [1, length]; in a batch also [B, length, 1] or [B, 1, length], where B may be 1 and, with
// one_value, length too. *stride is 0 for one value. *batch_stride is 0 if all products share the vector.
scaledMMStatus_t check_vector(const char* name, const VectorRule& rule, const scaledMMTensorDesc_t& t, int64_t* stride, int64_t* batch_stride);
// The same for float32 scales, which are required.
scaledMMStatus_t check_scale(const char* name, const VectorRule& rule, const scaledMMTensorDesc_t* t, int64_t* stride, int64_t* batch_stride);
// The same for zero points and, without one_value, for sums.
scaledMMStatus_t check_integers(const char* name, const VectorRule& rule, Dtypes dtypes, const scaledMMTensorDesc_t& t, int64_t* stride,
                                int64_t* batch_stride);

} // namespace scaled_mm
