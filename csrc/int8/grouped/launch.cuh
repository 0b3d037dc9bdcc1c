// Launching a persistent grid: as many blocks as the device runs at once, or as there can be tiles.
#pragma once

#include <climits>

#include "int8/grouped/experts.cuh"
#include "int8/launch.cuh"

namespace scaled_mm::grouped {

// A kernel, and how many of its thread blocks an SM of each device takes.
class PersistentKernel {
public:
  template <class... Params>
  PersistentKernel(void (*kernel)(Params...), int threads, int shared_memory) : kernel_(kernel), threads_(threads), shared_memory_(shared_memory) {}

  scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    if (scaledMMStatus_t status = prepare_kernel(kernel_, shared_memory_, device, message, size)) return status;
    CurrentDevice current(device);
    if (current.error()) return cuda_failure(current.error(), "cudaSetDevice", message, size);
    int blocks = 0;
    if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel_.symbol(), threads_, size_t(shared_memory_))) {
      cudaGetLastError();
      return cuda_failure(error, "cudaOccupancyMaxActiveBlocksPerMultiprocessor", message, size);
    }
    blocks_[device % kDevices].store(blocks > 0 ? blocks : 1, std::memory_order_relaxed);
    return SCALED_MM_STATUS_SUCCESS;
  }

  // dependent: the kernel waits for the preceding one itself.
  scaledMMStatus_t launch(const GemmLaunch& l, int64_t tile_m, int64_t tile_n, void* problem, char* message, size_t size, bool dependent = false) {
    // Coordinates and numbers of tiles are 32-bit. The walk may ask for a tile one grid past the last.
    const int64_t tiles_n = (l.N + tile_n - 1) / tile_n, tiles_m = most_tiles_m(l, tile_m);
    const int64_t running = int64_t(blocks_[l.device % kDevices].load(std::memory_order_relaxed)) * l.multiprocessors;
    if (l.M > INT_MAX - tile_m || l.N > INT_MAX - tile_n || tiles_m > (INT_MAX - running) / tiles_n) {
      snprintf(message, size, "out: expected at most %d rows, columns and tiles of %dx%d, got %lld tokens, %lld experts, N = %lld", INT_MAX,
               int(tile_m), int(tile_n), static_cast<long long>(l.M), static_cast<long long>(l.groups->experts), static_cast<long long>(l.N));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    // Without experts there are no tiles, but rows to clear.
    const int64_t most = tiles_m * tiles_n > 0 ? tiles_m * tiles_n : 1;
    LaunchShape shape;
    shape.grid = dim3(unsigned(running < most ? running : most));
    shape.block = dim3(unsigned(threads_));
    shape.shared_memory = shared_memory_;
    shape.dependent = dependent;
    void* pointers[] = {problem};
    return launch_kernel(kernel_, shape, pointers, l, message, size);
  }

private:
  static constexpr int kDevices = 64;
  DeviceKernel kernel_;
  int threads_, shared_memory_;
  std::atomic<int> blocks_[kDevices] = {};
};

} // namespace scaled_mm::grouped
