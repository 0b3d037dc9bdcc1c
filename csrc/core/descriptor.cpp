// A descriptor is a plan: validated, dispatched and prepared when it is created; calculate only fills in pointers.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <new>
#include <utility>

#include "core/gemm_info.h"
#include "core/handle.h"
#include "core/row_choice.h"
#include "core/status.h"

using namespace scaled_mm;

struct scaledMMGemmDescriptor : RowChoice {
  static constexpr ObjectKind kObject = kGemmObject;

  scaledMMHandleInfo_t device;  // a copy: the handle may be destroyed before the descriptor
  GemmInfo info;
  GemmLaunch launch;  // everything but the pointers

  const Kernel* kernel = nullptr;
  const Kernel* zero_point_terms = nullptr;
  size_t terms_size = 0;      // bytes of the workspace for the zero-point terms, which come first in it
  size_t workspace_size = 0;  // with what the kernel asks for

  // Kept from the second launch on: a plan that runs once has no use for it. Whoever finds it taken launches without.
  std::unique_ptr<LaunchCache> cache;
  std::atomic<bool> cache_taken{false};
  std::atomic<bool> launched{false};

  // The tensors it was created with, in the order of the interface; ndim -1 marks an absent one.
  scaledMMTensorDesc_t tensors[kGemmTensors];
};

