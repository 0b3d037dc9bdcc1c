// The descriptor of a grouped product: planned once, as descriptor.cpp plans the plain one.
#include <algorithm>
#include <utility>

#include "core/grouped_info.h"
#include "core/handle.h"
#include "core/row_choice.h"
#include "core/status.h"

using namespace scaled_mm;

namespace {
constexpr int kTensors = 7;
constexpr const char* kNames[kTensors] = {"out", "a", "b", "a_scale", "b_scale", "bias", "expert_offsets"};
}  // namespace

struct scaledMMGroupedGemmDescriptor : RowChoice {
  static constexpr ObjectKind kObject = kGroupedObject;

  scaledMMHandleInfo_t device;  // a copy: the handle may be destroyed before the descriptor
  GroupedInfo info;
  GemmLaunch launch;  // everything but the pointers

  const Kernel* kernel = nullptr;
  size_t workspace_size = 0;

  scaledMMTensorDesc_t tensors[kTensors];  // it was created with; ndim -1 marks an absent one
};

namespace {

constexpr const char* kKind = "grouped ";  // in messages

void fill_launch(scaledMMGroupedGemmDescriptor* d) {
  const GemmInfo& info = d->info.gemm;
  GemmLaunch& l = d->launch;
  l = GemmLaunch{};
  l.batch = 1;
  l.M = info.M;
  l.N = info.N;
  l.K = info.K;
  l.a_stride_m = info.a_stride_m;
  l.a_stride_k = info.a_stride_k;
  l.b_stride_k = info.b_stride_k;
  l.b_stride_n = info.b_stride_n;
  l.out_stride_m = info.out_stride_m;
  l.out_stride_n = info.out_stride_n;
  l.a_scale_stride = info.a_scale_stride;
  l.b_scale_stride = info.b_scale_stride;
  l.bias_stride = info.bias_stride;
  l.bias_dtype = info.bias_dtype;
  l.device = d->device.device_id;
  l.multiprocessors = d->device.multiprocessors;
}

scaledMMStatus_t plan(scaledMMHandle_t handle, const char* forced, scaledMMGroupedGemmDescriptor* d) {
  d->device = handle->info;
  fill_launch(d);
  if (handle->info.device_type == SCALED_MM_DEVICE_CPU) {
    if (forced != nullptr) return fail(SCALED_MM_STATUS_BAD_PARAM, "kernel: expected none on a CPU, got %s", forced);
    return SCALED_MM_STATUS_SUCCESS;
  }
  if (scaledMMStatus_t s = require_table(handle->arch, &d->table, SCALED_MM_TABLE_GROUPED_GEMM)) return s;
  const auto misfit_of = [d](const RowNeeds& needs) { return misfit(d->info, needs); };
  if (scaledMMStatus_t s = d->choose(forced, kKind, d->info.rows_per_expert(), d->info.gemm.N, d->info.gemm.K, false, misfit_of)) return s;
  const GemmInfo& info = d->info.gemm;
  if (info.M == 0 || info.N == 0) return SCALED_MM_STATUS_SUCCESS;  // nothing will be launched
  if (scaledMMStatus_t s = require_kernel(handle->arch, d->row->name.c_str(), info.out_dtype, handle->info.device_id,
                                          handle->info.max_shared_memory, &d->row->slots[info.out_dtype], &d->kernel)) return s;
  if (d->kernel->grouped_workspace_size) {
    d->workspace_size = size_t(d->kernel->grouped_workspace_size(d->info.experts, d->device.multiprocessors));
  }
  return SCALED_MM_STATUS_SUCCESS;
}

struct Operand {
  const char* name;
  const void* pointer;
  int64_t bytes;
  bool wanted;
  int64_t alignment;
};

// `memory`, of `size` bytes, is written to: no input may lie in it.
scaledMMStatus_t check_apart(const char* name, const void* memory, size_t size, const Operand (&inputs)[kTensors - 1]) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  for (const Operand& input : inputs) {
    const auto other = reinterpret_cast<uintptr_t>(input.pointer);
    if (input.wanted && other < begin + size && begin < other + uintptr_t(input.bytes)) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected memory apart from every input, got an overlap with %s", name, input.name);
    }
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_pointers(const scaledMMGroupedGemmDescriptor& d, void* out, const Operand (&inputs)[kTensors - 1]) {
  const GemmInfo& info = d.info.gemm;
  if (out == nullptr && info.bytes.out > 0) return fail(SCALED_MM_STATUS_NULL_POINTER, "out: expected a data pointer, got null");
  const auto address = reinterpret_cast<uintptr_t>(out);
  const int64_t alignment = std::max<int64_t>(d.needs.align_out, dtype_bytes(info.out_dtype));
  if (address % alignment) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT,
                "out: expected a data pointer aligned to %d bytes as the descriptor says, got %p", int(alignment), out);
  }
  for (const Operand& input : inputs) {
    if (!input.wanted) {
      if (input.pointer) return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected null, as the descriptor was created without it, got a pointer", input.name);
      continue;
    }
    if (input.pointer == nullptr && input.bytes > 0) {
      return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected a data pointer, got null", input.name);
    }
    if (reinterpret_cast<uintptr_t>(input.pointer) % input.alignment) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT,
                  "%s: expected a data pointer aligned to %lld bytes as the descriptor says, got %p", input.name,
                  static_cast<long long>(input.alignment), input.pointer);
    }
  }
  return check_apart("out", out, size_t(info.bytes.out), inputs);
}

