// Launching with every CUDA status looked at: shared by all kernels.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>

#include "core/kernel_abi.h"

namespace scaled_mm {

inline scaledMMStatus_t cuda_failure(cudaError_t error, const char* call, char* message, size_t size) {
  snprintf(message, size, "%s: %s (%s)", call, cudaGetErrorString(error), cudaGetErrorName(error));
  return SCALED_MM_STATUS_CUDA_ERROR;
}

// A function of the driver library, looked up once: kernels link the runtime alone.
template <class Function>
struct DriverFunction {
  const char* name;
  std::atomic<Function> kept{nullptr};

  explicit constexpr DriverFunction(const char* name) : name(name) {}

  cudaError_t find(Function* found) {
    *found = kept.load(std::memory_order_relaxed);
    if (*found) return cudaSuccess;
    void* address = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    if (cudaError_t error = cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &result)) return error;
#else
    if (cudaError_t error = cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &result)) return error;
#endif
    if (result != cudaDriverEntryPointSuccess) return cudaErrorInsufficientDriver;
    *found = reinterpret_cast<Function>(address);
    kept.store(*found, std::memory_order_relaxed);
    return cudaSuccess;
  }
};

using LaunchFunction = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);
using GetContextFunction = CUresult (*)(CUcontext*);
using SetContextFunction = CUresult (*)(CUcontext);
inline DriverFunction<LaunchFunction> driver_launch("cuLaunchKernelEx");
inline DriverFunction<GetContextFunction> driver_get_context("cuCtxGetCurrent");
inline DriverFunction<SetContextFunction> driver_set_context("cuCtxSetCurrent");

// Makes a device current for a scope; nothing happens when it already is. A thread that has done nothing with CUDA yet gets its
// context here: the driver's calls (launches, tensor maps) need one, and only the runtime's make one. Afterwards the thread has the
// context that it came with, be it the device's own or another; one that came with none has its device back, with a context.
class CurrentDevice {
public:
  explicit CurrentDevice(int device) {
    GetContextFunction get_context = nullptr;
    if ((error_ = cudaGetDevice(&previous_)) != cudaSuccess || (error_ = driver_get_context.find(&get_context)) != cudaSuccess) return;
    error_ = static_cast<cudaError_t>(get_context(&context_)); // one numbering for both
    if (error_ != cudaSuccess || (previous_ == device && context_ != nullptr)) return;
    error_ = cudaSetDevice(device);
    restore_ = error_ == cudaSuccess && previous_ != device;
  }
  ~CurrentDevice() {
    SetContextFunction set_context = nullptr;
    if (!restore_) return;
    if (context_ == nullptr || driver_set_context.find(&set_context) != cudaSuccess || set_context(context_) != CUDA_SUCCESS) {
      cudaSetDevice(previous_);
    }
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  cudaError_t error() const { return error_; }

private:
  int previous_ = 0;
  CUcontext context_ = nullptr;
  bool restore_ = false;
  cudaError_t error_;
};

// A kernel and the driver's handle of it on each device, looked up once: a launch through the runtime looks it up every
// time, which took 1.7 of 4.1 us on the host (docs/decisions/0003).
class DeviceKernel {
public:
  template <class... Params>
  explicit DeviceKernel(void (*kernel)(Params...)) : symbol_(reinterpret_cast<const void*>(kernel)) {}

  const void* symbol() const { return symbol_; }

  // Of the current device, whose number is `device`.
  cudaError_t function(int device, cudaFunction_t* found) {
    std::atomic<cudaFunction_t>* kept = device >= 0 && device < kDevices ? &functions_[device] : nullptr;
    *found = kept ? kept->load(std::memory_order_relaxed) : nullptr;
    if (*found) return cudaSuccess;
    const cudaError_t error = cudaGetFuncBySymbol(found, symbol_);
    if (error == cudaSuccess && kept) kept->store(*found, std::memory_order_relaxed);
    return error;
  }

private:
  static constexpr int kDevices = 64;
  const void* symbol_;
  std::atomic<cudaFunction_t> functions_[kDevices] = {};
};

// Lets a kernel use `shared_memory` bytes on the device; fails if it has no code for it.
inline scaledMMStatus_t prepare_kernel(DeviceKernel& kernel, int shared_memory, int device, char* message, size_t size) {
  CurrentDevice current(device);
  if (current.error()) return cuda_failure(current.error(), "cudaSetDevice", message, size);
  cudaFunction_t function;
  if (cudaError_t error = kernel.function(device, &function)) {
    cudaGetLastError(); // not sticky: the next launch must not find it
    return cuda_failure(error, "cudaGetFuncBySymbol", message, size);
  }
  if (shared_memory < 48 * 1024) return SCALED_MM_STATUS_SUCCESS;
  if (cudaError_t error = cudaFuncSetAttribute(kernel.symbol(), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory)) {
    cudaGetLastError();
    return cuda_failure(error, "cudaFuncSetAttribute", message, size);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

struct LaunchShape {
  dim3 grid, block, cluster = dim3(1, 1, 1);
  int shared_memory = 0;
  // Programmatic dependent launch: the kernel may start while its predecessor ends. Only constant weights may be read before it waits for it.
  bool dependent = false;
};

inline scaledMMStatus_t launch_kernel(DeviceKernel& kernel, const LaunchShape& shape, void** params, const GemmLaunch& args, char* message,
                                      size_t size) {
  CurrentDevice current(args.device);
  if (current.error()) return cuda_failure(current.error(), "cudaSetDevice", message, size);
  cudaFunction_t function;
  LaunchFunction launch = nullptr;
  cudaError_t error = kernel.function(args.device, &function);
  if (error == cudaSuccess) error = driver_launch.find(&launch);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return cuda_failure(error, "looking up the kernel", message, size);
  }
  CUlaunchAttribute attributes[2];
  CUlaunchConfig config = {};
  config.gridDimX = shape.grid.x;
  config.gridDimY = shape.grid.y;
  config.gridDimZ = shape.grid.z;
  config.blockDimX = shape.block.x;
  config.blockDimY = shape.block.y;
  config.blockDimZ = shape.block.z;
  config.sharedMemBytes = unsigned(shape.shared_memory);
  config.hStream = static_cast<CUstream>(args.stream);
  config.attrs = attributes;
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z > 1) {
    CUlaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  }
  if (shape.dependent) {
    CUlaunchAttribute& dependent = attributes[config.numAttrs++];
    dependent.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    dependent.value.programmaticStreamSerializationAllowed = 1;
  }
  const CUresult result = launch(&config, reinterpret_cast<CUfunction>(function), params, nullptr);
  if (result != CUDA_SUCCESS) {
    return cuda_failure(static_cast<cudaError_t>(result), "cuLaunchKernelEx", message, size);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace scaled_mm
