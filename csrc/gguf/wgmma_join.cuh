// The thread blocks of a cluster multiply a part of the K of the same tile each. Here they add up their sums, through each other's shared memory.
#pragma once

#include "gguf/output.cuh"
#include "gguf/wgmma_shape.cuh"

namespace scaled_mm::gguf {

__device__ inline int rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}

// All threads of the cluster that still run: what they wrote to shared memory before is visible to all after.
__device__ inline void meet_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What `mine`, an address in shared memory, holds in the thread block of that rank.
__device__ inline float4 load_from_cluster(const float4* mine, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(cute::cast_smem_ptr_to_uint(mine)), "r"(rank));
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}

// Each thread block adds every split-th fragment, in the order of K, and stores it. row, token: of the thread's first fragment. The consumers call it
// when all stages have been loaded; the stages of activations hold the sums then.
template <class S>
__device__ __forceinline__ void join_in_cluster(typename S::Storage& s, const Output& output, int split, int row, int token,
                                                const float (&sums)[S::kTokens / 8][4]) {
  static_assert(sizeof(s.values) >= sizeof(float) * S::kTokens * S::kRows);
  constexpr int kFragments = S::kTokens / 8, kThreads = S::kConsumers;
  auto* const all = reinterpret_cast<float4*>(&s.values) + threadIdx.x; // [fragments][consumer threads]
  asm volatile("bar.sync 3, %0;" ::"n"(kThreads) : "memory");           // all consumers have read all activations
#pragma unroll
  for (int i = 0; i < kFragments; ++i) all[i * kThreads] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
  meet_in_cluster();
  const float bias[2] = {output.bias_of(row), output.bias_of(row + 8)};
#pragma unroll 1
  for (int i = rank_in_cluster(); i < kFragments; i += split) {
    float sum[1][4] = {};
#pragma unroll 1
    for (int rank = 0; rank < split; ++rank) {
      const float4 one = load_from_cluster(all + i * kThreads, rank);
      sum[0][0] += one.x, sum[0][1] += one.y, sum[0][2] += one.z, sum[0][3] += one.w;
    }
    output.store_fragments(token + 8 * i, row, sum, bias);
  }
  meet_in_cluster(); // a thread block's shared memory lasts until all have read it
}

} // namespace scaled_mm::gguf
