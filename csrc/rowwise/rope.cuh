// Rotary position embedding of query and key, one launch for both.
#pragma once

#include "rowwise/kernel.cuh"

namespace scaled_mm::rowwise {

// [tokens, heads, D]. Strides in elements.
struct Heads {
  void* data;
  int64_t stride_token, stride_head, stride_k;
};

// cos or sin: [tokens, D or D / 2] of any float dtype.
struct Angles {
  const void* data;
  int64_t stride_token, stride_k;
  int32_t dtype; // scaledMMDtype_t
};

struct Rope {
  int D, query_heads, heads; // heads: of query and of key
  int splits;                // thread blocks of a token
  bool of_pairs;             // cos and sin have an angle for each pair, not for each element
  Heads query, key, out_query, out_key;
  Angles cos, sin;
};

constexpr int kRopeThreads = 128;

// The elements of some pairs.
template <int kPairs>
struct Pairs {
  float first[kPairs], second[kPairs];
};

// Elements [at, at + kCount) of a row, one of them or a whole aligned chunk.
template <class T, int kCount>
__device__ inline void load_elements(const T* row, int64_t stride, int at, float (&v)[kCount]) {
  if constexpr (kCount == kChunk) {
    to_floats(*reinterpret_cast<const Chunk<T>*>(row + at), v);
  } else {
    static_assert(kCount == 1);
    v[0] = to_float(row[at * stride]);
  }
}

template <class T, int kCount>
__device__ inline void store_elements(T* row, int64_t stride, int at, const T (&v)[kCount]) {
  if constexpr (kCount == kChunk) {
    *reinterpret_cast<Chunk<T>*>(row + at) = Chunk<T>::of(v);
  } else {
    row[at * stride] = v[0];
  }
}

// Where the elements of pairs [k, k + kPairs) lie: two runs of kPairs elements.
template <bool kInterleaved, int kPairs>
struct Runs {
  int low, high;
  __device__ Runs(int k, int D) : low(kInterleaved ? 2 * k : k), high(kInterleaved ? 2 * k + kPairs : D / 2 + k) {}
};

template <bool kInterleaved, class T, int kPairs>
__device__ inline void load_pairs(const T* row, int64_t stride, int k, int D, Pairs<kPairs>& p) {
  const Runs<kInterleaved, kPairs> at(k, D);
  if constexpr (!kInterleaved || kPairs == 1) {
    load_elements(row, stride, at.low, p.first);
    load_elements(row, stride, at.high, p.second);
  } else {
    float low[kPairs], high[kPairs];
    load_elements(row, stride, at.low, low);
    load_elements(row, stride, at.high, high);
#pragma unroll
    for (int e = 0; e < kPairs / 2; ++e) {
      p.first[e] = low[2 * e], p.second[e] = low[2 * e + 1];
      p.first[e + kPairs / 2] = high[2 * e], p.second[e + kPairs / 2] = high[2 * e + 1];
    }
  }
}

template <bool kInterleaved, class T, int kPairs>
__device__ inline void load_angles(const Angles& a, bool of_pairs, int64_t token, int k, int D, Pairs<kPairs>& p) {
  const T* const row = static_cast<const T*>(a.data) + token * a.stride_token;
  if (!of_pairs) return load_pairs<kInterleaved>(row, a.stride_k, k, D, p);
  load_elements(row, a.stride_k, k, p.first);
#pragma unroll
  for (int e = 0; e < kPairs; ++e) p.second[e] = p.first[e];
}

template <bool kInterleaved, int kPairs>
__device__ inline void load_angles(const Angles& a, bool of_pairs, int64_t token, int k, int D, Pairs<kPairs>& p) {
  if (a.dtype == SCALED_MM_DTYPE_FLOAT32) {
    load_angles<kInterleaved, float>(a, of_pairs, token, k, D, p);
  } else if (a.dtype == SCALED_MM_DTYPE_FLOAT16) {
    load_angles<kInterleaved, __half>(a, of_pairs, token, k, D, p);
  } else {
    load_angles<kInterleaved, __nv_bfloat16>(a, of_pairs, token, k, D, p);
  }
}

template <class X, bool kInterleaved, int kPairs>
__device__ inline void rotate(const X* x, int64_t x_stride, X* out, int64_t out_stride, const Pairs<kPairs>& cos, const Pairs<kPairs>& sin, int k,
                              int D) {
  using W = WideOf<X>;
  Pairs<kPairs> p;
  load_pairs<kInterleaved>(x, x_stride, k, D, p);
  X low[kPairs], high[kPairs];
#pragma unroll
  for (int e = 0; e < kPairs; ++e) {
    const W first = W(p.first[e]), second = W(p.second[e]);
    const X one = from_float<X>(float(first * W(cos.first[e]) - second * W(sin.first[e])));
    const X other = from_float<X>(float(second * W(cos.second[e]) + first * W(sin.second[e])));
    if constexpr (!kInterleaved || kPairs == 1) {
      low[e] = one, high[e] = other;
    } else {
      X* const to = e < kPairs / 2 ? low : high;
      to[2 * e % kPairs] = one, to[2 * e % kPairs + 1] = other;
    }
  }
  const Runs<kInterleaved, kPairs> at(k, D);
  store_elements(out, out_stride, at.low, low);
  store_elements(out, out_stride, at.high, high);
}

// A thread has kPairs pairs of some heads of a token, whose angles it reads once. kPairs is 8 where every operand lies in aligned chunks, else 1.
template <class X, bool kInterleaved, int kPairs>
__global__ void __launch_bounds__(kRopeThreads) rope_kernel(const __grid_constant__ Rope p) {
  wait_for_preceding_kernel();
  const int64_t token = blockIdx.x / unsigned(p.splits);
  const int split = int(blockIdx.x % unsigned(p.splits));
  const int thread = int(threadIdx.x), groups = p.D / 2 / kPairs;        // groups: of kPairs pairs of a head
  const int at_once = groups < kRopeThreads ? kRopeThreads / groups : 1; // heads
  const int head = groups < kRopeThreads ? thread / groups : 0, group = groups < kRopeThreads ? thread % groups : thread;
  if (head >= at_once) return;
#pragma unroll 1
  for (int k = group * kPairs; k < p.D / 2; k += kRopeThreads * kPairs) { // once, unless a head has more groups than threads
    Pairs<kPairs> cos, sin;
    load_angles<kInterleaved>(p.cos, p.of_pairs, token, k, p.D, cos);
    load_angles<kInterleaved>(p.sin, p.of_pairs, token, k, p.D, sin);
#pragma unroll 1
    for (int64_t h = head + int64_t(split) * at_once; h < p.heads; h += int64_t(at_once) * p.splits) {
      const bool is_query = h < p.query_heads;
      const Heads &x = is_query ? p.query : p.key, &out = is_query ? p.out_query : p.out_key;
      const int64_t of = is_query ? h : h - p.query_heads;
      rotate<X, kInterleaved>(static_cast<const X*>(x.data) + token * x.stride_token + of * x.stride_head, x.stride_k,
                              static_cast<X*>(out.data) + token * out.stride_token + of * out.stride_head, out.stride_k, cos, sin, k, p.D);
    }
    if (groups < kRopeThreads) break;
  }
}

} // namespace scaled_mm::rowwise
