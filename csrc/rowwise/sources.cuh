// What a row-wise kernel computes before it casts or quantizes: one source for each group of operators.
//
// A source reads a batch of chunks, all loads before the first use of one, and turns them into float32. Past the end of a row everything is 0.
// kKeepsWords: its results follow from a chunk in an instruction each. They are computed whenever they are needed, and the chunks are kept.
// kHasAbsent: rows may belong to no expert. A thread block then has several rows, one after the other.
#pragma once

#include "rowwise/group.cuh"

namespace scaled_mm::rowwise {

// The chunks of a thread that are read together: kCount of them, kThreads apart.
template <int kThreads, int kCount>
struct Places {
  int first; // element of the row
  __device__ int operator[](int i) const { return first + i * kThreads * kChunk; }
};

template <bool kVectors, class T, class At, int kCount>
__device__ inline void read_chunks(const Matrix& m, int64_t row, const At& at, int K, Chunk<T> (&chunks)[kCount]) {
  if constexpr (!kVectors && sizeof(T) == 2) {
    if (m.stride_k == 1) {
      Pieces pieces[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) pieces[i] = read_pieces<T>(m, row, at[i], K);
#pragma unroll
      for (int i = 0; i < kCount; ++i) chunks[i] = chunk_of<T>(pieces[i], m, row, at[i], K);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) chunks[i] = read_chunk<kVectors, T>(m, row, at[i], K);
}

template <bool kVectors, class T, class At, int kCount>
__device__ inline void read_vector_of(const Vector& vector, const At& at, int K, float (&v)[kCount][kChunk]) {
  Chunk<T> chunks[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) chunks[i] = read_chunk<kVectors, T>(vector.data, 0, vector.stride, at[i], K);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to_floats(chunks[i], v[i]);
}

template <bool kVectors, class At, int kCount>
__device__ inline void read_vector(const Vector& vector, const At& at, int K, float (&v)[kCount][kChunk]) {
  if (vector.dtype == SCALED_MM_DTYPE_FLOAT32) {
    read_vector_of<kVectors, float>(vector, at, K, v);
  } else if (vector.dtype == SCALED_MM_DTYPE_FLOAT16) {
    read_vector_of<kVectors, __half>(vector, at, K, v);
  } else {
    read_vector_of<kVectors, __nv_bfloat16>(vector, at, K, v);
  }
}

// Makes the compiler convert a chunk once more where it is used next, instead of keeping the float32 values, which take twice the registers.
template <class T>
__device__ inline void convert_again(Chunk<T>& chunk) {
#if defined(__CUDA_ARCH__)
#pragma unroll
  for (int i = 0; i < Chunk<T>::kWords; ++i) asm volatile("" : "+r"(chunk.words[i]));
#else
  (void)chunk;
#endif
}

struct Nothing {};

// x, x * vector, x * vector + offset, in float32. kFactor: there is a vector.
template <class X, bool kFactor>
struct Elements {
  static constexpr bool kReduces = false, kHasAsymmetric = true, kIsRare = kFactor, kKeepsWords = !kFactor, kHasAbsent = false;
  using Element = X;
  using State = Nothing;

  template <bool kVectors, int kCount>
  struct Batch {
    Chunk<X> x[kCount];

    template <class At>
    __device__ void read(const Rows& p, int64_t row, const At& at) {
      read_chunks<kVectors>(p.x, row, at, p.K, x);
    }
    __device__ void of(int i, float (&y)[kChunk]) {
      convert_again(x[i]);
      to_floats(x[i], y);
    }
    template <class At>
    __device__ void values(const Rows& p, const At& at, const State&, float (&y)[kCount][kChunk]) const {
      float factor[kCount][kChunk];
      if constexpr (kFactor) read_vector<kVectors>(p.vector, at, p.K, factor);
#pragma unroll
      for (int i = 0; i < kCount; ++i) to_floats(x[i], y[i]);
      if constexpr (kFactor) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll
          for (int e = 0; e < kChunk; ++e) y[i][e] = y[i][e] * factor[i][e];
        }
        if (p.offset.data == nullptr) return;
        read_vector<kVectors>(p.offset, at, p.K, factor);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll
          for (int e = 0; e < kChunk; ++e) y[i][e] = y[i][e] + factor[i][e];
        }
      }
    }
  };
};

template <class X>
using PlainElements = Elements<X, false>;
template <class X>
using ScaledElements = Elements<X, true>;

// activation(first half) * second half. x: rows of 2 K elements.
template <class X>
struct Gated {
  static constexpr bool kReduces = false, kHasAsymmetric = false, kIsRare = false, kKeepsWords = false, kHasAbsent = true;
  using Element = X;
  using State = Nothing;
  using W = WideOf<X>;

  template <bool kVectors, int kCount>
  struct Batch {
    Chunk<X> gate[kCount], up[kCount];

