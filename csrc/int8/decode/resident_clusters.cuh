// How many clusters of a kernel a GPU holds at once: what a persistent kernel launches. Asked for once a device.
#pragma once

#include "int8/launch.cuh"

namespace scaled_mm::decode {

class ResidentClusters {
public:
  // shape: of a launch of one cluster. The kernel has been prepared on the device.
  scaledMMStatus_t find(DeviceKernel& kernel, const LaunchShape& shape, int device, int* clusters, char* message, size_t size) {
    std::atomic<int>* kept = device >= 0 && device < kDevices ? &clusters_[device] : nullptr;
    *clusters = kept ? kept->load(std::memory_order_relaxed) : 0;
    if (*clusters > 0) return SCALED_MM_STATUS_SUCCESS;
    CurrentDevice current(device);
    if (current.error()) return cuda_failure(current.error(), "cudaSetDevice", message, size);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
    cudaLaunchConfig_t config = {};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = size_t(shape.shared_memory);
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaError_t error = cudaOccupancyMaxActiveClusters(clusters, kernel.symbol(), &config)) {
      cudaGetLastError();
      return cuda_failure(error, "cudaOccupancyMaxActiveClusters", message, size);
    }
    if (*clusters < 1) {
      snprintf(message, size, "the GPU has no room for a cluster of %u blocks of %d bytes of shared memory", shape.cluster.x, shape.shared_memory);
      return SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED;
    }
    if (kept) kept->store(*clusters, std::memory_order_relaxed);
    return SCALED_MM_STATUS_SUCCESS;
  }

private:
  static constexpr int kDevices = 64;
  std::atomic<int> clusters_[kDevices] = {};
};

} // namespace scaled_mm::decode
