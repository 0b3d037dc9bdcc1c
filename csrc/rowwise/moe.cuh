// What surrounds the products of a mixture of experts: tokens quantized to the rows where their experts read them, and the weighted sum of what the
// experts give. The order of the tokens by expert: moe_sort.cuh.
#pragma once

#include "rowwise/int8_block.cuh"

namespace scaled_mm::rowwise {

// ---- tokens quantized to the rows of their experts ----------------------------------------------------------------------------------

// The rows of each token among those of the experts: [tokens, choices], contiguous; -1: none.
struct ExpertRows {
  const int32_t* rows;
  int choices;

  // The row of a token's choice. Not by __ldg: the preceding kernel may still write the rows when this one starts, and __ldg's cache is for data that
  // nothing writes while a kernel runs.
  __device__ int of(int64_t token, int choice) const { return rows[token * choices + choice]; }
};

// The rows of 32 choices of a token: lane l has that of choice `first` + l. Without lookups and branches for each choice that has none.
struct LaneRows {
  int row = -1;
  uint32_t here; // a bit for each choice that has a row

  // Every lane must call it, as everything below.
  __device__ LaneRows(const ExpertRows& rows, int64_t token, int first) {
    const int choice = first + int(threadIdx.x) % 32;
    if (choice < rows.choices) row = rows.of(token, choice);
    here = __ballot_sync(~0u, row >= 0);
  }
  // visit(row) for each choice that has one, in their order.
  template <class Visit>
  __device__ void each(const Visit& visit) const {
    for (uint32_t left = here; left != 0; left &= left - 1) visit(__shfl_sync(~0u, row, __ffs(int(left)) - 1));
  }
};

struct MoeRows {
  Rows of; // out: [rows of experts, K]; out_scale is not used
  ExpertRows to;
  float* scale;
  int64_t scale_stride;
};

// Each token is read and quantized once, and written for each of its experts. The minimum of one thread block per SM: without it the compiler limits
// registers to raise occupancy, and spills on some architectures.
template <class X, int kThreads, int kHeld, bool kVectors>
__global__ void __launch_bounds__(Group<kThreads>::kBlock, 1) moe_quantize_kernel(const __grid_constant__ MoeRows p) {
  wait_for_preceding_kernel();
  const Group<kThreads> group;
  if (group.row >= p.of.rows) return;
  const LaneRows lanes(p.to, group.row, 0);
  RowValues<PlainElements<X>, kThreads, kHeld, kVectors> values(p.of, group);
  const Quantizer quantizer = symmetric(group, values);
  for (int j = group.thread; j < p.to.choices; j += kThreads) {
    const int row = p.to.of(group.row, j);
    if (row >= 0) p.scale[row * p.scale_stride] = quantizer.scale;
  }
  if (quantizer.short_way && !quantizer.spoilt) {
    values.each([&](const auto& at, const auto& y) {
      constexpr int kCount = int(sizeof(y) / sizeof(y[0]));
      Chunk<int8_t> q[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) q[i] = by_largest(y[i], quantizer);
      const auto write = [&](int row) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) write_chunk<kVectors>(p.of.out, row, at[i], p.of.K, q[i]);
      };
      int next = 0; // choice
      if constexpr (kHeld > 0) {
        lanes.each(write);
        next = 32;
      } // kHeld = 0: lanes without a chunk left have left the loop, so the warp cannot shuffle
      for (; next < p.to.choices; ++next) {
        if (const int row = p.to.of(group.row, next); row >= 0) write(row);
      }
    });
  } else { // rare: the row is read once more, a chunk at a time
    RowValues<PlainElements<X>, kThreads, 0, kVectors, 1> again(p.of, group, values.state);
    again.each([&](const auto& at, const auto& y) {
      const Chunk<int8_t> q = divided_here(y[0], quantizer);
      for (int j = 0; j < p.to.choices; ++j) {
        if (const int row = p.to.of(group.row, j); row >= 0) write_chunk<kVectors>(p.of.out, row, at[0], p.of.K, q);
      }
    });
  }
}

