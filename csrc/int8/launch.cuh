// Launching with every CUDA status looked at: shared by all kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>

#include "core/kernel_abi.h"

namespace scaled_mm {

inline scaledMMStatus_t cuda_failure(cudaError_t error, const char* call, char* message, size_t size) {
  snprintf(message, size, "%s: %s (%s)", call, cudaGetErrorString(error), cudaGetErrorName(error));
  return SCALED_MM_STATUS_CUDA_ERROR;
}

// Makes a device current for a scope; nothing happens when it already is.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device) {
      error_ = cudaSetDevice(device);
      restore_ = error_ == cudaSuccess;
    }
  }
  ~CurrentDevice() {
    if (restore_) cudaSetDevice(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int previous_ = 0;
  bool restore_ = false;
  cudaError_t error_;
};

// Lets a kernel use `shared_memory` bytes on the device; fails if it has no code for it.
inline scaledMMStatus_t prepare_kernel(const void* kernel, int shared_memory, int device, char* message, size_t size) {
  CurrentDevice current(device);
  if (current.error()) return cuda_failure(current.error(), "cudaSetDevice", message, size);
  cudaFuncAttributes attributes;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) {
    cudaGetLastError();  // not sticky: the next launch must not find it
    return cuda_failure(error, "cudaFuncGetAttributes", message, size);
  }
  if (shared_memory < 48 * 1024) return SCALED_MM_STATUS_SUCCESS;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory)) {
    cudaGetLastError();
    return cuda_failure(error, "cudaFuncSetAttribute", message, size);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

struct LaunchShape {
  dim3 grid, block, cluster = dim3(1, 1, 1);
  int shared_memory = 0;
  // Programmatic dependent launch: the kernel may start while its predecessor ends, and waits for it before it touches memory.
  bool dependent = false;
};

inline scaledMMStatus_t launch_kernel(const void* kernel, const LaunchShape& shape, void** params, const GemmLaunch& args,
                                      char* message, size_t size) {
  CurrentDevice current(args.device);
  if (current.error()) return cuda_failure(current.error(), "cudaSetDevice", message, size);
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = size_t(shape.shared_memory);
  config.stream = static_cast<cudaStream_t>(args.stream);
  config.attrs = attributes;
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  }
  if (shape.dependent) {
    cudaLaunchAttribute& dependent = attributes[config.numAttrs++];
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cudaError_t error = cudaLaunchKernelExC(&config, kernel, params)) {
    cudaGetLastError();
    return cuda_failure(error, "cudaLaunchKernelExC", message, size);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

}  // namespace scaled_mm
