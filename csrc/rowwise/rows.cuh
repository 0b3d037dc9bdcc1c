// The operands of a row-wise kernel, and how a thread reads and writes its part of a row: chunks of eight elements.
#pragma once

#include <cstdint>

#include "core/kernel_abi.h"
#include "rowwise/arithmetic.cuh"

namespace scaled_mm::rowwise {

constexpr int kChunk = 8;    // consecutive elements
constexpr int kLanes = 1024; // of a row sum: chunk c belongs to lane c mod 1024

// A matrix [rows, K] of elements. Strides in elements.
struct Matrix {
  void* data;
  int64_t stride_row, stride_k;
  bool vectors;    // rows are contiguous, and their chunks aligned to 16 bytes (int8: to 8)
  const void* end; // past the last element; nullptr: unknown
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
  const int32_t* rows_end; // rows from this one on are not computed, or nullptr
};

// Whether a row is past the last one, or belongs to no expert.
__device__ inline bool is_absent(int64_t row, int64_t rows, const int32_t* rows_end) {
  return row >= rows || (rows_end != nullptr && row >= *rows_end);
}

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

// A whole chunk to any address, in as few aligned pieces as hold it.
template <class T>
__device__ inline void write_pieces(T* to, const Chunk<T>& chunk) {
  constexpr int kWords = Chunk<T>::kWords;
  const unsigned shift = sizeof(T) == 4 ? 0 : unsigned(reinterpret_cast<uintptr_t>(to)) & 3; // bytes past an aligned word
  uint32_t* const words = reinterpret_cast<uint32_t*>(reinterpret_cast<uintptr_t>(to) - shift);
  if (shift == 0) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = chunk.words[i];
    return;
  }
#pragma unroll
  for (int i = 1; i < kWords; ++i) words[i] = __funnelshift_r(chunk.words[i - 1], chunk.words[i], 8 * (4 - shift));
  uint8_t* const head = reinterpret_cast<uint8_t*>(to);
  uint8_t* const tail = reinterpret_cast<uint8_t*>(words + kWords);
  const uint32_t last = chunk.words[kWords - 1];
  if (shift == 2) {
    *reinterpret_cast<uint16_t*>(head) = uint16_t(chunk.words[0]);
    *reinterpret_cast<uint16_t*>(tail) = uint16_t(last >> 16);
  } else if (shift == 1) {
    head[0] = uint8_t(chunk.words[0]);
    *reinterpret_cast<uint16_t*>(head + 1) = uint16_t(chunk.words[0] >> 8);
    tail[0] = uint8_t(last >> 24);
  } else {
    head[0] = uint8_t(chunk.words[0]);
    *reinterpret_cast<uint16_t*>(tail) = uint16_t(last >> 8);
    tail[2] = uint8_t(last >> 24);
  }
}

template <bool kVectors, class T>
__device__ inline void write_chunk(const Matrix& m, int64_t row, int k, int K, const Chunk<T>& chunk) {
  T* const data = static_cast<T*>(m.data) + row * m.stride_row;
  if constexpr (kVectors) {
    if (k < K) *reinterpret_cast<Chunk<T>*>(data + k) = chunk;
  } else if (m.stride_k == 1 && k + kChunk <= K) {
    write_pieces(data + k, chunk);
  } else {
    T values[kChunk];
    chunk.get(values);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if (k + e < K) data[int64_t(k + e) * m.stride_k] = values[e];
    }
  }
}

// A chunk that is not aligned, of a row whose elements lie side by side: the two aligned pieces of 16 bytes that hold it.
struct Pieces {
  uint4 low, high;
  bool whole; // both lie within the matrix: else they were not read
};

template <class T>
__device__ inline Pieces read_pieces(const Matrix& m, int64_t row, int k, int K) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(static_cast<const T*>(m.data) + row * m.stride_row + k), first = at & ~uintptr_t(15);
  Pieces pieces = {};
  pieces.whole = k < K && first >= reinterpret_cast<uintptr_t>(m.data) && first + 32 <= reinterpret_cast<uintptr_t>(m.end);
  if (!pieces.whole) return pieces;
  pieces.low = reinterpret_cast<const uint4*>(first)[0];
  pieces.high = reinterpret_cast<const uint4*>(first)[1];
  return pieces;
}

template <class T>
__device__ inline Chunk<T> chunk_of(const Pieces& pieces, const Matrix& m, int64_t row, int k, int K) {
  static_assert(sizeof(T) == 2, "two pieces hold a chunk of 16 bytes");
  if (!pieces.whole) return read_chunk<false, T>(m, row, k, K);
  const unsigned shift = unsigned(reinterpret_cast<uintptr_t>(static_cast<const T*>(m.data) + row * m.stride_row + k)) & 15;
  uint32_t words[8] = {pieces.low.x, pieces.low.y, pieces.low.z, pieces.low.w, pieces.high.x, pieces.high.y, pieces.high.z, pieces.high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
  Chunk<T> chunk;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    chunk.words[i] = __funnelshift_r(words[i], words[i + 1], (shift & 2) * 8);
    if (k + 2 * i + 1 >= K) chunk.words[i] = k + 2 * i < K ? chunk.words[i] & 0xffffu : 0; // past the end of the row
  }
  return chunk;
}

// read_chunk and write_chunk for kernels that learn the alignment at run time; a chunk may be partial.
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
