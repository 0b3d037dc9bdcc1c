// What the operators share: torch's tensors as the C interface sees them, its stream and memory, and errors as exceptions.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>

#include "scaled_mm/scaled_mm.h"

// In torch's CUDA library; its header declares it only to programs that are built with CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace scaled_mm_torch {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// scaled_mm/core/dispatcher.py turns this text back into the typed error of the status.
[[noreturn]] inline void raise(scaledMMStatus_t status, const std::string& message) {
  throw std::runtime_error("[scaled_mm status " + std::to_string(int(status)) + "] " + message);
}

inline void check(scaledMMStatus_t status) {
  if (status != SCALED_MM_STATUS_SUCCESS) raise(status, scaledMMGetLastErrorMessage());
}

inline void check_torch(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) raise(SCALED_MM_STATUS_INTERNAL_ERROR, std::string("torch: ") + what + " failed");
}

inline int32_t to_dtype(int32_t torch_dtype) {
  // c10::ScalarType's numbers, which are part of torch's serialised formats.
  switch (torch_dtype) {
  case 1: return SCALED_MM_DTYPE_INT8;
  case 3: return SCALED_MM_DTYPE_INT32;
  case 4: return SCALED_MM_DTYPE_INT64;
  case 5: return SCALED_MM_DTYPE_FLOAT16;
  case 6: return SCALED_MM_DTYPE_FLOAT32;
  case 15: return SCALED_MM_DTYPE_BFLOAT16;
  default: return -1;
  }
}

// What torch calls the dtypes that come by mistake most often.
inline const char* dtype_text(int32_t torch_dtype) {
  constexpr const char* kNames[] = {"uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"};
  return torch_dtype >= 0 && torch_dtype < 8 ? kNames[torch_dtype] : "another dtype";
}

// An argument as the C interface sees it.
struct Argument {
  scaledMMTensorDesc_t desc;
  void* data = nullptr;
  bool present = false;

  const scaledMMTensorDesc_t* get() const { return present ? &desc : nullptr; }
};

// torch lets None through where a schema says Tensor.
inline void check_defined(const char* name, AtenTensorHandle handle) {
  bool defined = false;
  check_torch(aoti_torch_is_defined(handle, &defined), "is_defined");
  if (!defined) raise(SCALED_MM_STATUS_NULL_POINTER, std::string(name) + ": expected a tensor, got None");
}

inline Argument argument(const char* name, const Tensor& tensor, int32_t device) {
  Argument result;
  AtenTensorHandle handle = tensor.get();
  check_defined(name, handle);
  int32_t device_type = 0, device_index = 0;
  check_torch(aoti_torch_get_device_type(handle, &device_type), "get_device_type");
  check_torch(aoti_torch_get_device_index(handle, &device_index), "get_device_index");
  static const int32_t cuda = aoti_torch_device_type_cuda();
  if (device_type != cuda || device_index != device) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_DEVICE,
          std::string(name) + ": expected a tensor on cuda:" + std::to_string(device) + ", got one on " +
              (device_type == cuda ? "cuda:" + std::to_string(device_index) : std::string("another kind of device")));
  }
  int64_t ndim = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;
  check_torch(aoti_torch_get_dim(handle, &ndim), "get_dim");
  check_torch(aoti_torch_get_sizes(handle, &sizes), "get_sizes");
  check_torch(aoti_torch_get_strides(handle, &strides), "get_strides");
  check_torch(aoti_torch_get_dtype(handle, &dtype), "get_dtype");
  check_torch(aoti_torch_get_data_ptr(handle, &result.data), "get_data_ptr");
  result.present = true;
  result.desc.flags = 0;
  result.desc.dtype = to_dtype(dtype);
  result.desc.ndim = int32_t(ndim);
  for (int i = 0; i < ndim && i < SCALED_MM_MAX_DIMS; ++i) {
    result.desc.shape[i] = sizes[i];
    result.desc.strides[i] = strides[i];
  }
  const uint64_t address = reinterpret_cast<uintptr_t>(result.data);
  const uint64_t lowest_bit = address & (~address + 1);
  result.desc.alignment = address == 0 || lowest_bit > 16 ? 16 : int64_t(lowest_bit);
  return result;
}

inline Argument argument(const char* name, const OptionalTensor& tensor, int32_t device) {
  return tensor.has_value() ? argument(name, *tensor, device) : Argument{};
}

inline std::string list_text(const int64_t* values, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

inline void check_contiguous(const char* name, const Tensor& tensor) {
  if (tensor.is_contiguous()) return;
  int64_t ndim = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  check_torch(aoti_torch_get_dim(tensor.get(), &ndim), "get_dim");
  check_torch(aoti_torch_get_sizes(tensor.get(), &sizes), "get_sizes");
  check_torch(aoti_torch_get_strides(tensor.get(), &strides), "get_strides");
  raise(SCALED_MM_STATUS_BAD_TENSOR_STRIDES,
        std::string(name) + ": expected a contiguous tensor, got strides " + list_text(strides, ndim) + " for shape " + list_text(sizes, ndim));
}

inline int32_t device_of(const Tensor& a, const char* name = "a") {
  int32_t device_type = 0, device = 0;
  check_defined(name, a.get());
  check_torch(aoti_torch_get_device_type(a.get(), &device_type), "get_device_type");
  check_torch(aoti_torch_get_device_index(a.get(), &device), "get_device_index");
  if (device_type != aoti_torch_device_type_cuda()) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_DEVICE,
          std::string(name) + ": expected a CUDA tensor as another argument is, got one on another kind of device");
  }
  return device;
}

// One handle per device, made on first use and kept: it holds no GPU resources.
inline scaledMMHandle_t handle_of(int32_t device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<scaledMMHandle_t> handles[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) raise(SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED, "device: index out of range");
  scaledMMHandle_t handle = handles[device].load(std::memory_order_acquire);
  if (handle == nullptr) {
    check(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, device, nullptr));
    scaledMMHandle_t expected = nullptr;
    if (!handles[device].compare_exchange_strong(expected, handle)) { // another thread was first
      check(scaledMMDestroyHandle(handle));
      handle = expected;
    }
  }
  return handle;
}

inline Tensor empty(int ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device) {
  AtenTensorHandle made = nullptr;
  check_torch(aoti_torch_empty_strided(ndim, sizes, strides, dtype, aoti_torch_device_type_cuda(), device, &made), "empty_strided");
  return Tensor(made);
}

inline void* current_stream(int32_t device) {
  void* stream = nullptr;
  check_torch(aoti_torch_get_current_cuda_stream(device, &stream), "get_current_cuda_stream");
  return stream;
}

} // namespace scaled_mm_torch
