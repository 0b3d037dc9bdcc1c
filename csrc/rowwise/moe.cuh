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

  // The row of a token's choice. __ldg: the compiler need not repeat the load after stores, which might alias a plain one.
  __device__ int of(int64_t token, int choice) const { return __ldg(rows + token * choices + choice); }
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
  RowValues<PlainElements<X>, kThreads, kHeld, kVectors> values(p.of, group);
  const Quantizer quantizer = symmetric(group, values);
  for (int j = group.thread; j < p.to.choices; j += kThreads) {
    const int row = p.to.of(group.row, j);
    if (row >= 0) p.scale[row * p.scale_stride] = quantizer.scale;
  }
  const auto write = [&](const auto& at, const auto& y, const auto& result) {
    constexpr int kCount = int(sizeof(y) / sizeof(y[0]));
    Chunk<int8_t> q[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) q[i] = result(y[i]);
    for (int j = 0; j < p.to.choices; ++j) {
      const int row = p.to.of(group.row, j);
      if (row < 0) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) write_chunk<kVectors>(p.of.out, row, at[i], p.of.K, q[i]);
    }
  };
  if (quantizer.short_way && !quantizer.spoilt) {
    values.each([&](const auto& at, const auto& y) { write(at, y, [&](const float(&chunk)[kChunk]) { return by_largest(chunk, quantizer); }); });
  } else { // rare: the row is read once more, a chunk at a time
    RowValues<PlainElements<X>, kThreads, 0, kVectors, 1> again(p.of, group, values.state);
    again.each([&](const auto& at, const auto& y) { write(at, y, [&](const float(&chunk)[kChunk]) { return divided_here(chunk, quantizer); }); });
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
  const TokenBlock<X> block(p.of);
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

// out[t] = ((0 + w[t,0] y[row 0]) + w[t,1] y[row 1]) + ..., without the choices that have no row.
template <class X>
__global__ void __launch_bounds__(kCombineThreads) moe_combine_kernel(const __grid_constant__ MoeCombine p) {
  wait_for_preceding_kernel();
  using W = WideOf<X>;
  const int64_t token = blockIdx.x / unsigned(p.spans);
  const int64_t k = (int64_t(blockIdx.x % unsigned(p.spans)) * kCombineThreads + threadIdx.x) * kChunk;
  if (k >= p.K) return;
  W sum[kChunk] = {};
  for (int first = 0; first < p.of.choices; first += kAtOnce) {
    float y[kAtOnce][kChunk], weight[kAtOnce];
    bool is_here[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i < p.of.choices ? p.of.of(token, first + i) : -1;
      is_here[i] = row >= 0;
      if (!is_here[i]) continue;
      weight[i] = combine_weight(p, token, first + i);
      load_chunk<X>(p.y, row, int(k), p.K, y[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!is_here[i]) continue;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) sum[e] = sum[e] + W(weight[i]) * W(y[i][e]);
    }
  }
  float result[kChunk];
#pragma unroll
  for (int e = 0; e < kChunk; ++e) result[e] = float(sum[e]);
  store_chunk(p.out, token, int(k), p.K, from_floats<X>(result));
}

} // namespace scaled_mm::rowwise
