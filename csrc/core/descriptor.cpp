// The life cycle of a descriptor, for every kind of product. Create validates the product, selects a kernel and prepares it; calculate only fills
// in pointers and launches. What is special to a kind of product: core/problem.h.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "core/handle.h"
#include "core/problem.h"
#include "core/row_choice.h"
#include "core/stand_in.h"
#include "core/status.h"
#include "core/tensors.h"

using namespace scaled_mm;

namespace {

// What calculate needs to know of an operand.
struct PlannedOperand {
  const char* name;
  size_t pointer;    // offset of its data pointer in GemmLaunch
  int64_t bytes;     // from the data pointer to the end of the last element
  int64_t alignment; // of the data pointer
  bool given;
  bool written;    // an output besides out
  uint32_t may_be; // of a written one: see OperandSpec
};

} // namespace

struct scaledMMDescriptor : RowChoice {
  static constexpr ObjectKind kObject = kDescriptorObject;

  ~scaledMMDescriptor() {
    if (problem) problem->~Problem();
  }

  const ProblemKind* kind = nullptr;
  scaledMMHandleInfo_t device; // a copy: the handle may be destroyed before the descriptor
  GemmLaunch launch;           // everything but the pointers
  PlannedOperand operands[kMaxOperands];
  bool empty;

  KernelPlan plan;
  const Kernel* zero_point_terms = nullptr;
  size_t kernel_workspace = 0; // bytes that plan.kernel needs
  size_t terms_size = 0;       // bytes of the zero-point terms at the start of the workspace, up to the kernel's part
  size_t workspace_size = 0;   // bytes of the whole workspace

  // Allocated on the second launch. Concurrent launches that fail to acquire it encode their own parameters.
  std::unique_ptr<LaunchCache> cache;
  const Kernel* cache_of = nullptr; // the kernel that filled the cache
  std::atomic<bool> cache_taken{false};
  std::atomic<bool> launched{false};

  scaledMMTensorDesc_t tensors[kMaxOperands]; // the operands at creation; ndim is -1 for an absent one

  const char* own_kernel = nullptr; // of a kind without a table, on a CUDA device

  Problem* problem = nullptr; // in `memory`
  alignas(std::max_align_t) unsigned char memory[kProblemBytes];
};

namespace {

scaledMMStatus_t check_kind(int32_t kind) {
  if (kind >= 0 && kind < kNumProblemKinds) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_PARAM, "product: expected a scaledMMProduct_t, got %d", int(kind));
}

scaledMMStatus_t check_count(const ProblemKind& kind, const void* operands, int32_t count) {
  if (operands == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "operands: expected %d, got a null pointer", int(kind.num_operands));
  if (count == kind.num_operands) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_PARAM, "operands: expected %d of a %s, got %d", int(kind.num_operands), kind.name, int(count));
}

// Checks that a descriptor is alive and of this kind of product.
scaledMMStatus_t check_descriptor(const scaledMMDescriptor* d, int32_t product) {
  if (scaledMMStatus_t s = check_object("descriptor", d)) return s;
  if (scaledMMStatus_t s = check_kind(product)) return s;
  if (d->kind == kProblemKinds[product]) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_PARAM, "descriptor: expected a %s descriptor, got a %s descriptor", kProblemKinds[product]->name, d->kind->name);
}

scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* operands, const Options& options, scaledMMDescriptor* d) {
  const scaledMMTensorDesc_t* given[kMaxOperands] = {};
  for (int i = 0; i < d->kind->num_operands; ++i) {
    scaledMMTensorDesc_t& t = d->tensors[i];
    if (operands[i] == nullptr) {
      t.ndim = -1;
      continue;
    }
    t = *operands[i];
    if (t.flags & SCALED_MM_TENSOR_PACKED) memset(t.strides, 0, sizeof(t.strides)); // a packed tensor has none
    given[i] = &t;
  }
  if (scaledMMStatus_t s = d->problem->validate(given, options)) return s;
  d->problem->info.device = d->device.device_id;
  d->problem->info.multiprocessors = d->device.multiprocessors;
  return SCALED_MM_STATUS_SUCCESS;
}

