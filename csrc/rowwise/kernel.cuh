// The row-wise kernels: a source computes the float32 results of a row from its operands, and the row is written, cast or quantized.
#pragma once

#include "rowwise/group.cuh"
#include "rowwise/quantize.cuh"
#include "rowwise/sources.cuh"

namespace scaled_mm::rowwise {

// Programmatic dependent launch. The next kernel may start at once: a product with a prepared weight then loads weights while this kernel runs.
// Nothing is read or written before the preceding kernel has ended.
__device__ inline void wait_for_preceding_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The chunks of a row that belong to a thread: in registers (kHeld of them at most), or computed again whenever they are needed (kHeld = 0).
// kBatch: chunks that are read together.
template <class Source, int kThreads, int kHeld, bool kVectors, int kBatch = kHeld ? kHeld : 4>
struct RowValues {
  static constexpr bool kHolds = kHeld > 0;
  static constexpr int kSpan = kThreads * kBatch * kChunk; // elements that are read together
  static_assert(kSpan <= INT32_MAX - kMostRowElements, "an index past the end of a row would overflow");
  using Batch = typename Source::template Batch<kVectors, kBatch>;
  using At = Places<kThreads, kBatch>;
  static constexpr int kUsedLanes = Group<kThreads>::used_lanes(kBatch);

  const Rows& p;
  const Group<kThreads>& group;
  typename Source::State state;
  static constexpr bool kHoldsWords = kHolds && Source::kKeepsWords, kHoldsResults = kHolds && !Source::kKeepsWords;
  std::conditional_t<kHoldsWords, Batch, Nothing> words;
  float held[kHoldsResults ? kBatch : 1][kChunk];

  __device__ RowValues(const Rows& rows, const Group<kThreads>& threads) : p(rows), group(threads) {
    if constexpr (kHoldsWords) {
      words.read(p, group.row, At{group.thread * kChunk});
    } else if constexpr (kHolds) {
      Batch batch;
      const At at = {group.thread * kChunk};
      batch.read(p, group.row, at);
      if constexpr (Source::kReduces) {
        typename Source::W lanes[kUsedLanes] = {};
        batch.accumulate(lanes);
        state = Source::reduce(p, group, lanes);
      }
      batch.values(p, at, state, held);
    } else if constexpr (Source::kReduces) {
      static_assert(kBatch % kUsedLanes == 0, "chunk i of every batch belongs to lane i");
      typename Source::W lanes[kUsedLanes] = {};
#pragma unroll 1
      for (int k = group.thread * kChunk; k < p.K; k += kSpan) {
        Batch batch;
        batch.read(p, group.row, At{k});
        batch.accumulate(lanes);
      }
      state = Source::reduce(p, group, lanes);
    }
  }

  // state: what the reduction gave.
  __device__ RowValues(const Rows& rows, const Group<kThreads>& threads, const typename Source::State& reduced)
      : p(rows), group(threads), state(reduced) {}

