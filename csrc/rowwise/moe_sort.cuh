// The order of the tokens of a mixture of experts by expert: a stable counting sort.
#pragma once

#include "rowwise/kernel.cuh"

namespace scaled_mm::rowwise {

constexpr int kMoeThreads = 256;
constexpr int kMoeWarps = kMoeThreads / 32;

struct MoeSort {
  const void* ids; // [tokens, choices], int32 or int64
  int64_t ids_stride_token, ids_stride_choice;
  bool wide;                 // int64
  const int32_t* expert_map; // [mapped]; mapped is -1 if there is none
  int64_t map_stride, mapped;
  int choices, count, experts; // count: tokens * choices
  int64_t each;                // ids per thread block: a multiple of kMoeThreads, so the 32 ids that a warp loads belong to one thread block
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
  int before; // lower lanes with the same expert
  __device__ explicit SameExpert(int expert) : lanes(__match_any_sync(~0u, expert)) {
    const uint32_t below = (1u << threadIdx.x % 32) - 1;
    before = __popc(lanes & below);
    first = before == 0;
  }
  __device__ int count() const { return __popc(lanes); }
};

// Each thread block places its own range of ids. It counts the ids of all other ranges itself, so thread blocks do not wait for each other.
static __global__ void __launch_bounds__(kMoeThreads) moe_sort_kernel(const __grid_constant__ MoeSort p) {
  wait_for_preceding_kernel();
  __shared__ int32_t before[kMostExperts], after[kMostExperts]; // ids per expert in other thread blocks; later before[e]: its first row here
  __shared__ int32_t of_warps[kMoeWarps][kMostExperts];         // ids per warp and expert in this thread block; later those of lower warps
  __shared__ int32_t placed;                                    // ids with a local expert
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

} // namespace scaled_mm::rowwise