void plan_operands(scaledMMDescriptor* d) {
  for (int i = 0; i < d->kind->num_operands; ++i) {
    const OperandSpec& spec = d->kind->operands[i];
    const scaledMMTensorDesc_t& t = d->tensors[i];
    PlannedOperand& operand = d->operands[i];
    operand = {spec.name, spec.pointer, 0, 1, t.ndim >= 0, spec.role == Role::kWritten, spec.may_be};
    if (!operand.given) continue;
    const int64_t of_row = spec.role == Role::kOut ? d->needs.align_out
                           : spec.role == Role::kA ? d->needs.align_a
                           : spec.role == Role::kB ? d->needs.align_b
                                                   : 1;
    operand.bytes = tensor_extent(t);
    operand.alignment = std::max(of_row, tensor_alignment(t));
  }
}

// The kernel of a kind without a table. It needs no workspace.
scaledMMStatus_t plan_own_kernel(scaledMMHandle_t handle, scaledMMDescriptor* d) {
  Problem& problem = *d->problem;
  d->own_kernel = problem.own_kernel();
  if (problem.empty()) return SCALED_MM_STATUS_SUCCESS;
  const Table* table = nullptr; // a library of the architecture is loaded with its tables
  if (scaledMMStatus_t s = require_table(handle->arch, &table)) return s;
  const KernelName name = {
      handle->arch, d->own_kernel, problem.variant, handle->info.device_id, handle->info.max_shared_memory, problem.own_slot(handle->arch)};
  if (!is_loaded(name)) {
    // It has no stand-in in the core, but the caller may compute the operator otherwise until the kernel is built.
    if (scaledMMStatus_t s = ask_once(name, SCALED_MM_PROVIDE_LATER)) return s;
    if (!is_loaded(name)) return fail_not_built(name);
  }
  return require_kernel(name, &d->plan.kernel);
}

// Selects the kernel and computes the size of the workspace.
scaledMMStatus_t plan_kernel(scaledMMHandle_t handle, int32_t product, const char* forced, scaledMMDescriptor* d) {
  if (handle->info.device_type == SCALED_MM_DEVICE_CPU) {
    if (forced != nullptr) return fail(SCALED_MM_STATUS_BAD_PARAM, "kernel: expected none on a CPU, got %s", forced);
    return SCALED_MM_STATUS_SUCCESS;
  }
  Problem& problem = *d->problem;
  if (problem.own_kernel() != nullptr) return plan_own_kernel(handle, d);
  if (scaledMMStatus_t s = require_table(handle->arch, &d->table, product)) return s;
  problem.settle(*d->table);
  const auto misfit_of = [&problem](const RowNeeds& needs) { return problem.misfit(needs); };
  if (scaledMMStatus_t s = d->choose(forced, d->kind->label, problem.bucket(), problem.size(), problem.empty(), handle->rates(), misfit_of)) return s;
  if (problem.empty()) return SCALED_MM_STATUS_SUCCESS; // nothing will be launched
  const KernelWish wish = {d->table, d->row, d->bucket};
  if (scaledMMStatus_t s = scaled_mm::plan_kernel(*handle, wish, problem, &d->plan)) return s;
  if (d->plan.stand_in) d->stand_in(*d->plan.stand_in);
  if (problem.terms_bytes) {
    const KernelName terms = {
        handle->arch, kZeroPointTermsRow, -1, handle->info.device_id, handle->info.max_shared_memory, &handle->arch->zero_point_terms};
    if (scaledMMStatus_t s = require_kernel(terms, &d->zero_point_terms)) return s;
  }
  if (scaledMMStatus_t s = problem.workspace(*d->plan.kernel, &d->kernel_workspace)) return s;
  const size_t of_kernels = d->plan.better ? std::max(d->kernel_workspace, problem.workspace_in_advance(d->row->time)) : d->kernel_workspace;
  d->terms_size = (problem.terms_bytes + 15) / 16 * 16;
  d->workspace_size = of_kernels ? d->terms_size + of_kernels : problem.terms_bytes;
  return SCALED_MM_STATUS_SUCCESS;
}

// The kernel that a launch runs, and the bytes of its workspace after the zero-point terms.
struct Running {
  const Kernel* kernel;
  size_t workspace;
  bool is_better; // it has taken over from a stand-in
};

