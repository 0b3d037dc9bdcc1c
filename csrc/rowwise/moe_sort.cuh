// The order of the tokens of a mixture of experts by expert: a stable counting sort.
#pragma once

#include "rowwise/kernel.cuh"

namespace scaled_mm::rowwise {

constexpr int kMoeThreads = 1024;       // they count ids
constexpr int kMoeWarps = 8;            // of these place ids: the counts of each take 4 KiB of shared memory
constexpr int kMoeIds = 32 * kMoeWarps; // that they place at a time
constexpr int kMoeCluster = 8;          // thread blocks that share the counting, on compute capability 9.0 and newer

struct MoeSort {
  const void* ids; // [tokens, choices], int32 or int64
  int64_t ids_stride_token, ids_stride_choice;
  bool wide;                 // int64
  bool packed;               // contiguous: an id's place is its index
  const int32_t* expert_map; // [mapped]; mapped is -1 if there is none
  int64_t map_stride, mapped;
  int choices, count, experts; // count: tokens * choices
  int64_t each;                // ids that a thread block places: a multiple of kMoeIds, so the 32 ids that a warp loads belong to one thread block
  int32_t *order, *ends, *inverse;
};

// The expert of id i; -1: not here.
__device__ inline int expert_of(const MoeSort& p, int i) {
  const int64_t at = p.packed ? i : i / p.choices * p.ids_stride_token + i % p.choices * p.ids_stride_choice;
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

// A cluster of kBlocks thread blocks, which read each other's shared memory.
template <int kBlocks>
struct MoeCluster {
  static_assert(kBlocks == 1 || kBlocks == kMoeCluster);
  __device__ static void arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
  }
  __device__ static void wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
  }
  // A value of thread block `rank`, at the same place as `own` in this one.
  __device__ static int32_t read(const int32_t* own, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      uint32_t address = uint32_t(__cvta_generic_to_shared(own));
      int32_t value;
      asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
      asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
      return value;
    }
#endif
    return *own;
  }
};

// The inclusive sum over the threads of a warp.
__device__ inline int sum_of_lanes_up_to(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Each thread block places its own range of ids. The thread blocks of a cluster count all ids together, those of other clusters too, so clusters do
// not wait for each other.
template <int kBlocks>
__global__ void __launch_bounds__(kMoeThreads) moe_sort_kernel(const __grid_constant__ MoeSort p) {
  wait_for_preceding_kernel();
  using Cluster = MoeCluster<kBlocks>;
  enum { kBefore, kAfter, kOwn };                       // ids before the cluster's range; after it; in this thread block's
  __shared__ int32_t counts[3][kMostExperts];           // of each expert. kBefore and kAfter: those that this thread block has counted
  __shared__ int32_t of_warps[kMoeWarps][kMostExperts]; // ids per warp and expert in this thread block; later the next row of each
  __shared__ int32_t sums[kMoeThreads / 32];
  static_assert(kMostExperts <= kMoeThreads, "a thread has an expert");
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32, rank = int(blockIdx.x % kBlocks);
  if (thread < p.experts) {
    counts[kBefore][thread] = counts[kAfter][thread] = 0;
#pragma unroll
    for (int w = 0; w < kMoeWarps; ++w) of_warps[w][thread] = 0;
  }
  __syncthreads();

  const int64_t begin = int64_t(blockIdx.x - rank) * p.each, end = begin + kBlocks * p.each; // of the cluster
  constexpr int kLoads = 8, kSpan = kBlocks * kMoeThreads;                                   // loads under way
  for (int64_t first = rank * kMoeThreads + thread; first < p.count; first += kLoads * kSpan) {
    int experts[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t at = first + i * kSpan;
      experts[i] = at < p.count && (at < begin || at >= end) ? expert_of(p, int(at)) : -1;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // Its result is not used, so one instruction adds for all lanes with the same expert.
      if (experts[i] >= 0) atomicAdd(&counts[first + i * kSpan < begin ? kBefore : kAfter][experts[i]], 1);
    }
  }
  // The ids that this warp places; none if it places no ids.
  const int64_t own = begin + rank * p.each + int64_t(warp) * (p.each / kMoeWarps) + lane,
                own_end = warp < kMoeWarps ? own + p.each / kMoeWarps : own;
  for (int64_t at = own; at < own_end && at - lane < p.count; at += 32) {
    const int expert = at < p.count ? expert_of(p, int(at)) : -1;
    const SameExpert same(expert);
    if (expert >= 0 && same.first) of_warps[warp][expert] += same.count();
    __syncwarp();
  }
  __syncthreads();

  const bool has_expert = thread < p.experts;
  if (has_expert) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kMoeWarps; ++w) {
      const int count = of_warps[w][thread];
      of_warps[w][thread] = sum;
      sum += count;
    }
    counts[kOwn][thread] = sum;
  }
  Cluster::arrive();
  Cluster::wait();
  int before = 0, all = 0; // of the expert: ids before this thread block's range; all ids
  if (has_expert) {
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
      const int of_block = Cluster::read(&counts[kOwn][thread], r), of_others = Cluster::read(&counts[kBefore][thread], r);
      before += of_others + (r < rank ? of_block : 0);
      all += of_others + of_block + Cluster::read(&counts[kAfter][thread], r);
    }
  }
  Cluster::arrive(); // nothing of another thread block is read from here on

  const int up_to = sum_of_lanes_up_to(all, lane);
  if (lane == 31) sums[warp] = up_to;
  __syncthreads();
  if (warp == 0) {
    const int sum = sum_of_lanes_up_to(sums[lane], lane);
    __syncwarp();
    sums[lane] = sum;
  }
  __syncthreads();
  const int rows = (warp > 0 ? sums[warp - 1] : 0) + up_to; // of the experts up to this one
  const int placed = sums[kMoeThreads / 32 - 1];
  if (has_expert) {
    if (blockIdx.x == 0) p.ends[thread] = rows;
#pragma unroll
    for (int w = 0; w < kMoeWarps; ++w) of_warps[w][thread] += rows - all + before;
  }
  __syncthreads();

  for (int64_t at = own; at < own_end && at - lane < p.count; at += 32) {
    const bool inside = at < p.count;
    const int expert = inside ? expert_of(p, int(at)) : -1;
    const SameExpert same(expert);
    const int row = expert >= 0 ? of_warps[warp][expert] + same.before : -1;
    __syncwarp();
    if (expert >= 0 && same.first) of_warps[warp][expert] += same.count();
    __syncwarp();
    if (!inside) continue;
    p.inverse[at] = row;
    if (row >= 0) p.order[row] = int32_t(at);
    if (at >= placed) p.order[at] = -1;
  }
  Cluster::wait(); // the shared memory of a thread block that has ended cannot be read
}

} // namespace scaled_mm::rowwise
