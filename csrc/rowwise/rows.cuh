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
  int K;     // elements of a row of the output
  int spans; // thread blocks of a row, where several share it
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

// Eight elements, as words: elements of 16 bits would take a register each.
template <class T>
struct alignas(sizeof(T) * kChunk > 16 ? 16 : sizeof(T) * kChunk) Chunk {
  static constexpr int kWords = int(sizeof(T)) * kChunk / 4;
  uint32_t words[kWords];

  __device__ static Chunk of(const T (&values)[kChunk]) {
    Chunk chunk;
    memcpy(chunk.words, values, sizeof(chunk.words));
    return chunk;
  }
  __device__ void get(T (&values)[kChunk]) const { memcpy(values, words, sizeof(words)); }
};

// As float32, which is exact.
template <class T>
__device__ inline void to_floats(const Chunk<T>& chunk, float (&v)[kChunk]) {
#pragma unroll
  for (int i = 0; i < Chunk<T>::kWords; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      v[i] = __uint_as_float(chunk.words[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      v[2 * i] = __uint_as_float(chunk.words[i] << 16);
      v[2 * i + 1] = __uint_as_float(chunk.words[i] & 0xffff0000u);
    } else {
      __half2 pair;
      memcpy(&pair, &chunk.words[i], 4);
      v[2 * i] = __low2float(pair);
      v[2 * i + 1] = __high2float(pair);
    }
  }
}

// Rounded to T.
template <class T>
__device__ inline Chunk<T> from_floats(const float (&v)[kChunk]) {
  Chunk<T> chunk;
#pragma unroll
  for (int i = 0; i < Chunk<T>::kWords; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      chunk.words[i] = __float_as_uint(v[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
      memcpy(&chunk.words[i], &pair, 4);
    } else {
      const __half2 pair = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
      memcpy(&chunk.words[i], &pair, 4);
    }
  }
  return chunk;
}

// Elements [k, k + 8) of a row; 0 past its end. kVectors: chunks are whole and aligned.
template <bool kVectors, class T>
__device__ inline Chunk<T> read_chunk(const void* data, int64_t first, int64_t stride_k, int k, int K) {
  const T* const row = static_cast<const T*>(data) + first;
  Chunk<T> chunk = {};
  if constexpr (kVectors) {
    if (k < K) chunk = *reinterpret_cast<const Chunk<T>*>(row + k);
    return chunk;
  }
  T values[kChunk];
  chunk.get(values); // zeros
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    if (k + e < K) values[e] = row[int64_t(k + e) * stride_k];
  }
  return Chunk<T>::of(values);
}

template <bool kVectors, class T>
__device__ inline Chunk<T> read_chunk(const Matrix& m, int64_t row, int k, int K) {
  return read_chunk<kVectors, T>(m.data, row * m.stride_row, m.stride_k, k, K);
}

template <bool kVectors, class T>
__device__ inline void write_chunk(const Matrix& m, int64_t row, int k, int K, const Chunk<T>& chunk) {
  T* const data = static_cast<T*>(m.data) + row * m.stride_row;
  if constexpr (kVectors) {
    if (k < K) *reinterpret_cast<Chunk<T>*>(data + k) = chunk;
  } else {
    T values[kChunk];
    chunk.get(values);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if (k + e < K) data[int64_t(k + e) * m.stride_k] = values[e];
    }
  }
}

// The same for kernels that learn only when they run whether chunks are aligned, and that may have a part of one.
template <class T>
__device__ inline void load_chunk(const Matrix& m, int64_t row, int k, int K, float (&v)[kChunk]) {
  if (m.vectors && k + kChunk <= K) {
    to_floats(read_chunk<true, T>(m, row, k, K), v);
  } else {
    to_floats(read_chunk<false, T>(m, row, k, K), v);
  }
}

template <class T>
__device__ inline void store_chunk(const Matrix& m, int64_t row, int k, int K, const Chunk<T>& chunk) {
  if (m.vectors && k + kChunk <= K) {
    write_chunk<true>(m, row, k, K, chunk);
  } else {
    write_chunk<false>(m, row, k, K, chunk);
  }
}

} // namespace scaled_mm::rowwise
