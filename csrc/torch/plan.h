// A product of any kind over the C interface: planned, calculated and forgotten, or calculated by a descriptor.
#pragma once

#include "torch/tensors.h"

namespace scaled_mm_torch {

// out and the inputs of a kind, in the order of the C interface.
struct Operands {
  Argument arguments[SCALED_MM_MAX_OPERANDS];
  int32_t count = 0;

  void push(const Argument& argument) { arguments[count++] = argument; }
};

inline Tensor empty_workspace(size_t bytes, int32_t device) {
  const int64_t size = int64_t(bytes), stride = 1;
  return empty(1, &size, &stride, /* int8 */ 1, device);
}

inline void calculate(scaledMMDescriptor_t descriptor, int32_t product, const Operands& o, void* workspace, size_t bytes, void* stream) {
  const void* pointers[SCALED_MM_MAX_OPERANDS];
  for (int32_t i = 0; i < o.count; ++i) pointers[i] = o.arguments[i].data;
  check(scaledMMCalculate(descriptor, product, workspace, bytes, pointers, o.count, stream));
}

inline void run_once(int32_t product, const Operands& o, int32_t option, int32_t device) {
  const scaledMMTensorDesc_t* descs[SCALED_MM_MAX_OPERANDS];
  for (int32_t i = 0; i < o.count; ++i) descs[i] = o.arguments[i].get();
  scaledMMDescriptor_t descriptor = nullptr;
  check(scaledMMCreateDescriptor(handle_of(device), &descriptor, product, descs, o.count, option, nullptr));
  struct Owner {
    scaledMMDescriptor_t descriptor;
    ~Owner() { scaledMMDestroyDescriptor(descriptor); }
  } owner{descriptor};
  size_t bytes = 0;
  check(scaledMMGetWorkspaceSize(descriptor, &bytes));
  void* stream = current_stream(device);
  if (bytes == 0) return calculate(descriptor, product, o, nullptr, 0, stream);
  const Tensor workspace = empty_workspace(bytes, device);
  calculate(descriptor, product, o, workspace.data_ptr(), bytes, stream);
}

// A live descriptor that came as an integer.
struct Planned {
  scaledMMDescriptor_t descriptor;
  int32_t device = 0;

  explicit Planned(int64_t address) : descriptor(reinterpret_cast<scaledMMDescriptor_t>(address)) {
    int32_t device_type = 0;
    check(scaledMMGetDevice(descriptor, &device_type, &device));
  }

  // stream: a cudaStream_t, or -1 for the current one.
  void calculate(int32_t product, const Operands& o, const OptionalTensor& workspace, int64_t stream) const {
    const scaledMMTensorDesc_t* descs[SCALED_MM_MAX_OPERANDS];
    for (int32_t i = 0; i < o.count; ++i) descs[i] = o.arguments[i].get();
    check(scaledMMCheckTensors(descriptor, product, descs, o.count));
    size_t bytes = 0;
    void* memory = nullptr;
    if (workspace.has_value()) {
      const Argument given = argument("workspace", *workspace, device);
      check_contiguous("workspace", *workspace);
      memory = given.data;
      bytes = size_t(workspace->numel()) * workspace->element_size();
    }
    scaled_mm_torch::calculate(descriptor, product, o, memory, bytes, stream == -1 ? current_stream(device) : reinterpret_cast<void*>(stream));
  }
};

} // namespace scaled_mm_torch
