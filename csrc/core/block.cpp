// The descriptor of a block product: planned once, as descriptor.cpp plans the plain one.
#include <utility>

#include "core/block_info.h"
#include "core/handle.h"
#include "core/row_choice.h"
#include "core/status.h"

using namespace scaled_mm;

namespace {
constexpr int kTensors = 4;
constexpr const char* kNames[kTensors] = {"out", "weight", "activation", "bias"};
constexpr int kWeight = 1;
}  // namespace

struct scaledMMBlockGemmDescriptor : RowChoice {
  static constexpr ObjectKind kObject = kBlockObject;

  scaledMMHandleInfo_t device;  // a copy: the handle may be destroyed before the descriptor
  BlockInfo info;
  GemmLaunch launch;  // everything but the pointers

  const Kernel* kernel = nullptr;
  size_t workspace_size = 0;

  scaledMMTensorDesc_t tensors[kTensors];  // it was created with; ndim -1 marks an absent one
};

namespace {

constexpr const char* kKind = "block ";  // in messages

// Of a bucket that was chosen: the mode, which AUTO leaves open, is part of why.
const char* kind_of(const BlockInfo& info) { return info.mode == SCALED_MM_BLOCK_W4A8 ? "block w4a8 " : "block w4a16 "; }

// To a launch the activations are a, and the weight is b: M and N change places.
void fill_launch(scaledMMBlockGemmDescriptor* d) {
  const BlockInfo& info = d->info;
  GemmLaunch& l = d->launch;
  l = GemmLaunch{};
  l.batch = 1;
  l.M = info.N;
  l.N = info.M;
  l.K = info.K;
  l.a_stride_m = info.activation_stride_n;
  l.a_stride_k = info.activation_stride_k;
  l.b_stride_n = info.weight_stride_m;
  l.b_stride_k = info.weight_stride_k;
  l.out_stride_m = info.out_stride_n;
  l.out_stride_n = info.out_stride_m;
  l.constant_b = info.constant_weight;
  l.bias_stride = info.bias_stride;
  l.bias_dtype = info.bias_dtype;
  l.blocks = &info.operands;
  l.device = d->device.device_id;
  l.multiprocessors = d->device.multiprocessors;
}

scaledMMStatus_t plan(scaledMMHandle_t handle, const char* forced, scaledMMBlockGemmDescriptor* d) {
  d->device = handle->info;
  fill_launch(d);
  if (handle->info.device_type == SCALED_MM_DEVICE_CPU) {
    if (forced != nullptr) return fail(SCALED_MM_STATUS_BAD_PARAM, "kernel: expected none on a CPU, got %s", forced);
    return SCALED_MM_STATUS_SUCCESS;
  }
  if (scaledMMStatus_t s = require_table(handle->arch, &d->table, SCALED_MM_TABLE_BLOCK_GEMM)) return s;
  BlockInfo& info = d->info;
  if (info.mode == SCALED_MM_BLOCK_AUTO) info.set_mode(d->table->find_mode(info.N));
  const int32_t serves = info.mode == SCALED_MM_BLOCK_W4A8 ? SCALED_MM_BUCKET_Q8_1 : 0;
  const auto misfit_of = [](const RowNeeds&) -> const char* { return nullptr; };  // a block row takes any operands
  if (scaledMMStatus_t s = d->choose(forced, kKind, info.N, info.M, info.K, serves, misfit_of)) return s;
  if (info.M == 0 || info.N == 0) return SCALED_MM_STATUS_SUCCESS;  // nothing will be launched
  const int32_t format = info.operands.format;
  if (scaledMMStatus_t s = require_kernel(handle->arch, d->row->name.c_str(), format, handle->info.device_id,
                                          handle->info.max_shared_memory, &d->row->slots[format], &d->kernel)) return s;
  if (d->kernel->block_workspace_size) {
    const GemmLaunch& l = d->launch;
    const int64_t matrices[][2] = {{l.M, l.N}, {l.M, l.K}, {l.N, l.K}};
    for (const auto& [rows, columns] : matrices) {
      if (scaledMMStatus_t s = check_workspace_room(d->kernel->row, {rows, columns})) return s;
    }
    d->workspace_size = size_t(d->kernel->block_workspace_size(l.M, l.N, l.K, info.operands, l.multiprocessors));
  }
  return SCALED_MM_STATUS_SUCCESS;
}

// A packed weight has no strides.
scaledMMTensorDesc_t without_unread_strides(scaledMMTensorDesc_t t) {
  if (t.flags & SCALED_MM_TENSOR_PACKED) {
    for (int64_t& stride : t.strides) stride = 0;
  }
  return t;
}

struct Memory {
  const char* name;
  const void* pointer;
  int64_t bytes, alignment;
  bool wanted;

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(pointer); }
  bool overlaps(const Memory& other) const {
    return address() < other.address() + uintptr_t(other.bytes) && other.address() < address() + uintptr_t(bytes);
  }
};

