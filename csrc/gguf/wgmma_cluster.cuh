// The thread blocks of a cluster share the K of every tile: each multiplies a part, sends the others the sums of their tokens, adds those that it
// receives to its own tokens', and stores them.
#pragma once

#include "gguf/wgmma_shape.cuh"
#include "int8/decode/pipeline.cuh"

namespace scaled_mm::gguf {

// What a thread block has of its cluster. Without clusters, a cluster of one.
template <class S>
struct Cluster {
  static constexpr int kFragments = S::kTokens / 8; // of a tile's tokens, by eights

  int rank = 0, blocks = 1;

  __device__ static Cluster current() {
    if constexpr (!S::kClusters) return {};
    return {int(cute::block_rank_in_cluster()), int(cute::cluster_shape().x)};
  }
  // The part of a tile's K that this thread block multiplies. It may have no steps.
  __device__ Part part_of(int tile, int steps) const {
    if constexpr (!S::kClusters) return {tile, 0, steps};
    const int each = steps / blocks, longer = steps % blocks;
    return {tile, rank * each + min(rank, longer), each + (rank < longer)};
  }

  // Waits for all threads of the cluster, which then see its barriers.
  __device__ static void sync() {
    if constexpr (!S::kClusters) return __syncthreads();
    __syncwarp();
    cute::cluster_arrive_relaxed(); // after a fence of the barriers
    cute::cluster_wait();
  }
  __device__ void init(typename S::Storage& s) const {
    if constexpr (S::kClusters) s.received_full.init(1), s.received_empty.init(blocks);
  }

  // Adds the sums of all parts of a tile, and stores those of this thread block's tokens. before: the number of tiles before this one. more: whether
  // one follows.
  __device__ void add_and_store(const Output& output, int token, int row, typename S::Storage& s, float (&sums)[kFragments][4], int before,
                                bool more) const {
    const auto add = [&](auto of) { add_and_store_of<of.value>(output, token, row, s, sums, before, more); };
    if (blocks == 2) return add(std::integral_constant<int, 2>{});
    if (S::kCluster >= 3 && blocks == 3) return add(std::integral_constant<int, S::kCluster >= 3 ? 3 : 2>{});
    if (S::kCluster >= 4 && blocks == 4) return add(std::integral_constant<int, S::kCluster >= 4 ? 4 : 2>{});
    if (S::kCluster >= 6 && blocks == 6) return add(std::integral_constant<int, S::kCluster >= 6 ? 6 : 2>{});
    if (S::kCluster >= 8) return add(std::integral_constant<int, S::kCluster >= 8 ? 8 : 2>{});
  }

private:
  template <int kBlocks>
  __device__ __forceinline__ void add_and_store_of(const Output& output, int token, int row, typename S::Storage& s, float (&sums)[kFragments][4],
                                                   int before, bool more) const {
    constexpr int kOwned = S::fragments_of(kBlocks), kOwners = (kFragments + kOwned - 1) / kOwned, kLast = kFragments - (kOwners - 1) * kOwned;
    const int thread = int(threadIdx.x);
    const uint32_t full = cute::cast_smem_ptr_to_uint(&s.received_full), empty = cute::cast_smem_ptr_to_uint(&s.received_empty);
    constexpr int kBytes = S::kConsumers * int(sizeof(float4));
    if (thread == 0 && rank < kOwners) s.received_full.arrive_and_expect_tx((kBlocks - 1) * (rank == kOwners - 1 ? kLast : kOwned) * kBytes);
    if (before > 0) decode::wait_for_cluster(empty, (before - 1) & 1);
    // The thread block's own fragments to the front, in exchange for the first ones, which saves registers.
#pragma unroll
    for (int i = kOwned; i < kFragments; ++i) {
      float(&first)[4] = sums[i % kOwned], (&here)[4] = sums[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float kept = first[j];
        if (i / kOwned == rank) first[j] = here[j], here[j] = kept;
      }
    }
    const auto send = [&](int i, int owner) {
      const uint32_t to = cute::cast_smem_ptr_to_uint(&s.received[(rank - (rank > owner)) * kOwned + i % kOwned][thread]);
      decode::store_remote(cute::set_block_rank(to, owner), cute::set_block_rank(full, owner), __float_as_int(sums[i][0]), __float_as_int(sums[i][1]),
                           __float_as_int(sums[i][2]), __float_as_int(sums[i][3]));
    };
#pragma unroll
    for (int i = kOwned; i < kFragments; ++i) send(i, i / kOwned == rank ? 0 : i / kOwned);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) { // first ones that were not exchanged
      if (rank >= kOwners || (i >= kLast && rank == kOwners - 1)) send(i, 0);
    }
    if (rank < kOwners) {
      decode::wait_for_cluster(full, before & 1);
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        float4 sum{};
#pragma unroll
        for (int part = 0; part < kBlocks; ++part) { // in the order of K
          const int from = (part - (part > rank)) * kOwned + i;
          const float4 one = part == rank ? make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]) : s.received[from][thread];
          sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
        }
        sums[i][0] = sum.x, sums[i][1] = sum.y, sums[i][2] = sum.z, sums[i][3] = sum.w;
      }
    }
    if (more) { // else no sums will come, and the other thread blocks may have ended
      sync_threads(1, S::kConsumers);
      if (thread < kBlocks) decode::arrive_remote(empty, uint32_t(thread));
    }
    token += rank * (8 * kOwned);
    const float bias[2] = {output.bias_of(row), output.bias_of(row + 8)};
    if (kLast == kOwned ? rank < kOwners : rank < kOwners - 1) {
      output.store_fragments<kOwned>(token, row, sums, bias);
    } else if (kLast < kOwned && rank == kOwners - 1) {
      output.store_fragments<kLast>(token, row, sums, bias);
    }
  }
};

} // namespace scaled_mm::gguf