struct MoeBlocks {
  Int8Blocks of; // of the tokens; out, scale: of the rows of experts
  ExpertRows to;
};

// The same with a scale for each 128 elements. Half a warp has a block.
template <class X>
__global__ void __launch_bounds__(kInt8BlockThreads) moe_quantize_block_kernel(const __grid_constant__ MoeBlocks p) {
  wait_for_preceding_kernel();
  const TokenBlock<X> block(p.of, blockIdx.x);
  if (!block.inside) return;
  const Chunk<int8_t> q = quantize(block.y, block.quantizer);
  for (int j = 0; j < p.to.choices; ++j) {
    const int row = p.to.of(block.row, j);
    if (row >= 0) block.write(p.of, row, q);
  }
}

// ---- the weighted sum -----------------------------------------------------------------------------------------------------------------

struct MoeCombine {
  int64_t tokens;
  int K, spans; // spans: thread blocks of a token
  Matrix y, out;
  const void* weights; // [tokens, choices]
  int64_t weights_stride_token, weights_stride_choice;
  int32_t weights_dtype; // scaledMMDtype_t
  ExpertRows of;
};

constexpr int kCombineThreads = 128;
constexpr int kAtOnce = 4; // rows whose loads are under way

__device__ inline float combine_weight(const MoeCombine& p, int64_t token, int choice) {
  const int64_t at = token * p.weights_stride_token + choice * p.weights_stride_choice;
  if (p.weights_dtype == SCALED_MM_DTYPE_FLOAT32) return static_cast<const float*>(p.weights)[at];
  return p.weights_dtype == SCALED_MM_DTYPE_FLOAT16 ? to_float(static_cast<const __half*>(p.weights)[at])
                                                    : to_float(static_cast<const __nv_bfloat16*>(p.weights)[at]);
}

// out[t] = ((0 + w[t,0] y[row 0]) + w[t,1] y[row 1]) + ..., without the choices that have no row. kVectors: chunks are whole and aligned.
template <class X, bool kVectors>
__global__ void __launch_bounds__(kCombineThreads) moe_combine_kernel(const __grid_constant__ MoeCombine p) {
  wait_for_preceding_kernel();
  using W = WideOf<X>;
  const int64_t token = blockIdx.x / unsigned(p.spans);
  const int k = int(blockIdx.x % unsigned(p.spans) * kCombineThreads + threadIdx.x) * kChunk; // past the end of a row: nothing is read or written
  W sum[kChunk] = {};
  for (int first = 0; first < p.of.choices; first += 32) {
    const LaneRows lanes(p.of, token, first);
    const int choice = first + int(threadIdx.x) % 32;
    const float weight_of_lane = choice < p.of.choices ? combine_weight(p, token, choice) : 0;
    for (uint32_t left = lanes.here; left != 0;) {
      Chunk<X> y[kAtOnce];
      float weight[kAtOnce];
      bool is_here[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        is_here[i] = left != 0;
        const int lane = is_here[i] ? __ffs(int(left)) - 1 : 0;
        left &= left - 1;
        const int row = __shfl_sync(~0u, lanes.row, lane);
        weight[i] = __shfl_sync(~0u, weight_of_lane, lane);
        if (is_here[i]) y[i] = read_chunk<kVectors, X>(p.y, row, k, p.K);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!is_here[i]) continue;
        float values[kChunk];
        to_floats(y[i], values);
#pragma unroll
        for (int e = 0; e < kChunk; ++e) sum[e] = sum[e] + W(weight[i]) * W(values[e]);
      }
    }
  }
  float result[kChunk];
#pragma unroll
  for (int e = 0; e < kChunk; ++e) result[e] = float(sum[e]);
  write_chunk<kVectors>(p.out, token, k, p.K, from_floats<X>(result));
}

} // namespace scaled_mm::rowwise
