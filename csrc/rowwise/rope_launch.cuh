// The host side of the rotary position embedding.
#pragma once

#include "rowwise/launch.cuh"
#include "rowwise/rope.cuh"

namespace scaled_mm::rowwise {

template <class X>
bool heads_in_vectors(const Heads& h, int64_t tokens, int64_t heads, int64_t D) {
  return in_vectors<X>(h.data, heads, D, h.stride_head, h.stride_k) && in_vectors<X>(h.data, tokens, D, h.stride_token, h.stride_k);
}

inline bool angles_in_vectors(const Angles& a, int64_t tokens, int64_t count) {
  return a.dtype == SCALED_MM_DTYPE_FLOAT32 ? in_vectors<float>(a.data, tokens, count, a.stride_token, a.stride_k)
                                            : in_vectors<__half>(a.data, tokens, count, a.stride_token, a.stride_k);
}

inline Heads heads_of(const void* data, const HeadStrides& s) { return {const_cast<void*>(data), s.token, s.head, s.k}; }

// *vectors: whether a thread may have eight pairs.
template <class X>
Rope rope_of(const GemmLaunch& l, bool* vectors) {
  const RopeOperands& o = *l.rope;
  const RopePointers& at = l.rope_pointers;
  Rope p = {};
  p.D = int(l.N);
  p.query_heads = int(o.query_heads);
  p.heads = int(o.query_heads + o.key_heads);
  p.of_pairs = o.angles != l.N;
  p.query = heads_of(l.a, o.query);
  p.key = heads_of(at.key, o.key);
  p.out_query = heads_of(l.out, o.out_query);
  p.out_key = heads_of(at.out_key, o.out_key);
  p.cos = {at.cos, o.cos.row, o.cos.k, o.cos_dtype};
  p.sin = {at.sin, o.sin.row, o.sin.k, o.sin_dtype};
  *vectors = l.N / 2 % kChunk == 0 && heads_in_vectors<X>(p.query, l.M, o.query_heads, l.N) && heads_in_vectors<X>(p.key, l.M, o.key_heads, l.N) &&
             heads_in_vectors<X>(p.out_query, l.M, o.query_heads, l.N) && heads_in_vectors<X>(p.out_key, l.M, o.key_heads, l.N) &&
             angles_in_vectors(p.cos, l.M, o.angles) && angles_in_vectors(p.sin, l.M, o.angles);
  // One head per thread for few tokens; from 16 tokens per SM on up to four, which share the angles that the thread reads.
  const int64_t groups = l.N / 2 / (*vectors ? kChunk : 1), at_once = groups < kRopeThreads ? kRopeThreads / groups : 1;
  const int64_t passes = (p.heads + at_once - 1) / at_once, each = l.M >= 16 * int64_t(l.multiprocessors) ? 4 : 1;
  p.splits = int((passes + each - 1) / each);
  return p;
}

template <class X>
struct RopeKernels {
  template <bool kInterleaved, int kPairs>
  static DeviceKernel& device_kernel() {
    static DeviceKernel instance(&rope_kernel<X, kInterleaved, kPairs>);
    return instance;
  }
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    for (DeviceKernel* kernel :
         {&device_kernel<false, 1>(), &device_kernel<false, kChunk>(), &device_kernel<true, 1>(), &device_kernel<true, kChunk>()}) {
      if (scaledMMStatus_t s = prepare_kernel(*kernel, 0, device, message, size)) return s;
    }
    return SCALED_MM_STATUS_SUCCESS;
  }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    const int64_t heads = l.rope->query_heads + l.rope->key_heads;
    if (l.N > kMostRowElements || heads > kMostRowElements) {
      snprintf(message, size, "query: expected at most %d heads, with key's, and elements of a head, got %lld and %lld", kMostRowElements,
               static_cast<long long>(heads), static_cast<long long>(l.N));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    bool vectors = false;
    Rope p = rope_of<X>(l, &vectors);
    if (l.M * p.splits > INT32_MAX) {
      snprintf(message, size, "query: expected at most %lld tokens with %d heads of %d elements, got %lld",
               static_cast<long long>(INT32_MAX / p.splits), p.heads, p.D, static_cast<long long>(l.M));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    LaunchShape shape;
    shape.grid = dim3(unsigned(l.M * p.splits));
    shape.block = dim3(kRopeThreads);
    shape.dependent = kDependent;
    void* pointers[] = {&p};
    DeviceKernel& kernel = l.rope->interleaved ? (vectors ? device_kernel<true, kChunk>() : device_kernel<true, 1>())
                                               : (vectors ? device_kernel<false, kChunk>() : device_kernel<false, 1>());
    return launch_kernel(kernel, shape, pointers, l, message, size);
  }
};

template <class X>
constexpr Kernel rope_entry(const char* name, int32_t dtype) {
  return {name, dtype, 0, &RopeKernels<X>::prepare, &RopeKernels<X>::launch};
}

} // namespace scaled_mm::rowwise
