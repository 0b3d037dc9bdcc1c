// What a row-wise kernel computes before it casts or quantizes: one source for each group of operators.
#pragma once

#include "rowwise/group.cuh"

namespace scaled_mm::rowwise {

// finish of a source whose loads are its results.
struct Loaded {
  __device__ void operator()(int, float (&)[kChunk]) const {}
};

// What a source without a reduction does first.
template <class Source, class Chunks, class Group>
__device__ Loaded load_held(const Source& source, Chunks& chunks, const Group& group) {
  if constexpr (Chunks::kHolds) chunks.load(source, group.row, source.p.K, group.thread, [](float(&)[kChunk], int) {});
  return {};
}

// x, x * vector, x * vector + offset, in float32.
template <class X>
struct Elements {
  const Rows& p;

  __device__ explicit Elements(const Rows& rows) : p(rows) {}
  __device__ void load(int64_t row, int k, float (&y)[kChunk]) const {
    load_chunk<X>(p.x, row, k, p.K, y);
    if (p.vector.data == nullptr) return;
    float factor[kChunk];
    load_chunk(p.vector, k, p.K, factor);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) y[e] = y[e] * factor[e];
    if (p.offset.data == nullptr) return;
    load_chunk(p.offset, k, p.K, factor);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) y[e] = y[e] + factor[e];
  }
  __device__ void reload(int64_t row, int k, float (&y)[kChunk]) const { load(row, k, y); }

  template <class Chunks, class Group>
  __device__ Loaded look(Chunks& chunks, const Group& group) const {
    return load_held(*this, chunks, group);
  }
};

// activation(first half) * second half. x: rows of 2 K elements.
template <class X>
struct Gated {
  const Rows& p;
  using W = WideOf<X>;

  __device__ explicit Gated(const Rows& rows) : p(rows) {}
  __device__ void load(int64_t row, int k, float (&y)[kChunk]) const {
    float u[kChunk];
    load_chunk<X>(p.x, row, k, p.K, y);
    load_chunk<X>(p.residual, row, k, p.K, u); // the second half
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      const W g = y[e];
      const W activated = p.function == SCALED_MM_SILU_AND_MUL ? silu(g) : p.function == SCALED_MM_GELU_AND_MUL ? gelu(g) : gelu_tanh(g);
      y[e] = float(activated * W(u[e]));
    }
  }
  __device__ void reload(int64_t row, int k, float (&y)[kChunk]) const { load(row, k, y); }

  template <class Chunks, class Group>
  __device__ Loaded look(Chunks& chunks, const Group& group) const {
    return load_held(*this, chunks, group);
  }
};

// RMSNorm of x, or of x + residual, which is written to total.
template <class X>
struct Norm {
  const Rows& p;
  using W = WideOf<X>;

  __device__ explicit Norm(const Rows& rows) : p(rows) {}
  __device__ void load(int64_t row, int k, float (&y)[kChunk]) const {
    load_chunk<X>(p.x, row, k, p.K, y);
    if (p.function != SCALED_MM_ADD_RMS_NORM) return;
    float other[kChunk];
    load_chunk<X>(p.residual, row, k, p.K, other);
    X total[kChunk];
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      total[e] = from_float<X>(y[e] + other[e]);
      y[e] = to_float(total[e]);
    }
    store_chunk(p.total, row, k, p.K, total);
  }
  // After load: total may be x or residual, which are gone then.
  __device__ void reload(int64_t row, int k, float (&y)[kChunk]) const {
    load_chunk<X>(p.function == SCALED_MM_ADD_RMS_NORM ? p.total : p.x, row, k, p.K, y);
  }

  struct Finish {
    const Rows& p;
    W inverse;
    __device__ void operator()(int k, float (&y)[kChunk]) const {
      float weight[kChunk];
      load_chunk(p.vector, k, p.K, weight);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) y[e] = float((W(y[e]) * inverse) * W(weight[e]));
      if (k + kChunk <= p.K) return;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) y[e] = k + e < p.K ? y[e] : 0.0f; // 0 * infinity otherwise
    }
  };

  template <class Chunks, class G>
  __device__ Finish look(Chunks& chunks, const G& group) const {
    constexpr int kPerThread = G::kLanesPerThread;
    W lanes[kPerThread] = {};
    chunks.load(*this, group.row, p.K, group.thread, [&](const float(&y)[kChunk], int i) {
#pragma unroll
      for (int lane = 0; lane < kPerThread; ++lane) {
        if (i % kPerThread != lane) continue;
#pragma unroll
        for (int e = 0; e < kChunk; ++e) lanes[lane] = lanes[lane] + W(y[e]) * W(y[e]); // past the end of the row: + 0
      }
    });
    const W mean = group.tree(lanes) / W(p.K);
    return {p, inverse_root(mean + W(p.epsilon))};
  }
};

} // namespace scaled_mm::rowwise
