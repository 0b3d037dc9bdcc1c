// What the launches of block-scaled kernels share.
#pragma once

#include <climits>

#include "int8/block_scaled/warp_tile.cuh"
#include "int8/launch.cuh"

namespace scaled_mm::block_scaled {

inline Scales scales_of(const GemmLaunch& l) {
  return {l.a_scale, l.b_scale, l.a_scale_stride, l.a_scale_stride_k, l.b_scale_stride_k, l.b_scale_stride, l.block_size == kHalfBlock};
}

// Counts the tiles of a product. Fails if `side` times their number exceeds INT_MAX; side: kSwizzle, as kernels compute kSwizzle * tiles_m.
inline scaledMMStatus_t count_tiles(const GemmLaunch& l, int tile_m, int tile_n, int side, int* tiles, char* message, size_t size) {
  const int64_t tiles_m = (l.M + tile_m - 1) / tile_m, tiles_n = (l.N + tile_n - 1) / tile_n;
  if (tiles_m > INT_MAX / side / tiles_n) {
    snprintf(message, size, "out: expected at most %d tiles of %dx%d, got M = %lld, N = %lld", INT_MAX / side, tile_m, tile_n,
             static_cast<long long>(l.M), static_cast<long long>(l.N));
    return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
  }
  *tiles = int(tiles_m * tiles_n);
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace scaled_mm::block_scaled
