// How many thread blocks share tiles of an output: those that remain after whole waves (gguf/shares.cuh), or each of them, in a cluster
// (gguf/wgmma_cluster.cuh). For these kernels and for their predicted time (time_model.cpp). scaled_mm/kernels/sharing.py computes the same.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

namespace scaled_mm {

// 0: do not share them: it is not faster than one more wave of whole tiles, or not possible.
// rest: the tiles that remain. steps: of K, for each tile. at_once: thread blocks that the GPU holds at once; more than rest. most: the largest
// average number of thread blocks for a shared tile. tile_m: tokens per tile.
inline int64_t sharing_blocks(int64_t rest, int64_t steps, int64_t at_once, int64_t most, int64_t tile_m) {
  if (rest <= 0 || rest > INT_MAX / std::max<int64_t>(steps, 1)) return 0;
  // Costs in tenths of a step, set by hand: adding the sums, and having parts of two tiles.
  const int64_t kAdd = 20, kTwoTiles = tile_m > 128 ? 100 : 1;
  int64_t best = 0, least = 10 * steps;
  const auto consider = [&](int64_t blocks) {
    if (blocks <= rest || blocks > rest * most || blocks > rest * steps) return;
    const int64_t cost = (10 * rest * steps + blocks - 1) / blocks + (blocks % rest ? kTwoTiles : 0) + kAdd;
    if (cost < least) best = blocks, least = cost;
  };
  const int64_t even = std::min(most, at_once / rest); // thread blocks for each tile
  for (int64_t parts = 2; parts <= even; ++parts) consider(rest * parts);
  consider(at_once);
  return best;
}

inline constexpr int32_t kClusterSizes[] = {2, 3, 4, 6, 8}; // sizes of clusters that share the K of tiles

// SMs that clusters of this size can use: a cluster lies within one group of SMs, whose number is not always a multiple of the cluster's. Counted
// on H100s and H200s.
inline int32_t usable_multiprocessors(int32_t cluster, int32_t multiprocessors) {
  constexpr int32_t kOf = 132;
  const int32_t usable = cluster == 3 ? 117 : cluster == 4 ? 116 : cluster == 6 ? 102 : cluster == 8 ? 112 : kOf;
  return usable == kOf ? multiprocessors : int32_t(int64_t(multiprocessors) * usable / kOf);
}

// The thread blocks of a cluster, which share the K of every tile, and the waves of clusters.
struct ClusterBlocks {
  int32_t blocks;
  int64_t at_once, waves; // clusters that the GPU holds at once; 0 waves: no tiles
};
// steps: of K, for each tile. resident: thread blocks on an SM at a time. most: of a cluster, at least 2. The fewest among those with the least
// time, if the end of a tile takes as long as a step.
inline ClusterBlocks cluster_blocks(int64_t tiles, int64_t steps, int32_t multiprocessors, int32_t resident, int32_t most) {
  ClusterBlocks best = {0, 1, 0};
  double least = 0;
  for (const int32_t blocks : kClusterSizes) {
    if (blocks > most) break;
    const int64_t at_once = std::max<int64_t>(1, int64_t(usable_multiprocessors(blocks, multiprocessors)) * resident / blocks);
    const int64_t waves = tiles / at_once + (tiles % at_once != 0);
    const double cost = double(waves) * double(steps / blocks + (steps % blocks != 0) + 1);
    if (best.blocks == 0 || cost < least) best = {blocks, at_once, waves}, least = cost;
  }
  return best;
}

} // namespace scaled_mm