    template <class At>
    __device__ void read(const Rows& p, int64_t row, const At& at) {
      read_chunks<kVectors>(p.x, row, at, p.K, gate);
      read_chunks<kVectors>(p.residual, row, at, p.K, up); // the second half
    }
    template <class At, class Activation>
    __device__ void activated(const Rows& p, const At& at, const Activation& activation, float (&y)[kCount][kChunk]) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i > 0 && at[i] >= p.K) { // skipped: it would take as many instructions as a chunk of the row
#pragma unroll
          for (int e = 0; e < kChunk; ++e) y[i][e] = 0;
          continue;
        }
        float g[kChunk], u[kChunk];
        to_floats(gate[i], g);
        to_floats(up[i], u);
#pragma unroll
        for (int e = 0; e < kChunk; ++e) y[i][e] = float(activation(W(g[e])) * W(u[e]));
      }
    }
    template <class At>
    __device__ void values(const Rows& p, const At& at, const State&, float (&y)[kCount][kChunk]) const {
      if (p.function == SCALED_MM_SILU_AND_MUL) {
        activated(p, at, [](W g) { return silu(g); }, y);
      } else if (p.function == SCALED_MM_GELU_AND_MUL) {
        activated(p, at, [](W g) { return gelu(g); }, y);
      } else {
        activated(p, at, [](W g) { return gelu_tanh(g); }, y);
      }
    }
  };
};

// RMSNorm of x, or of total = x + residual, which is written too.
template <class X>
struct Norm {
  static constexpr bool kReduces = true, kHasAsymmetric = false, kIsRare = false, kKeepsWords = false, kHasAbsent = false;
  static constexpr int kDtype = std::is_same_v<X, float>    ? SCALED_MM_DTYPE_FLOAT32
                                : std::is_same_v<X, __half> ? SCALED_MM_DTYPE_FLOAT16
                                                            : SCALED_MM_DTYPE_BFLOAT16;
  using Element = X;
  using W = WideOf<X>;
  using State = W; // 1 / root of the mean square

  template <bool kVectors, int kCount>
  struct Batch {
    Chunk<X> x[kCount];                         // then total
    static constexpr bool kAhead = kCount <= 4; // true: the weight is read with x, if it has x's dtype. Otherwise `values` reads it.
    Chunk<X> weight[kAhead ? kCount : 1];

    template <class At>
    __device__ void read(const Rows& p, int64_t row, const At& at) {
      Chunk<X> residual[kCount];
      read_chunks<kVectors>(p.x, row, at, p.K, x);
      if (p.function == SCALED_MM_ADD_RMS_NORM) read_chunks<kVectors>(p.residual, row, at, p.K, residual);
      read_weight(p, at);
      if (p.function != SCALED_MM_ADD_RMS_NORM) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float y[kChunk], other[kChunk];
        to_floats(x[i], y);
        to_floats(residual[i], other);
#pragma unroll
        for (int e = 0; e < kChunk; ++e) y[e] = y[e] + other[e];
        x[i] = from_floats<X>(y);
        write_chunk<kVectors>(p.total, row, at[i], p.K, x[i]);
      }
    }
    // Reads total, because `read` may have overwritten x or residual with it. Reads chunks alone, not the aligned pieces around them: other threads
    // may still be writing what lies beside a chunk.
    template <class At>
    __device__ void read_again(const Rows& p, int64_t row, const At& at) {
      Matrix again = p.x;
      if (p.function == SCALED_MM_ADD_RMS_NORM) {
        again = p.total;
        again.end = nullptr;
      }
      read_chunks<kVectors>(again, row, at, p.K, x);
      read_weight(p, at);
    }
    template <class At>
    __device__ void read_weight(const Rows& p, const At& at) {
      if (!kAhead || p.vector.dtype != kDtype) return;
#pragma unroll
      for (int i = 0; i < (kAhead ? kCount : 1); ++i) weight[i] = read_chunk<kVectors, X>(p.vector.data, 0, p.vector.stride, at[i], p.K);
    }
    // Squares of a lane's elements, one after the other.
    template <int kPerThread>
    __device__ void accumulate(W (&lanes)[kPerThread]) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        W& lane = lanes[i % kPerThread];
        float y[kChunk];
        to_floats(x[i], y);
#pragma unroll
        for (int e = 0; e < kChunk; ++e) lane = lane + W(y[e]) * W(y[e]);
      }
    }
    template <class At>
    __device__ void values(const Rows& p, const At& at, const State& inverse, float (&y)[kCount][kChunk]) {
      const bool is_read = kAhead && p.vector.dtype == kDtype;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float factor[1][kChunk];
        if (is_read) {
          to_floats(weight[kAhead ? i : 0], factor[0]);
        } else {
          read_vector<kVectors>(p.vector, Places<0, 1>{at[i]}, p.K, factor);
        }
        of_chunk(inverse, x[i], factor[0], y[i]);
      }
    }
    __device__ static void of_chunk(const State& inverse, Chunk<X>& chunk, const float (&factor)[kChunk], float (&y)[kChunk]) {
      convert_again(chunk);
      to_floats(chunk, y);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) y[e] = float((W(y[e]) * inverse) * W(factor[e]));
    }
  };

  template <class Group, int kPerThread>
  __device__ static State reduce(const Rows& p, const Group& group, W (&lanes)[kPerThread]) {
    return inverse_root(group.tree(lanes) / W(p.K) + W(p.epsilon));
  }
};

} // namespace scaled_mm::rowwise
