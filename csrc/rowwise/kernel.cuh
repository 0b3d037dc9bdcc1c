// One row-wise kernel: a source computes the float32 results of a row from its operands, and the row is written, cast or quantized.
#pragma once

#include "rowwise/group.cuh"
#include "rowwise/quantize.cuh"

namespace scaled_mm::rowwise {

// Programmatic dependent launch. The kernel reads nothing before the preceding kernel has ended, and lets the next one start at once: a product
// with a prepared weight then loads weights while this kernel runs.
__device__ inline void wait_for_preceding_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The chunks of a row that belong to a thread: in registers (kHeld of them at most), or computed again whenever they are needed (kHeld = 0).
// A source has load (the first time), reload (later) and finish: finish turns what was loaded into float32 results, once the row was looked at.
template <class Source, int kThreads, int kHeld>
struct RowChunks {
  static constexpr bool kHolds = kHeld > 0;
  float held[kHolds ? kHeld : 1][kChunk];

  // visit(k, values, index) for each chunk, after load.
  template <class Visit>
  __device__ void load(const Source& source, int64_t row, int K, int thread, const Visit& visit) {
    if constexpr (kHolds) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int k = (thread + i * kThreads) * kChunk;
        if (k < K) source.load(row, k, held[i]);
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int k = (thread + i * kThreads) * kChunk;
        if (k < K) visit(held[i], i);
      }
    } else {
      int i = 0;
#pragma unroll 1
      for (int k = thread * kChunk; k < K; k += kThreads * kChunk, ++i) {
        float values[kChunk];
        source.load(row, k, values);
        visit(values, i);
      }
    }
  }

  // finish, in registers.
  template <class Finish>
  __device__ void finish(int K, int thread, const Finish& finish) {
    if constexpr (kHolds) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int k = (thread + i * kThreads) * kChunk;
        if (k < K) finish(k, held[i]);
      }
    }
  }

  // visit(k, results) for each chunk, finished.
  template <class Finish, class Visit>
  __device__ void each(const Source& source, int64_t row, int K, int thread, const Finish& finish, const Visit& visit) {
    if constexpr (kHolds) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int k = (thread + i * kThreads) * kChunk;
        if (k < K) visit(k, held[i]);
      }
    } else {
#pragma unroll 1
      for (int k = thread * kChunk; k < K; k += kThreads * kChunk) {
        float values[kChunk];
        source.reload(row, k, values);
        finish(k, values);
        visit(k, values);
      }
    }
  }
};

__device__ inline float static_zero_point(const Rows& p, int64_t index) {
  if (p.zero_point == nullptr) return 0;
  const int64_t i = index * p.zero_point_stride;
  return p.zero_point_dtype == SCALED_MM_DTYPE_INT8 ? float(static_cast<const int8_t*>(p.zero_point)[i])
                                                    : float(static_cast<const int32_t*>(p.zero_point)[i]);
}

// The scale of a row of its own: the formulas of quantize_int8 (docs/design/numerics.md). each(visit) visits the chunks.
template <int kThreads, class Each>
__device__ Quantizer dynamic(const Rows& p, const Group<kThreads>& group, const Each& each) {
  constexpr float kSmallest = 1.1754943508222875e-38f; // 2^-126
  uint32_t bits = 0;
  if (p.output == SCALED_MM_ROWWISE_TOKEN) {
    each([&](int, const float(&y)[kChunk]) {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const uint32_t magnitude = __float_as_uint(y[e]) & 0x7fffffffu;
        bits = magnitude > bits ? magnitude : bits;
      }
    });
    const Quantizer quantizer = Quantizer::of_largest(group.largest(bits));
    if (group.thread == 0) p.out_scale[group.row] = quantizer.scale;
    return quantizer;
  }
  float low = 0, high = 0;
  each([&](int, const float(&y)[kChunk]) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      low = y[e] < low ? y[e] : low;
      high = y[e] > high ? y[e] : high;
      if (!(y[e] == y[e])) bits = 1;
    }
  });
  low = -__uint_as_float(group.largest(__float_as_uint(-low) & 0x7fffffffu));
  group.again();
  high = __uint_as_float(group.largest(__float_as_uint(high) & 0x7fffffffu));
  group.again();
  const bool has_nan = group.largest(bits) != 0;
  float scale = high / 255.0f - low / 255.0f;
  if (has_nan) scale = __uint_as_float(0x7fc00000u);
  if (scale < kSmallest) scale = kSmallest;
  const bool spoilt = !(scale <= 3.4028234663852886e38f);
  const float rounded = rintf(-128.0f - low / scale);
  const float zero_point = spoilt ? 0.0f : rounded < -128 ? -128.0f : rounded > 127 ? 127.0f : rounded;
  if (group.thread == 0) {
    p.out_scale[group.row] = scale;
    p.out_zero_point[group.row] = int32_t(zero_point);
  }
  return Quantizer::of(scale, zero_point, spoilt, -128);
}

template <class X, class Source, int kThreads, int kHeld>
__global__ void __launch_bounds__(Group<kThreads>::kBlock) kernel(const __grid_constant__ Rows p) {
  wait_for_preceding_kernel();
  const Group<kThreads> group;
  const int64_t row = group.row;
  if (row >= p.rows) return; // whole warps of a thread block with a row a warp, where nothing waits for them
  const Source source(p);
  RowChunks<Source, kThreads, kHeld> chunks;
  const auto finish = source.look(chunks, group);
  chunks.finish(p.K, group.thread, finish);
  const auto each = [&](const auto& visit) { chunks.each(source, row, p.K, group.thread, finish, visit); };
  if (p.output == SCALED_MM_ROWWISE_CAST) {
    each([&](int k, const float(&y)[kChunk]) {
      X cast[kChunk];
#pragma unroll
      for (int e = 0; e < kChunk; ++e) cast[e] = from_float<X>(y[e]);
      store_chunk(p.out, row, k, p.K, cast);
    });
    return;
  }
  if (p.output == SCALED_MM_ROWWISE_ROUND) {
    each([&](int k, const float(&y)[kChunk]) {
      int8_t q[kChunk];
      round_only(y, q);
      store_chunk(p.out, row, k, p.K, q);
    });
    return;
  }
  if (p.output == SCALED_MM_ROWWISE_STATIC_COLUMNS) {
    each([&](int k, const float(&y)[kChunk]) {
      int8_t q[kChunk];
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const int column = k + e < p.K ? k + e : k; // past the end of the row: any
        q[e] = divided(y[e], Quantizer::of(p.scale[column * p.scale_stride], static_zero_point(p, column), false, -128));
      }
      store_chunk(p.out, row, k, p.K, q);
    });
    return;
  }
  const Quantizer quantizer = p.output == SCALED_MM_ROWWISE_STATIC
                                  ? Quantizer::of(p.scale[row * p.scale_stride], static_zero_point(p, row), false, -128)
                                  : dynamic(p, group, each);
  int32_t sum = 0;
  each([&](int k, const float(&y)[kChunk]) {
    int8_t q[kChunk];
    quantize(y, quantizer, q);
    store_chunk(p.out, row, k, p.K, q);
    if (p.out_row_sums == nullptr) return;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) sum += k + e < p.K ? q[e] : 0;
  });
  if (p.out_row_sums == nullptr) return;
  sum = group.sum(sum);
  if (group.thread == 0) p.out_row_sums[row] = sum;
}

} // namespace scaled_mm::rowwise
