// What surrounds the products of a mixture of experts: the order of the tokens by expert, tokens quantized to the rows where their experts read
// them, and the weighted sum of what the experts give.
#pragma once

#include "rowwise/int8_block.cuh"

namespace scaled_mm::rowwise {

constexpr int kMoeThreads = 256;
constexpr int kMoeWarps = kMoeThreads / 32;

// ---- the order by expert: a stable counting sort ------------------------------------------------------------------------------------

struct MoeSort {
  const void* ids; // [tokens, choices], int32 or int64
  int64_t ids_stride_token, ids_stride_choice;
  bool wide;                 // int64
  const int32_t* expert_map; // [mapped]; mapped is -1 if there is none
  int64_t map_stride, mapped;
  int choices, count, experts; // count: tokens * choices
  int each;                    // ids of a thread block: a multiple of kMoeThreads, so that a warp's ids are all its own or none
  int32_t *order, *ends, *inverse;
};

// The expert of id i; -1: not here.
__device__ inline int expert_of(const MoeSort& p, int i) {
  const int64_t at = i / p.choices * p.ids_stride_token + i % p.choices * p.ids_stride_choice;
  int64_t id = p.wide ? static_cast<const int64_t*>(p.ids)[at] : static_cast<const int32_t*>(p.ids)[at];
  if (p.mapped >= 0) id = id >= 0 && id < p.mapped ? p.expert_map[id * p.map_stride] : -1;
  return id >= 0 && id < p.experts ? int(id) : -1;
}

// The lanes of the warp with the same expert as this one. Every lane must call it.
struct SameExpert {
  uint32_t lanes;
  bool first;
  int before; // of them, those before this one
  __device__ explicit SameExpert(int expert) : lanes(__match_any_sync(~0u, expert)) {
    const uint32_t below = (1u << threadIdx.x % 32) - 1;
    before = __popc(lanes & below);
    first = before == 0;
  }
  __device__ int count() const { return __popc(lanes); }
};

// Each thread block places its own ids. It counts the experts of all the others, so thread blocks need not wait for each other.
static __global__ void __launch_bounds__(kMoeThreads) moe_sort_kernel(const __grid_constant__ MoeSort p) {
  wait_for_preceding_kernel();
  __shared__ int32_t before[kMostExperts], after[kMostExperts]; // ids of an expert in other thread blocks; later `before` is a first row
  __shared__ int32_t of_warps[kMoeWarps][kMostExperts];         // in a warp's part of the own ids; later those of the warps before it
  __shared__ int32_t placed;                                    // ids with an expert
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  for (int e = thread; e < p.experts; e += kMoeThreads) {
    before[e] = after[e] = 0;
#pragma unroll
    for (int w = 0; w < kMoeWarps; ++w) of_warps[w][e] = 0;
  }
  __syncthreads();

  const int64_t begin = int64_t(blockIdx.x) * p.each, end = begin + p.each;
  constexpr int kLoads = 4;                                                             // under way
  for (int64_t first = thread; first - lane < p.count; first += kLoads * kMoeThreads) { // whole warps
    int experts[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t at = first + i * kMoeThreads;
      experts[i] = at < p.count && (at < begin || at >= end) ? expert_of(p, int(at)) : -1;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const SameExpert same(experts[i]);
      int32_t* const counts = first + i * kMoeThreads < begin ? before : after;
      if (experts[i] >= 0 && same.first) atomicAdd(&counts[experts[i]], same.count());
    }
  }
  const int64_t own = begin + int64_t(warp) * (p.each / kMoeWarps) + lane, own_end = own + p.each / kMoeWarps;
  for (int64_t at = own; at < own_end && at - lane < p.count; at += 32) {
    const int expert = at < p.count ? expert_of(p, int(at)) : -1;
    const SameExpert same(expert);
    if (expert >= 0 && same.first) of_warps[warp][expert] += same.count();
    __syncwarp();
  }
  __syncthreads();

  for (int e = thread; e < p.experts; e += kMoeThreads) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kMoeWarps; ++w) {
      const int count = of_warps[w][e];
      of_warps[w][e] = sum;
      sum += count;
    }
    after[e] += before[e] + sum; // all ids of the expert
  }
  __syncthreads();
  if (warp == 0) {
    int rows = 0; // of the experts before
    for (int first = 0; first < p.experts; first += 32) {
      const int e = first + lane, count = e < p.experts ? after[e] : 0;
      int sum = count;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      if (e < p.experts) {
        before[e] += rows + sum - count;
        if (blockIdx.x == 0) p.ends[e] = rows + sum;
      }
      rows += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) placed = rows;
  }
  __syncthreads();

  for (int64_t at = own; at < own_end && at - lane < p.count; at += 32) {
    const bool inside = at < p.count;
    const int expert = inside ? expert_of(p, int(at)) : -1;
    const SameExpert same(expert);
    const int row = expert >= 0 ? before[expert] + of_warps[warp][expert] + same.before : -1;
    __syncwarp();
    if (expert >= 0 && same.first) of_warps[warp][expert] += same.count();
    __syncwarp();
    if (!inside) continue;
    p.inverse[at] = row;
    if (row >= 0) p.order[row] = int32_t(at);
    if (at >= placed) p.order[at] = -1;
  }
}

// ---- tokens quantized to the rows of their experts ----------------------------------------------------------------------------------

// The rows of each token among those of the experts: [tokens, choices], contiguous; -1: none.
struct ExpertRows {
  const int32_t* rows;
  int choices;
};

struct MoeRows {
  Rows of; // out: [rows of experts, K]; out_scale is not used
  ExpertRows to;
  float* scale;
  int64_t scale_stride;
};

// Each token is read and quantized once, and written for each of its experts. One thread block at least on a multiprocessor: without that the
// compiler spills for some architectures, to fit more of them.
template <class X, int kThreads, int kHeld, bool kVectors>
__global__ void __launch_bounds__(Group<kThreads>::kBlock, 1) moe_quantize_kernel(const __grid_constant__ MoeRows p) {
  wait_for_preceding_kernel();
  const Group<kThreads> group;
  if (group.row >= p.of.rows) return;
  RowValues<PlainElements<X>, kThreads, kHeld, kVectors> values(p.of, group);
  const Quantizer quantizer = symmetric(group, values);
  const int32_t* const rows = p.to.rows + group.row * p.to.choices;
  for (int j = group.thread; j < p.to.choices; j += kThreads) {
    if (rows[j] >= 0) p.scale[rows[j] * p.scale_stride] = quantizer.scale;
  }
  const auto write = [&](const auto& at, const auto& y, const auto& result) {
    constexpr int kCount = int(sizeof(y) / sizeof(y[0]));
    Chunk<int8_t> q[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) q[i] = result(y[i]);
    for (int j = 0; j < p.to.choices; ++j) {
      const int row = rows[j];
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
  const int32_t* const rows = p.to.rows + block.row * p.to.choices;
  for (int j = 0; j < p.to.choices; ++j) {
    if (rows[j] >= 0) block.write(p.of, rows[j], q);
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
  const int32_t* const rows = p.of.rows + token * p.of.choices;
  W sum[kChunk] = {};
  for (int first = 0; first < p.of.choices; first += kAtOnce) {
    float y[kAtOnce][kChunk], weight[kAtOnce];
    bool is_here[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i < p.of.choices ? rows[first + i] : -1;
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