  // visit(at, results) for each batch of chunks; past the end of the row they are 0.
  template <class Visit>
  __device__ void each(const Visit& visit) {
    if constexpr (kHoldsWords) {
      const At at = {group.thread * kChunk};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        float values[1][kChunk];
        words.of(i, values[0]);
        visit(Places<kThreads, 1>{at[i]}, values);
        one_after_the_other();
      }
    } else if constexpr (kHolds) {
      visit(At{group.thread * kChunk}, held);
    } else {
#pragma unroll 1
      for (int k = group.thread * kChunk; k < p.K; k += kSpan) {
        Batch batch;
        float values[kBatch][kChunk];
        const At at = {k};
        if constexpr (Source::kReduces) {
          batch.read_again(p, group.row, at);
        } else {
          batch.read(p, group.row, at);
        }
        batch.values(p, at, state, values);
        visit(at, values);
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

// Static quantization with the scale and the zero point of a row, or of a column.
__device__ inline Quantizer static_quantizer(const Rows& p, int64_t index) {
  return Quantizer::of(p.scale[index * p.scale_stride], static_zero_point(p, index), false, -128);
}

// The scale of a row of its own: the formulas of quantize_int8 (docs/design/numerics.md). values: of `RowValues`.
template <class Values, int kThreads>
__device__ Quantizer symmetric(const Group<kThreads>& group, Values& values) {
  float most = 0;
  values.each([&](const auto&, const auto& y) {
#pragma unroll
    for (const auto& chunk : y) most = largest_of(chunk, most);
  });
  return Quantizer::of_largest(group.largest(magnitude_bits(most)));
}

template <class Values, int kThreads>
__device__ Quantizer asymmetric(const Rows& p, const Group<kThreads>& group, Values& values) {
  constexpr float kSmallest = 1.1754943508222875e-38f; // 2^-126
  constexpr uint32_t kInfinity = 0x7f800000u;
  float low = 0, high = 0;
  values.each([&](const auto&, const auto& y) {
#pragma unroll
    for (const auto& chunk : y) {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        low = smaller(low, chunk[e]);
        high = larger(high, chunk[e]);
      }
    }
  });
  const uint32_t low_bits = group.largest(magnitude_bits(low));
  group.again();
  const uint32_t high_bits = group.largest(magnitude_bits(high));
  low = -__uint_as_float(low_bits);
  high = __uint_as_float(high_bits);
  float scale = high / 255.0f - low / 255.0f;
  if (low_bits > kInfinity || high_bits > kInfinity) scale = __uint_as_float(0x7fc00000u);
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

// Writes a batch of chunks of a row, each as result(y) gives it.
template <bool kVectors, class At, int kCount, class Result>
__device__ inline void write_chunks(const Rows& p, int64_t row, const At& at, const float (&y)[kCount][kChunk], const Result& result) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) write_chunk<kVectors>(p.out, row, at[i], p.K, result(y[i]));
}

// A row whose output needs it as a whole: norms, scales of a row's own, row sums.
template <class Source, int kThreads, int kHeld, bool kVectors>
__device__ inline void compute_row(const Rows& p, const Group<kThreads>& group) {
  const int64_t row = group.row;
  RowValues<Source, kThreads, kHeld, kVectors> values(p, group);
  // What is rarer reads the row once more, a chunk at a time, and leaves the registers to the rest.
  RowValues<Source, kThreads, 0, kVectors, 1> again(p, group, values.state);
  if constexpr (Source::kReduces) {
    if (p.output == SCALED_MM_ROWWISE_CAST) {
      values.each([&](const auto& at, const auto& y) { write_chunks<kVectors>(p, row, at, y, from_floats<typename Source::Element>); });
      return;
    }
  }
  if (p.output == SCALED_MM_ROWWISE_TOKEN) {
    const Quantizer quantizer = symmetric(group, values);
    if (group.thread == 0) p.out_scale[row] = quantizer.scale;
    if (quantizer.short_way && !quantizer.spoilt) {
      values.each([&](const auto& at, const auto& y) {
        write_chunks<kVectors>(p, row, at, y, [&](const float(&chunk)[kChunk]) { return by_largest(chunk, quantizer); });
      });
    } else {
      again.each([&](const auto& at, const auto& y) {
        write_chunks<kVectors>(p, row, at, y, [&](const float(&chunk)[kChunk]) { return divided_here(chunk, quantizer); });
      });
    }
    return;
  }
  Quantizer quantizer;
  if constexpr (Source::kHasAsymmetric) {
    quantizer = p.output == SCALED_MM_ROWWISE_STATIC ? static_quantizer(p, row) : asymmetric(p, group, values);
  } else {
    quantizer = static_quantizer(p, row);
  }
  int32_t sum = 0;
  const auto write = [&](const auto& at, const auto& y) {
#pragma unroll
    for (int i = 0; i < int(sizeof(y) / sizeof(y[0])); ++i) {
      const Chunk<int8_t> q = by_inverse<Source::kHasAsymmetric>(y[i], quantizer);
      write_chunk<kVectors>(p.out, row, at[i], p.K, q);
      if (Source::kHasAsymmetric && p.out_row_sums != nullptr) sum += sum_of(q, at[i], p.K);
    }
  };
  if constexpr (Source::kHasAsymmetric) {
    again.each(write);
  } else {
    values.each(write);
  }
  if (p.out_row_sums == nullptr) return;
  sum = group.sum(sum);
  if (group.thread == 0) p.out_row_sums[row] = sum;
}

// compute(row) for the rows of a group (a warp or a thread block): one, or every step-th from `row` on if the source has absent rows. With one row
// per warp, the warps of a thread block do not wait for each other.
template <class Source, class Compute>
__device__ inline void each_row(const Rows& p, int64_t row, int64_t step, const Compute& compute) {
  if constexpr (Source::kHasAbsent) {
    for (; !is_absent(row, p.rows, p.rows_end); row += step) compute(row);
  } else if (row < p.rows) {
    compute(row);
  }
}

// kBlocks: thread blocks that an SM shall have at once, which bounds the registers of a thread. No kernel spills.
template <class Source, int kThreads, int kHeld, bool kVectors, int kBlocks>
__global__ void __launch_bounds__(Group<kThreads>::kBlock, kBlocks) row_kernel(const __grid_constant__ Rows p) {
  wait_for_preceding_kernel();
  Group<kThreads> group;
  each_row<Source>(p, group.row, int64_t(gridDim.x) * Group<kThreads>::kRows, [&](int64_t row) {
    group.row = row;
    compute_row<Source, kThreads, kHeld, kVectors>(p, group);
    if constexpr (Source::kHasAbsent) group.again();
  });
}

// A thread block's parts of a row, every spans-th from `first` on.
template <class Source, int kThreads, int kCount, bool kVectors>
__device__ inline void compute_spans(const Rows& p, const Group<kThreads>& group, int64_t row, unsigned first, unsigned spans) {
  constexpr int kSpan = kThreads * kCount * kChunk;
#pragma unroll 1
  for (int64_t span = int64_t(first) * kSpan; span < p.K; span += int64_t(spans) * kSpan) {
    typename Source::template Batch<kVectors, kCount> batch;
    float y[kCount][kChunk];
    const Places<kThreads, kCount> at = {int(span) + group.thread * kChunk};
    batch.read(p, row, at);
    if (p.output == SCALED_MM_ROWWISE_STATIC) {
      const Quantizer quantizer = static_quantizer(p, row);
      batch.values(p, at, {}, y);
      write_chunks<kVectors>(p, row, at, y, [&](const float(&chunk)[kChunk]) { return by_inverse(chunk, quantizer); });
      continue;
    }
    batch.values(p, at, {}, y);
    if constexpr (!Source::kHasAsymmetric) {
      write_chunks<kVectors>(p, row, at, y, from_floats<typename Source::Element>);
    } else if (p.output == SCALED_MM_ROWWISE_ROUND) {
      write_chunks<kVectors>(p, row, at, y, round_only);
    } else { // STATIC_COLUMNS
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        int8_t q[kChunk];
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
          const int column = at[i] + e < p.K ? at[i] + e : 0; // past the end of the row: any
          q[e] = divided(y[i][e], static_quantizer(p, column));
        }
        write_chunk<kVectors>(p.out, row, at[i], p.K, Chunk<int8_t>::of(q));
      }
    }
  }
}

// The other outputs: a row is shared by p.spans thread blocks, or one block has a row for each of its four warps.
template <class Source, int kThreads, int kCount, bool kVectors, int kBlocks>
__global__ void __launch_bounds__(Group<kThreads>::kBlock, kBlocks) element_kernel(const __grid_constant__ Rows p) {
  wait_for_preceding_kernel();
  Group<kThreads> group;
  unsigned first = 0, spans = 1;
  int64_t step = int64_t(gridDim.x) * Group<kThreads>::kRows;
  if constexpr (kThreads > 32) {
    spans = unsigned(p.spans), first = blockIdx.x % spans;
    group.row = blockIdx.x / spans;
    step = gridDim.x / spans;
  }
  each_row<Source>(p, group.row, step, [&](int64_t row) { compute_spans<Source, kThreads, kCount, kVectors>(p, group, row, first, spans); });
}

} // namespace scaled_mm::rowwise
