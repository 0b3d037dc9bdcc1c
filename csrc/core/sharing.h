// How many thread blocks share the tiles of an output that remain after whole rounds: for the kernels that do it (gguf/shares.cuh) and for their
// predicted time (time_model.cpp). scaled_mm/kernels/sharing.py computes the same; a test compares the two.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

namespace scaled_mm {

// 0: sharing would take longer than one more round of whole tiles.
// rest: tiles that remain. steps: of K, for each tile. slots: thread blocks that the GPU holds at once; more than rest. most: the largest average number
// of thread blocks per shared tile. tile_m: tokens per tile.
inline int64_t sharing_blocks(int64_t rest, int64_t steps, int64_t slots, int64_t most, int64_t tile_m) {
  if (rest <= 0 || rest > INT_MAX / std::max<int64_t>(steps, 1)) return 0;
  // Costs in tenths of a step, set by hand from measured times: the start, adding the sums, and having parts of two tiles.
  const int64_t kStart = 10, kAdd = 20, kSecond = tile_m > 128 ? 100 : 1;
  int64_t best = 0, least = 10 * steps + kStart;
  const auto consider = [&](int64_t blocks) {
    if (blocks <= rest || blocks > rest * most || blocks > rest * steps) return;
    const int64_t cost = (10 * rest * steps + blocks - 1) / blocks + (blocks % rest ? kSecond : 0) + kStart + kAdd;
    if (cost < least) best = blocks, least = cost;
  };
  const int64_t even = std::min(most, slots / rest); // thread blocks for each tile
  for (int64_t parts = 2; parts <= even; ++parts) consider(rest * parts);
  consider(slots);
  return best;
}

} // namespace scaled_mm