namespace {

constexpr const char* kKind = "";  // in messages

void fill_launch(scaledMMGemmDescriptor* d) {
  const GemmInfo& info = d->info;
  GemmLaunch& l = d->launch;
  l = GemmLaunch{};
  l.M = info.M;
  l.N = info.N;
  l.K = info.K;
  l.batch = info.batch;
  l.batch_strides = info.batch_strides;
  l.a_stride_m = info.a_stride_m;
  l.a_stride_k = info.a_stride_k;
  l.b_stride_k = info.b_stride_k;
  l.b_stride_n = info.b_stride_n;
  l.out_stride_m = info.out_stride_m;
  l.out_stride_n = info.out_stride_n;
  l.constant_b = info.constant_b;
  l.a_scale_stride = info.a_scale_stride;
  l.b_scale_stride = info.b_scale_stride;
  l.bias_stride = info.bias_stride;
  l.bias_dtype = info.bias_dtype;
  l.a_zero_point_stride = info.a_zero_point_stride;
  l.b_zero_point_stride = info.b_zero_point_stride;
  l.a_zero_point_dtype = info.a_zero_point_dtype;
  l.b_zero_point_dtype = info.b_zero_point_dtype;
  l.a_row_sums_stride = info.a_row_sums_stride;
  l.b_column_sums_stride = info.b_column_sums_stride;
  l.row_terms_batch_stride = info.row_term_batches() > 1 ? int32_t(info.M) : 0;
  l.col_terms_batch_stride = info.column_term_batches() > 1 ? int32_t(info.N) : 0;
  l.device = d->device.device_id;
  l.multiprocessors = d->device.multiprocessors;
}

scaledMMStatus_t plan(scaledMMHandle_t handle, const char* forced, scaledMMGemmDescriptor* d) {
  d->device = handle->info;
  fill_launch(d);
  if (handle->info.device_type == SCALED_MM_DEVICE_CPU) {
    if (forced != nullptr) return fail(SCALED_MM_STATUS_BAD_PARAM, "kernel: expected none on a CPU, got %s", forced);
    return SCALED_MM_STATUS_SUCCESS;
  }
  if (scaledMMStatus_t s = require_table(handle->arch, &d->table)) return s;
  // A batch has as many tiles as one product of all its columns, and how many fill the GPU is what the edges of N are about.
  const auto misfit_of = [d](const RowNeeds& needs) { return misfit(d->info, needs); };
  const int32_t serves = d->info.constant_b ? SCALED_MM_BUCKET_CONSTANT_B : 0;
  if (scaledMMStatus_t s = d->choose(forced, kKind, d->info.M, d->info.N * d->info.batch, d->info.K, serves, misfit_of)) return s;
  if (d->info.empty()) return SCALED_MM_STATUS_SUCCESS;  // nothing will be launched
  const int32_t device = handle->info.device_id, shared_memory = handle->info.max_shared_memory;
  if (scaledMMStatus_t s = require_kernel(handle->arch, d->row->name.c_str(), d->info.out_dtype, device, shared_memory,
                                          &d->row->slots[d->info.out_dtype], &d->kernel)) return s;
  if (d->info.has_zero_point()) {
    if (scaledMMStatus_t s = require_kernel(handle->arch, kZeroPointTermsRow, -1, device, shared_memory,
                                            &handle->arch->zero_point_terms, &d->zero_point_terms)) return s;
    d->terms_size = d->info.workspace_size();
  }
  d->workspace_size = d->terms_size;
  if (d->kernel->workspace_size) {
    if (scaledMMStatus_t s = check_workspace_room(d->kernel->row, {d->info.M, d->info.N, d->info.batch})) return s;
    d->terms_size = (d->terms_size + 15) / 16 * 16;
    d->workspace_size = d->terms_size + size_t(d->kernel->workspace_size(d->info.M, d->info.N, d->info.batch));
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

scaledMMStatus_t check_pointers(const scaledMMGemmDescriptor& d, void* out, const Operand (&inputs)[kGemmTensors - 1]) {
  const auto out_begin = reinterpret_cast<uintptr_t>(out);
  const int64_t out_alignment = std::max<int64_t>(d.needs.align_out, dtype_bytes(d.info.out_dtype));
  if (out == nullptr && d.info.bytes.out > 0) return fail(SCALED_MM_STATUS_NULL_POINTER, "out: expected a data pointer, got null");
  if (out_begin % out_alignment) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT,
                "out: expected a data pointer aligned to %d bytes as the descriptor says, got %p", int(out_alignment), out);
  }
  for (const Operand& input : inputs) {
    if (!input.wanted) {
      if (input.pointer) return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected null, as the descriptor was created without it, got a pointer", input.name);
      continue;
    }
    if (input.pointer == nullptr && input.bytes > 0) {
      return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected a data pointer, got null", input.name);
    }
    const auto begin = reinterpret_cast<uintptr_t>(input.pointer);
    if (begin % input.alignment) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT,
                  "%s: expected a data pointer aligned to %lld bytes as the descriptor says, got %p", input.name,
                  static_cast<long long>(input.alignment), input.pointer);
    }
    if (begin < out_begin + d.info.bytes.out && out_begin < begin + input.bytes) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "out: expected memory apart from every input, got an overlap with %s", input.name);
    }
  }
  return SCALED_MM_STATUS_SUCCESS;
}

// The descriptor's launch cache for a scope, or nullptr: on the first launch, and while another thread has it.
class CacheLease {
 public:
  explicit CacheLease(scaledMMGemmDescriptor* d) {
    if (!d->launched.exchange(true, std::memory_order_relaxed)) return;
    if (d->cache_taken.exchange(true, std::memory_order_acquire)) return;
    holder_ = d;
    if (!d->cache) {
      d->cache.reset(new (std::nothrow) LaunchCache);
      if (d->cache) d->cache->filled = false;
    }
  }
  ~CacheLease() {
    if (holder_) holder_->cache_taken.store(false, std::memory_order_release);
  }
  CacheLease(const CacheLease&) = delete;
  CacheLease& operator=(const CacheLease&) = delete;
  LaunchCache* get() const { return holder_ ? holder_->cache.get() : nullptr; }

 private:
  scaledMMGemmDescriptor* holder_ = nullptr;
};