scaledMMStatus_t check_workspace(const scaledMMGroupedGemmDescriptor& d, const void* workspace, size_t size, const void* out,
                                 const Operand (&inputs)[kTensors - 1]) {
  if (d.workspace_size == 0) return SCALED_MM_STATUS_SUCCESS;
  if (workspace == nullptr || size < d.workspace_size) {
    return fail(SCALED_MM_STATUS_INSUFFICIENT_WORKSPACE, "workspace: expected at least %zu bytes, got %zu", d.workspace_size,
                workspace ? size : size_t(0));
  }
  const auto begin = reinterpret_cast<uintptr_t>(workspace), other = reinterpret_cast<uintptr_t>(out);
  if (begin % 16) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT, "workspace: expected a pointer aligned to 16 bytes, got %p", workspace);
  }
  if (other < begin + d.workspace_size && begin < other + uintptr_t(d.info.gemm.bytes.out)) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "workspace: expected memory apart from every tensor, got an overlap with out");
  }
  return check_apart("workspace", workspace, d.workspace_size, inputs);
}

}  // namespace

scaledMMStatus_t scaledMMCreateGroupedGemmDescriptor(
    scaledMMHandle_t handle, scaledMMGroupedGemmDescriptor_t* descriptor, const scaledMMTensorDesc_t* out,
    const scaledMMTensorDesc_t* a, const scaledMMTensorDesc_t* b, const scaledMMTensorDesc_t* a_scale,
    const scaledMMTensorDesc_t* b_scale, const scaledMMTensorDesc_t* bias, const scaledMMTensorDesc_t* expert_offsets,
    const char* kernel) try {
  if (descriptor == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "descriptor: expected a place to write to, got a null pointer");
  *descriptor = nullptr;
  if (scaledMMStatus_t status = check_object("handle", handle)) return status;
  auto made = make_object<scaledMMGroupedGemmDescriptor>();
  if (made == nullptr) return fail(SCALED_MM_STATUS_INTERNAL_ERROR, "descriptor: out of host memory");
  const scaledMMTensorDesc_t* tensors[kTensors] = {out, a, b, a_scale, b_scale, bias, expert_offsets};
  for (int i = 0; i < kTensors; ++i) {
    if (tensors[i]) made->tensors[i] = *tensors[i];
    else made->tensors[i].ndim = -1;
  }
  scaledMMStatus_t status = make_grouped_info({out, a, b, a_scale, b_scale, bias, expert_offsets}, &made->info);
  if (status == SCALED_MM_STATUS_SUCCESS) status = plan(handle, kernel, made.get());
  if (status == SCALED_MM_STATUS_SUCCESS) *descriptor = publish(std::move(made));
  return status;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMGetGroupedGemmWorkspaceSize(scaledMMGroupedGemmDescriptor_t d, size_t* bytes) {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (bytes == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "bytes: expected a place to write to, got a null pointer");
  *bytes = d->workspace_size;
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMGetGroupedGemmDevice(scaledMMGroupedGemmDescriptor_t d, int32_t* device_type, int32_t* device_id) {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (device_type == nullptr || device_id == nullptr) {
    return fail(SCALED_MM_STATUS_NULL_POINTER, "device_type, device_id: expected places to write to, got a null pointer");
  }
  *device_type = d->device.device_type;
  *device_id = d->device.device_id;
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMGetGroupedGemmKernel(scaledMMGroupedGemmDescriptor_t d, scaledMMKernelChoice_t* choice) try {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (choice == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "choice: expected a place to write to, got a null pointer");
  d->describe(kKind, choice);
  return SCALED_MM_STATUS_SUCCESS;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMCheckGroupedGemmTensors(scaledMMGroupedGemmDescriptor_t d, const scaledMMTensorDesc_t* out,
                                                 const scaledMMTensorDesc_t* a, const scaledMMTensorDesc_t* b,
                                                 const scaledMMTensorDesc_t* a_scale, const scaledMMTensorDesc_t* b_scale,
                                                 const scaledMMTensorDesc_t* bias, const scaledMMTensorDesc_t* expert_offsets) try {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  const scaledMMTensorDesc_t* tensors[kTensors] = {out, a, b, a_scale, b_scale, bias, expert_offsets};
  for (int i = 0; i < kTensors; ++i) {
    const scaledMMTensorDesc_t* expected = d->tensors[i].ndim < 0 ? nullptr : &d->tensors[i];
    if (scaledMMStatus_t status = check_same(kNames[i], expected, tensors[i])) return status;
  }
  return SCALED_MM_STATUS_SUCCESS;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMCalculateGroupedGemm(scaledMMGroupedGemmDescriptor_t d, void* workspace, size_t workspace_size, void* out,
                                              const void* a, const void* b, const void* a_scale, const void* b_scale,
                                              const void* bias, const void* expert_offsets, void* stream) {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  const GemmInfo& info = d->info.gemm;
  const Operand inputs[kTensors - 1] = {
      {"a", a, info.bytes.a, true, d->needs.align_a},
      {"b", b, info.bytes.b, true, d->needs.align_b},
      {"a_scale", a_scale, info.bytes.a_scale, info.has_scales, 4},
      {"b_scale", b_scale, info.bytes.b_scale, info.has_scales, 4},
      {"bias", bias, info.bytes.bias, info.has_bias, info.has_bias ? dtype_bytes(info.bias_dtype) : 1},
      {"expert_offsets", expert_offsets, d->info.offsets_bytes, true, 4},
  };
  if (scaledMMStatus_t status = check_pointers(*d, out, inputs)) return status;
  if (d->device.device_type == SCALED_MM_DEVICE_CPU) {
    return fail(SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED,
                "handle: the C library launches on CUDA devices; on a CPU use the backend of the scaled_mm Python package");
  }
  if (info.M == 0 || info.N == 0) return SCALED_MM_STATUS_SUCCESS;
  if (scaledMMStatus_t status = check_workspace(*d, workspace, workspace_size, out, inputs)) return status;

  const Groups groups = {d->info.experts, static_cast<const int32_t*>(expert_offsets), d->info.b_stride, d->info.b_scale_stride,
                         d->info.bias_stride};
  GemmLaunch launch = d->launch;
  launch.a = a;
  launch.b = b;
  launch.out = out;
  launch.a_scale = static_cast<const float*>(a_scale);
  launch.b_scale = static_cast<const float*>(b_scale);
  launch.bias = bias;
  launch.stream = stream;
  launch.workspace = d->workspace_size ? workspace : nullptr;
  launch.groups = &groups;
  char message[512] = "";
  if (scaledMMStatus_t status = d->kernel->launch(launch, message, sizeof(message))) {
    return fail(status, "launch of %s on device %d: %s", d->kernel->row, int(launch.device), message);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMDestroyGroupedGemmDescriptor(scaledMMGroupedGemmDescriptor_t d) {
  return destroy_object("descriptor", d);
}