scaledMMStatus_t check_pointers(const Memory (&tensors)[kTensors]) {
  const Memory& out = tensors[0];
  for (const Memory& t : tensors) {
    if (!t.wanted) {
      if (t.pointer) return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected null, as the descriptor was created without it, got a pointer", t.name);
      continue;
    }
    if (t.pointer == nullptr && t.bytes > 0) return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected a data pointer, got null", t.name);
    if (t.address() % t.alignment) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT, "%s: expected a data pointer aligned to %lld bytes as the descriptor says, got %p",
                  t.name, static_cast<long long>(t.alignment), t.pointer);
    }
    if (&t != &out && t.overlaps(out)) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "out: expected memory apart from every input, got an overlap with %s", t.name);
    }
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_workspace(const Memory& workspace, size_t size, const Memory (&tensors)[kTensors]) {
  if (workspace.pointer == nullptr || size < size_t(workspace.bytes)) {
    return fail(SCALED_MM_STATUS_INSUFFICIENT_WORKSPACE, "workspace: expected at least %lld bytes, got %zu",
                static_cast<long long>(workspace.bytes), workspace.pointer ? size : size_t(0));
  }
  if (workspace.address() % workspace.alignment) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT, "workspace: expected a pointer aligned to %lld bytes, got %p",
                static_cast<long long>(workspace.alignment), workspace.pointer);
  }
  for (const Memory& t : tensors) {
    if (t.wanted && t.overlaps(workspace)) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "workspace: expected memory apart from every tensor, got an overlap with %s", t.name);
    }
  }
  return SCALED_MM_STATUS_SUCCESS;
}

}  // namespace

