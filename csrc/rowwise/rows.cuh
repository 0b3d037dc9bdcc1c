// The operands of a row-wise kernel, and how a thread reads and writes its part of a row: chunks of eight elements.
#pragma once

#include <cstdint>

#include "core/kernel_abi.h"
#include "rowwise/arithmetic.cuh"

namespace scaled_mm::rowwise {

constexpr int kChunk = 8;   // consecutive elements
constexpr int kLanes = 256; // of a row sum: chunk c belongs to lane c mod 256

// A matrix [rows, K] of elements. Strides in elements.
struct Matrix {
  void* data;
  int64_t stride_row, stride_k;
  bool vectors; // the chunks of every row are aligned to 16 bytes (int8: to 8), and lie in a row
};

// [K] of any float dtype; data is nullptr for an absent one.
struct Vector {
  const void* data;
  int64_t stride;
  int32_t dtype; // scaledMMDtype_t
  bool vectors;
};

// What a kernel needs. The fields that an operator does not use are zero.
struct Rows {
  int64_t rows;
  int K; // elements of a row of the output
  Matrix x, residual, total, out;
  Vector vector, offset;
  double epsilon;
  int32_t function, output;
  const float* scale; // of static quantization
  int64_t scale_stride;
  const void* zero_point; // int8 or int32, or nullptr
  int64_t zero_point_stride;
  int32_t zero_point_dtype;
  float* out_scale; // [rows], contiguous, like the next two
  int32_t* out_zero_point;
  int32_t* out_row_sums;
};

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class X>
__device__ inline X from_float(float v) {
  if constexpr (std::is_same_v<X, float>) {
    return v;
  } else if constexpr (std::is_same_v<X, __half>) {
    return __float2half_rn(v);
  } else {
    return __float2bfloat16_rn(v);
  }
}

template <class T>
struct alignas(sizeof(T) * kChunk > 16 ? 16 : sizeof(T) * kChunk) Chunk {
  T values[kChunk];
};

// Elements [k, k + 8) of a row as float32, which is exact; 0 past the end of the row.
template <class T>
__device__ inline void load_chunk(const void* data, int64_t first, int64_t stride_k, bool vectors, int k, int K, float (&v)[kChunk]) {
  const T* const row = static_cast<const T*>(data) + first;
  if (vectors && k + kChunk <= K) {
    const Chunk<T> chunk = *reinterpret_cast<const Chunk<T>*>(row + k);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) v[e] = to_float(chunk.values[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) v[e] = k + e < K ? to_float(row[int64_t(k + e) * stride_k]) : 0.0f;
  }
}

template <class T>
__device__ inline void load_chunk(const Matrix& m, int64_t row, int k, int K, float (&v)[kChunk]) {
  load_chunk<T>(m.data, row * m.stride_row, m.stride_k, m.vectors, k, K, v);
}

__device__ inline void load_chunk(const Vector& vector, int k, int K, float (&v)[kChunk]) {
  if (vector.dtype == SCALED_MM_DTYPE_FLOAT32) {
    load_chunk<float>(vector.data, 0, vector.stride, vector.vectors, k, K, v);
  } else if (vector.dtype == SCALED_MM_DTYPE_FLOAT16) {
    load_chunk<__half>(vector.data, 0, vector.stride, vector.vectors, k, K, v);
  } else {
    load_chunk<__nv_bfloat16>(vector.data, 0, vector.stride, vector.vectors, k, K, v);
  }
}

template <class T>
__device__ inline void store_chunk(const Matrix& m, int64_t row, int k, int K, const T (&v)[kChunk]) {
  T* const data = static_cast<T*>(m.data) + row * m.stride_row;
  if (m.vectors && k + kChunk <= K) {
    Chunk<T> chunk;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) chunk.values[e] = v[e];
    *reinterpret_cast<Chunk<T>*>(data + k) = chunk;
  } else {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if (k + e < K) data[int64_t(k + e) * m.stride_k] = v[e];
    }
  }
}

} // namespace scaled_mm::rowwise