// A stand-in runs until the better kernel is ready. It stays if that kernel needs more workspace than the plan announced.
Running running(const scaledMMDescriptor& d) {
  const Kernel* const better = d.plan.better ? d.plan.better->ready.load(std::memory_order_acquire) : nullptr;
  size_t bytes = 0;
  const bool fits =
      better && d.problem->workspace(*better, &bytes) == SCALED_MM_STATUS_SUCCESS && (!bytes || d.terms_size + bytes <= d.workspace_size);
  return fits ? Running{better, bytes, true} : Running{d.plan.kernel, d.kernel_workspace, false};
}

uintptr_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// Whether two operands of one shape and dtype have their elements at the same places, given the same data pointer.
bool same_layout(const scaledMMTensorDesc_t& one, const scaledMMTensorDesc_t& other) {
  for (int i = 0; i < one.ndim; ++i) {
    if (one.shape[i] > 1 && one.strides[i] != other.strides[i]) return false;
  }
  return true;
}

// Checks that an output besides out aliases no other input or output, except one that it may replace exactly (OperandSpec::may_be).
scaledMMStatus_t check_written(const scaledMMDescriptor& d, const void* const* pointers, int index) {
  const PlannedOperand& written = d.operands[index];
  if (written.bytes == 0) return SCALED_MM_STATUS_SUCCESS;
  const uintptr_t begin = address_of(pointers[index]), end = begin + uintptr_t(written.bytes);
  for (int i = 1; i < d.kind->num_operands; ++i) {
    const PlannedOperand& other = d.operands[i];
    const uintptr_t from = address_of(pointers[i]);
    if (i == index || !other.given || from >= end || begin >= from + uintptr_t(other.bytes)) continue;
    if ((written.may_be >> i & 1) && from == begin && same_layout(d.tensors[i], d.tensors[index])) continue;
    return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected memory apart from %s, got an overlap", written.name, other.name);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_pointers(const scaledMMDescriptor& d, const void* const* pointers) {
  const uintptr_t out_begin = address_of(pointers[0]), out_end = out_begin + uintptr_t(d.operands[0].bytes);
  for (int i = 0; i < d.kind->num_operands; ++i) {
    const PlannedOperand& operand = d.operands[i];
    const void* pointer = pointers[i];
    if (!operand.given) {
      if (pointer == nullptr) continue;
      return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected null, as the descriptor was created without it, got a pointer", operand.name);
    }
    if (pointer == nullptr && operand.bytes > 0) return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected a data pointer, got null", operand.name);
    const uintptr_t begin = address_of(pointer);
    if (begin & uintptr_t(operand.alignment - 1)) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT, "%s: expected a data pointer aligned to %lld bytes as the descriptor says, got %p",
                  operand.name, static_cast<long long>(operand.alignment), pointer);
    }
    if (i > 0 && begin < out_end && out_begin < begin + uintptr_t(operand.bytes)) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "out: expected memory apart from every input, got an overlap with %s", operand.name);
    }
    if (operand.written) {
      if (scaledMMStatus_t s = check_written(d, pointers, i)) return s;
    }
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_workspace(const scaledMMDescriptor& d, const void* workspace, size_t size, const void* const* pointers) {
  const size_t needed = d.workspace_size;
  if (workspace == nullptr || size < needed) {
    return fail(SCALED_MM_STATUS_INSUFFICIENT_WORKSPACE, "workspace: expected at least %zu bytes, got %zu", needed, workspace ? size : size_t(0));
  }
  const uintptr_t begin = address_of(workspace);
  if (begin % 16) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT, "workspace: expected a pointer aligned to 16 bytes, got %p", workspace);
  }
  for (int i = 0; i < d.kind->num_operands; ++i) {
    const uintptr_t other = address_of(pointers[i]);
    if (d.operands[i].given && other < begin + needed && begin < other + uintptr_t(d.operands[i].bytes)) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "workspace: expected memory apart from every tensor, got an overlap with %s", d.operands[i].name);
    }
  }
  return SCALED_MM_STATUS_SUCCESS;
}