scaledMMStatus_t scaledMMCreateBlockGemmDescriptor(
    scaledMMHandle_t handle, scaledMMBlockGemmDescriptor_t* descriptor, const scaledMMTensorDesc_t* out,
    const scaledMMTensorDesc_t* weight, const scaledMMTensorDesc_t* activation, const scaledMMTensorDesc_t* bias,
    int32_t mode, const char* kernel) try {
  if (descriptor == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "descriptor: expected a place to write to, got a null pointer");
  *descriptor = nullptr;
  if (scaledMMStatus_t status = check_object("handle", handle)) return status;
  auto made = make_object<scaledMMBlockGemmDescriptor>();
  if (made == nullptr) return fail(SCALED_MM_STATUS_INTERNAL_ERROR, "descriptor: out of host memory");
  const scaledMMTensorDesc_t* tensors[kTensors] = {out, weight, activation, bias};
  for (int i = 0; i < kTensors; ++i) {
    if (tensors[i]) made->tensors[i] = without_unread_strides(*tensors[i]);
    else made->tensors[i].ndim = -1;
  }
  const scaledMMTensorDesc_t* planned = weight ? &made->tensors[1] : nullptr;  // kNames: the weight, whose strides may not be read
  scaledMMStatus_t status = make_block_info({out, planned, activation, bias}, mode, &made->info);
  if (status == SCALED_MM_STATUS_SUCCESS) status = plan(handle, kernel, made.get());
  if (status == SCALED_MM_STATUS_SUCCESS) *descriptor = publish(std::move(made));
  return status;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMGetBlockGemmWorkspaceSize(scaledMMBlockGemmDescriptor_t d, size_t* bytes) {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (bytes == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "bytes: expected a place to write to, got a null pointer");
  *bytes = d->workspace_size;
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMGetBlockGemmDevice(scaledMMBlockGemmDescriptor_t d, int32_t* device_type, int32_t* device_id) {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (device_type == nullptr || device_id == nullptr) {
    return fail(SCALED_MM_STATUS_NULL_POINTER, "device_type, device_id: expected places to write to, got a null pointer");
  }
  *device_type = d->device.device_type;
  *device_id = d->device.device_id;
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMGetBlockGemmKernel(scaledMMBlockGemmDescriptor_t d, scaledMMKernelChoice_t* choice) try {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (choice == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "choice: expected a place to write to, got a null pointer");
  d->describe(kind_of(d->info), choice);
  return SCALED_MM_STATUS_SUCCESS;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMCheckBlockGemmTensors(scaledMMBlockGemmDescriptor_t d, const scaledMMTensorDesc_t* out,
                                               const scaledMMTensorDesc_t* weight, const scaledMMTensorDesc_t* activation,
                                               const scaledMMTensorDesc_t* bias) try {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  const scaledMMTensorDesc_t* tensors[kTensors] = {out, weight, activation, bias};
  for (int i = 0; i < kTensors; ++i) {
    const scaledMMTensorDesc_t* expected = d->tensors[i].ndim < 0 ? nullptr : &d->tensors[i];
    const scaledMMTensorDesc_t got = tensors[i] ? without_unread_strides(*tensors[i]) : scaledMMTensorDesc_t{};
    if (i == kWeight && tensors[i] && (got.flags ^ expected->flags) & SCALED_MM_TENSOR_PACKED) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "weight: expected %s as the descriptor was created, got %s",
                  d->info.operands.packed ? "packed tiles" : "blocks", d->info.operands.packed ? "blocks" : "packed tiles");
    }
    if (scaledMMStatus_t status = check_same(kNames[i], expected, tensors[i] ? &got : nullptr)) return status;
  }
  return SCALED_MM_STATUS_SUCCESS;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMCalculateBlockGemm(scaledMMBlockGemmDescriptor_t d, void* workspace, size_t workspace_size, void* out,
                                            const void* weight, const void* activation, const void* bias, void* stream) {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  const BlockInfo& info = d->info;
  const Memory tensors[kTensors] = {
      {"out", out, info.bytes.out, dtype_bytes(info.operands.out_dtype), true},
      {"weight", weight, info.bytes.weight, info.weight_alignment, true},
      {"activation", activation, info.bytes.activation, dtype_bytes(info.operands.activation), true},
      {"bias", bias, info.bytes.bias, info.has_bias ? dtype_bytes(info.bias_dtype) : 1, info.has_bias},
  };
  if (scaledMMStatus_t status = check_pointers(tensors)) return status;
  if (d->device.device_type == SCALED_MM_DEVICE_CPU) {
    return fail(SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED,
                "handle: the C library launches on CUDA devices; on a CPU use the backend of the scaled_mm Python package");
  }
  if (info.M == 0 || info.N == 0) return SCALED_MM_STATUS_SUCCESS;

  GemmLaunch launch = d->launch;
  if (d->workspace_size) {
    const Memory memory = {"workspace", workspace, int64_t(d->workspace_size), 16, true};
    if (scaledMMStatus_t status = check_workspace(memory, workspace_size, tensors)) return status;
    launch.workspace = workspace;
  }
  launch.a = activation;
  launch.b = weight;
  launch.out = out;
  launch.bias = bias;
  launch.stream = stream;
  char message[512] = "";
  if (scaledMMStatus_t status = d->kernel->launch(launch, message, sizeof(message))) {
    return fail(status, "launch of %s on device %d: %s", d->kernel->row, int(launch.device), message);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMDestroyBlockGemmDescriptor(scaledMMBlockGemmDescriptor_t d) {
  return destroy_object("descriptor", d);
}
