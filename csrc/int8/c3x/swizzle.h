// How many tiles of one dimension a persistent grid takes together before it moves on in the other: so that what they share of a
// and b is still in L2. CUTLASS's scheduler rounds the tiles of both dimensions up to whole groups and computes what that adds as
// if it were there (PersistentTileSchedulerSm90Params): at M = 2049 the 17 tiles of 128 rows become 24.
#pragma once

#include <cstdint>

namespace scaled_mm::c3x {

struct TileGrid {
  int64_t tiles_m, tiles_n; // that hold something of the product
  int cluster_m, cluster_n;
};

constexpr int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Tiles that the scheduler computes when it may group up to `most` of them. A short dimension gets smaller groups.
constexpr int64_t scheduled_tiles(const TileGrid& grid, int most) {
  const int64_t m = rounded_up(grid.tiles_m, grid.cluster_m), n = rounded_up(grid.tiles_n, grid.cluster_n);
  const int64_t shorter = m < n ? m : n;
  const int group = most >= 8 && shorter >= 6 ? 8 : most >= 4 && shorter >= 3 ? 4 : most >= 2 && shorter >= 2 ? 2 : 1;
  return rounded_up(m, int64_t(group) * grid.cluster_m) * rounded_up(n, int64_t(group) * grid.cluster_n);
}

// The largest group up to `most` (a power of two) that adds no more than one tile in 32.
constexpr int swizzle_of(const TileGrid& grid, int most) {
  const int64_t least = scheduled_tiles(grid, 1);
  while (most > 1 && scheduled_tiles(grid, most) * 32 > least * 33) most /= 2;
  return most;
}

} // namespace scaled_mm::c3x
