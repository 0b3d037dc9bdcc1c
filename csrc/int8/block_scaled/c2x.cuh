// Launching the mma.sync kernels of block-scaled products. One kernel config of a table is one instance.
#pragma once

#include <climits>

#include "int8/block_scaled/c2x_tile.cuh"
#include "int8/block_scaled/launch.cuh"

namespace scaled_mm::block_scaled {

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) tile_kernel(const __grid_constant__ TileProblem p) {
  extern __shared__ __align__(128) unsigned char shared[];
  compute_tile<Shape>(p, int(blockIdx.x), int(threadIdx.x), shared);
}

template <int kTileM, int kTileN, int kWarpM, int kWarpN, int kStages, int kSwizzle, class Out>
struct C2x {
  using Shape = TileShape<kTileM, kTileN, kWarpM, kWarpN, kStages, kSwizzle, Out>;
  static constexpr int kSharedMemory = Shape::kSharedMemory;

  static DeviceKernel& kernel() {
    static DeviceKernel one(&tile_kernel<Shape>);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    return prepare_kernel(kernel(), kSharedMemory, device, message, size);
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    int tiles = 0;
    if (scaledMMStatus_t status = count_tiles(l, kTileM, kTileN, kSwizzle, &tiles, message, size)) return status;
    TileProblem p = tile_problem<kTileM, kTileN>(l);
    LaunchShape shape;
    shape.grid = dim3(unsigned(tiles));
    shape.block = dim3(Shape::kThreads);
    shape.shared_memory = kSharedMemory;
    void* pointers[] = {&p};
    return launch_kernel(kernel(), shape, pointers, l, message, size);
  }

  static constexpr Kernel entry(const char* row) { return {row, DtypeOf<Out>::value, kSharedMemory, &prepare, &launch}; }
};

} // namespace scaled_mm::block_scaled