// Holds the descriptor's launch cache for a scope. nullptr on the first launch, and while another thread holds it. Empty for another kernel
// than the one that filled it.
class CacheLease {
public:
  CacheLease(scaledMMDescriptor* d, const Kernel* kernel) {
    if (!d->kind->keeps_launches || !d->launched.exchange(true, std::memory_order_relaxed)) return;
    if (d->cache_taken.exchange(true, std::memory_order_acquire)) return;
    holder_ = d;
    if (!d->cache) {
      d->cache.reset(new (std::nothrow) LaunchCache);
      d->cache_of = nullptr;
    }
    if (d->cache && d->cache_of != kernel) {
      d->cache->filled = false;
      d->cache_of = kernel;
    }
  }
  ~CacheLease() {
    if (holder_) holder_->cache_taken.store(false, std::memory_order_release);
  }
  CacheLease(const CacheLease&) = delete;
  CacheLease& operator=(const CacheLease&) = delete;
  LaunchCache* get() const { return holder_ ? holder_->cache.get() : nullptr; }

private:
  scaledMMDescriptor* holder_ = nullptr;
};

scaledMMStatus_t run(const Kernel& kernel, const GemmLaunch& launch) {
  char message[512] = "";
  if (scaledMMStatus_t status = kernel.launch(launch, message, sizeof(message))) {
    return fail(status, "launch of %s on device %d: %s", kernel.row, int(launch.device), message);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

// Row-wise operators have a create function of their own. is_rowwise: it is the one that was called.
scaledMMStatus_t check_creator(const ProblemKind& kind, bool is_rowwise) {
  if ((kind.table.noun == nullptr) == is_rowwise) return SCALED_MM_STATUS_SUCCESS;
  if (is_rowwise) return fail(SCALED_MM_STATUS_BAD_PARAM, "product: expected a row-wise operator, got a %s", kind.name);
  return fail(SCALED_MM_STATUS_BAD_PARAM, "product: expected one that has a table, got a %s; scaledMMCreateRowwiseDescriptor creates it", kind.name);
}

scaledMMStatus_t create(scaledMMHandle_t handle, scaledMMDescriptor_t* descriptor, int32_t product, const scaledMMTensorDesc_t* const* operands,
                        int32_t num_operands, bool is_rowwise, const Options& options, const char* kernel) {
  if (descriptor == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "descriptor: expected a place to write to, got a null pointer");
  *descriptor = nullptr;
  if (scaledMMStatus_t s = check_object("handle", handle)) return s;
  if (scaledMMStatus_t s = check_kind(product)) return s;
  if (scaledMMStatus_t s = check_creator(*kProblemKinds[product], is_rowwise)) return s;
  if (scaledMMStatus_t s = check_count(*kProblemKinds[product], operands, num_operands)) return s;
  auto made = make_object<scaledMMDescriptor>();
  if (made == nullptr) return fail(SCALED_MM_STATUS_INTERNAL_ERROR, "descriptor: out of host memory");
  made->kind = kProblemKinds[product];
  made->problem = made->kind->make(made->memory);
  made->device = handle->info;
  if (scaledMMStatus_t s = validate(operands, options, made.get())) return s;
  if (scaledMMStatus_t s = plan_kernel(handle, product, kernel, made.get())) return s;
  plan_operands(made.get());
  made->launch = made->problem->info;
  made->empty = made->problem->empty();
  *descriptor = publish(std::move(made));
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace

const char* scaledMMGetOperandName(int32_t product, int32_t index) {
  if (product < 0 || product >= kNumProblemKinds || index < 0 || index >= kProblemKinds[product]->num_operands) return nullptr;
  return kProblemKinds[product]->operands[index].name;
}

scaledMMStatus_t scaledMMCreateDescriptor(scaledMMHandle_t handle, scaledMMDescriptor_t* descriptor, int32_t product,
                                          const scaledMMTensorDesc_t* const* operands, int32_t num_operands, int32_t option, const char* kernel) try {
  return create(handle, descriptor, product, operands, num_operands, false, {option}, kernel);
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMCreateRowwiseDescriptor(scaledMMHandle_t handle, scaledMMDescriptor_t* descriptor, int32_t product, int32_t function,
                                                 int32_t output, double epsilon, const scaledMMTensorDesc_t* const* operands,
                                                 int32_t num_operands) try {
  return create(handle, descriptor, product, operands, num_operands, true, {function, output, epsilon}, nullptr);
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMGetWorkspaceSize(scaledMMDescriptor_t d, size_t* bytes) {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (bytes == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "bytes: expected a place to write to, got a null pointer");
  *bytes = d->workspace_size;
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMGetDevice(scaledMMDescriptor_t d, int32_t* device_type, int32_t* device_id) {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (device_type == nullptr || device_id == nullptr) {
    return fail(SCALED_MM_STATUS_NULL_POINTER, "device_type, device_id: expected places to write to, got a null pointer");
  }
  *device_type = d->device.device_type;
  *device_id = d->device.device_id;
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMGetKernel(scaledMMDescriptor_t d, scaledMMKernelChoice_t* choice) try {
  if (scaledMMStatus_t status = check_object("descriptor", d)) return status;
  if (choice == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "choice: expected a place to write to, got a null pointer");
  if (d->own_kernel != nullptr) {
    *choice = {d->own_kernel, "the kernel of this operator; no table lists it", -1, 0, nullptr};
    return SCALED_MM_STATUS_SUCCESS;
  }
  const bool loaded = d->plan.better && d->plan.better->ready.load(std::memory_order_acquire);
  const RowState state = !d->plan.better         ? RowState::kSelected
                         : running(*d).is_better ? RowState::kTakenOver
                         : loaded                ? RowState::kStays
                                                 : RowState::kWaits;
  d->describe(d->kind->label + std::string(d->problem->mode()), state, choice);
  return SCALED_MM_STATUS_SUCCESS;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMCheckTensors(scaledMMDescriptor_t d, int32_t product, const scaledMMTensorDesc_t* const* operands,
                                      int32_t num_operands) try {
  if (scaledMMStatus_t status = check_descriptor(d, product)) return status;
  if (scaledMMStatus_t status = check_count(*d->kind, operands, num_operands)) return status;
  for (int i = 0; i < num_operands; ++i) {
    const scaledMMTensorDesc_t* expected = d->tensors[i].ndim < 0 ? nullptr : &d->tensors[i];
    if (scaledMMStatus_t status = check_same(d->operands[i].name, expected, operands[i])) return status;
  }
  return SCALED_MM_STATUS_SUCCESS;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMCalculate(scaledMMDescriptor_t d, int32_t product, void* workspace, size_t workspace_size, const void* const* pointers,
                                   int32_t num_operands, void* stream) {
  if (scaledMMStatus_t status = check_descriptor(d, product)) return status;
  if (scaledMMStatus_t status = check_count(*d->kind, pointers, num_operands)) return status;
  if (scaledMMStatus_t status = check_pointers(*d, pointers)) return status;
  if (d->device.device_type == SCALED_MM_DEVICE_CPU) {
    return fail(SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED,
                "handle: the C library launches on CUDA devices; on a CPU use the backend of the scaled_mm Python package");
  }
  if (d->empty) return SCALED_MM_STATUS_SUCCESS;

  const Running now = running(*d);
  GemmLaunch launch = d->launch;
  for (int i = 0; i < num_operands; ++i) memcpy(reinterpret_cast<char*>(&launch) + d->operands[i].pointer, &pointers[i], sizeof(void*));
  launch.stream = stream;
  if (d->workspace_size) {
    if (scaledMMStatus_t status = check_workspace(*d, workspace, workspace_size, pointers)) return status;
    if (now.workspace) launch.workspace = static_cast<char*>(workspace) + d->terms_size;
  }
  if (d->zero_point_terms) {
    launch.row_terms = static_cast<int32_t*>(workspace);
    launch.col_terms = launch.row_terms + d->problem->column_terms_offset;
    if (scaledMMStatus_t status = run(*d->zero_point_terms, launch)) return status;
  }
  const CacheLease lease(d, now.kernel);
  launch.cache = lease.get();
  return run(*now.kernel, launch);
}

scaledMMStatus_t scaledMMDestroyDescriptor(scaledMMDescriptor_t d) { return destroy_object("descriptor", d); }