scaledMMStatus_t run(const Kernel& kernel, const GemmLaunch& launch) {
  char message[512] = "";
  if (scaledMMStatus_t status = kernel.launch(launch, message, sizeof(message))) {
    return fail(status, "launch of %s on device %d: %s", kernel.row, int(launch.device), message);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

}  // namespace

scaledMMStatus_t scaledMMCreateGemmDescriptor(
    scaledMMHandle_t handle, scaledMMGemmDescriptor_t* descriptor, const scaledMMTensorDesc_t* out,
    const scaledMMTensorDesc_t* a, const scaledMMTensorDesc_t* b, const scaledMMTensorDesc_t* a_scale,
    const scaledMMTensorDesc_t* b_scale, const scaledMMTensorDesc_t* bias, const scaledMMTensorDesc_t* a_zero_point,
    const scaledMMTensorDesc_t* b_zero_point, const scaledMMTensorDesc_t* a_row_sums, const scaledMMTensorDesc_t* b_column_sums,
    const char* kernel) try {
  if (descriptor == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "descriptor: expected a place to write to, got a null pointer");
  *descriptor = nullptr;
  if (scaledMMStatus_t status = check_object("handle", handle)) return status;
  auto made = make_object<scaledMMGemmDescriptor>();
  if (made == nullptr) return fail(SCALED_MM_STATUS_INTERNAL_ERROR, "descriptor: out of host memory");
  const scaledMMTensorDesc_t* tensors[] = {out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums};
  for (int i = 0; i < kGemmTensors; ++i) {
    if (tensors[i]) made->tensors[i] = *tensors[i];
    else made->tensors[i].ndim = -1;
  }
  scaledMMStatus_t status =
      make_gemm_info({out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums}, &made->info);
  if (status == SCALED_MM_STATUS_SUCCESS) status = plan(handle, kernel, made.get());
  if (status == SCALED_MM_STATUS_SUCCESS) *descriptor = publish(std::move(made));
  return status;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMGetGemmWorkspaceSize(scaledMMGemmDescriptor_t d, size_t* bytes) {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (bytes == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "bytes: expected a place to write to, got a null pointer");
  *bytes = d->workspace_size;
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMGetGemmDevice(scaledMMGemmDescriptor_t d, int32_t* device_type, int32_t* device_id) {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (device_type == nullptr || device_id == nullptr) {
    return fail(SCALED_MM_STATUS_NULL_POINTER, "device_type, device_id: expected places to write to, got a null pointer");
  }
  *device_type = d->device.device_type;
  *device_id = d->device.device_id;
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMGetGemmKernel(scaledMMGemmDescriptor_t d, scaledMMKernelChoice_t* choice) try {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (choice == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "choice: expected a place to write to, got a null pointer");
  d->describe(kKind, choice);
  return SCALED_MM_STATUS_SUCCESS;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMCheckGemmTensors(scaledMMGemmDescriptor_t d, const scaledMMTensorDesc_t* out,
                                          const scaledMMTensorDesc_t* a, const scaledMMTensorDesc_t* b,
                                          const scaledMMTensorDesc_t* a_scale, const scaledMMTensorDesc_t* b_scale,
                                          const scaledMMTensorDesc_t* bias, const scaledMMTensorDesc_t* a_zero_point,
                                          const scaledMMTensorDesc_t* b_zero_point,
                                          const scaledMMTensorDesc_t* a_row_sums,
                                          const scaledMMTensorDesc_t* b_column_sums) try {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  const scaledMMTensorDesc_t* tensors[] = {out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums};
  for (int i = 0; i < kGemmTensors; ++i) {
    const scaledMMTensorDesc_t* expected = d->tensors[i].ndim < 0 ? nullptr : &d->tensors[i];
    if (scaledMMStatus_t status = check_same(kGemmTensorNames[i], expected, tensors[i])) return status;
  }
  return SCALED_MM_STATUS_SUCCESS;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMCalculateGemm(scaledMMGemmDescriptor_t d, void* workspace, size_t workspace_size, void* out,
                                       const void* a, const void* b, const void* a_scale, const void* b_scale,
                                       const void* bias, const void* a_zero_point, const void* b_zero_point,
                                       const void* a_row_sums, const void* b_column_sums, void* stream) {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  const GemmInfo& info = d->info;
  const Operand inputs[kGemmTensors - 1] = {
      {"a", a, info.bytes.a, true, d->needs.align_a},
      {"b", b, info.bytes.b, true, d->needs.align_b},
      {"a_scale", a_scale, info.bytes.a_scale, info.has_scales, 4},
      {"b_scale", b_scale, info.bytes.b_scale, info.has_scales, 4},
      {"bias", bias, info.bytes.bias, info.has_bias, info.has_bias ? dtype_bytes(info.bias_dtype) : 1},
      {"a_zero_point", a_zero_point, info.bytes.a_zero_point, info.has_a_zero_point,
       info.has_a_zero_point ? dtype_bytes(info.a_zero_point_dtype) : 1},
      {"b_zero_point", b_zero_point, info.bytes.b_zero_point, info.has_b_zero_point,
       info.has_b_zero_point ? dtype_bytes(info.b_zero_point_dtype) : 1},
      {"a_row_sums", a_row_sums, info.bytes.a_row_sums, info.has_a_row_sums, 4},
      {"b_column_sums", b_column_sums, info.bytes.b_column_sums, info.has_b_column_sums, 4},
  };
  if (scaledMMStatus_t status = check_pointers(*d, out, inputs)) return status;
  if (d->device.device_type == SCALED_MM_DEVICE_CPU) {
    return fail(SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED,
                "handle: the C library launches on CUDA devices; on a CPU use the backend of the scaled_mm Python package");
  }
  if (info.empty()) return SCALED_MM_STATUS_SUCCESS;

  GemmLaunch launch = d->launch;
  launch.a = a;
  launch.b = b;
  launch.out = out;
  launch.a_scale = static_cast<const float*>(a_scale);
  launch.b_scale = static_cast<const float*>(b_scale);
  launch.bias = bias;
  launch.stream = stream;
  if (const size_t needed = d->workspace_size) {
    if (workspace == nullptr || workspace_size < needed) {
      return fail(SCALED_MM_STATUS_INSUFFICIENT_WORKSPACE, "workspace: expected at least %zu bytes, got %zu", needed,
                  workspace ? workspace_size : size_t(0));
    }
    if (reinterpret_cast<uintptr_t>(workspace) % 16) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT, "workspace: expected a pointer aligned to 16 bytes, got %p", workspace);
    }
    const auto begin = reinterpret_cast<uintptr_t>(workspace);
    const auto overlaps = [&](const void* p, int64_t bytes) {
      const auto other = reinterpret_cast<uintptr_t>(p);
      return other < begin + needed && begin < other + uintptr_t(bytes);
    };
    if (overlaps(out, info.bytes.out)) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "workspace: expected memory apart from every tensor, got an overlap with out");
    }
    for (const Operand& input : inputs) {
      if (input.wanted && overlaps(input.pointer, input.bytes)) {
        return fail(SCALED_MM_STATUS_BAD_PARAM, "workspace: expected memory apart from every tensor, got an overlap with %s", input.name);
      }
    }
    if (d->kernel->workspace_size) launch.workspace = static_cast<char*>(workspace) + d->terms_size;
  }
  if (d->zero_point_terms) {
    launch.a_zero_point = a_zero_point;
    launch.b_zero_point = b_zero_point;
    launch.a_row_sums = static_cast<const int32_t*>(a_row_sums);
    launch.b_column_sums = static_cast<const int32_t*>(b_column_sums);
    launch.row_terms = static_cast<int32_t*>(workspace);
    launch.col_terms = launch.row_terms + info.column_terms_offset();
    if (scaledMMStatus_t status = run(*d->zero_point_terms, launch)) return status;
  }
  const CacheLease lease(d);
  launch.cache = lease.get();
  return run(*d->kernel, launch);
}

scaledMMStatus_t scaledMMDestroyGemmDescriptor(scaledMMGemmDescriptor_t d) {
  return destroy_object("descriptor", d);
}
