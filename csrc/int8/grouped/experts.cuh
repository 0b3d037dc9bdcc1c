// A launch's operands as its experts see them.
#pragma once

#include "int8/epilogue/formula.cuh"
#include "int8/grouped/walk.cuh"

namespace scaled_mm::grouped {

inline Experts experts_of(const GemmLaunch& l) {
  return {l.expert_offsets, int(l.groups->experts), int(l.M), l.groups->zero_unassigned ? int(l.M) : 0};
}

// Tiles that the experts can have at most, whatever the offsets: one that is not full for each expert with rows.
inline int64_t most_tiles_m(const GemmLaunch& l, int64_t tile_m) { return l.M / tile_m + (l.groups->experts < l.M ? l.groups->experts : l.M); }

// From one expert to the next, in elements.
struct ExpertStrides {
  int64_t b, b_scale, bias;
};

inline ExpertStrides expert_strides(const GemmLaunch& l) { return {l.groups->b_stride, l.groups->b_scale_stride, l.groups->bias_stride}; }

// The epilogue's operands with m and n counted from an expert's first row and column.
__device__ inline EpilogueOperands operands_of_expert(const EpilogueOperands& all, const ExpertStrides& strides, int expert, int begin) {
  EpilogueOperands own = all;
  if (all.a_scale) own.a_scale += begin * all.a_scale_stride;
  if (all.b_scale) own.b_scale += expert * strides.b_scale;
  if (all.bias) {
    const int64_t bytes = all.bias_dtype == SCALED_MM_DTYPE_FLOAT32 ? 4 : 2;
    own.bias = static_cast<const char*>(all.bias) + expert * strides.bias * bytes;
  }
  if (all.row_terms) {
    own.row_terms += begin;
    own.col_terms += int64_t(expert) * all.col_terms_batch;
  }
  own.a_scale_batch = own.b_scale_batch = own.bias_batch = 0; // constants: the compiler drops the offsets of a batch
  own.row_terms_batch = own.col_terms_batch = 0;
  return own;
}

// Zeroes the unassigned rows of out, from `first` on. Thread blocks of a grid of one or two dimensions take rows in turn; the first `threads` threads
// of a block write a row. With expert parallelism most rows may be unassigned, so aligned rows are written 16 bytes at a time.
template <class Out>
__device__ inline void clear_rows(Out* out, int64_t stride_m, int64_t stride_n, int first, int rows, int columns, int threads) {
  constexpr int kVector = 16 / int(sizeof(Out));
  const bool aligned = stride_n == 1 && stride_m % kVector == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  const int vectors = aligned ? columns / kVector : 0;
  for (int64_t m = int64_t(first) + blockIdx.x + gridDim.x * blockIdx.y; m < rows; m += gridDim.x * gridDim.y) {
    Out* const row = out + m * stride_m;
    for (int i = int(threadIdx.x); i < vectors; i += threads) reinterpret_cast<int4*>(row)[i] = int4{0, 0, 0, 0};
    for (int n = vectors * kVector + int(threadIdx.x); n < columns; n += threads) row[n * stride_n] = Out(0.0f);
  }
}

} // namespace scaled_mm::grouped
