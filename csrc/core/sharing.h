// How many thread blocks share the tiles of an output that remain after whole waves: for the kernels that do it (gguf/shares.cuh) and for their
// predicted time (time_model.cpp). scaled_mm/kernels/sharing.py computes the same.
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

} // namespace scaled_mm
