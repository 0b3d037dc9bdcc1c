// The registry: tile tables by architecture, and the kernels of the loaded libraries. Process-wide, thread-safe.
#pragma once

#include <atomic>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "core/kernel_abi.h"
#include "core/time_model.h"

namespace scaled_mm {

#define CODE_OF_FORMAT(NAME, name, code, ...) code,
constexpr int32_t kFormatCodes[] = {SCALED_MM_GGUF_FORMATS(CODE_OF_FORMAT)};
#undef CODE_OF_FORMAT

constexpr int kDtypes = SCALED_MM_DTYPE_FLOAT32 + 1 + int(std::size(kFormatCodes)); // scaledMMDtype_t

// Whether every code from the first GGUF format on belongs to one format.
constexpr bool codes_are_dense() {
  bool taken[kDtypes] = {};
  for (const int32_t code : kFormatCodes) {
    if (code <= SCALED_MM_DTYPE_FLOAT32 || code >= kDtypes || taken[code]) return false;
    taken[code] = true;
  }
  return true;
}
static_assert(codes_are_dense(), "gguf_formats.h: expected the next free code for each format, without gaps or repetitions");

constexpr int kMaxDevices = 64; // bits of KernelSlot::prepared

struct Arch;
struct KernelSlot;

// A kernel that plans on a device wait for, while another kernel serves them. Never freed.
struct AwaitedKernel {
  std::atomic<const Kernel*> ready{nullptr}; // set once, when the kernel is loaded and prepared on the device
  const Arch* arch;
  const char* row;
  int32_t out_dtype, device, max_shared_memory;
  KernelSlot* slot;
  bool refused = false; // the device cannot run it. Under the registry's mutex
  AwaitedKernel* next;  // of the same slot
};

// A kernel, found once and prepared once per device. A later lookup costs a few atomic loads.
struct KernelSlot {
  std::atomic<const Kernel*> kernel{nullptr};
  std::atomic<uint64_t> prepared{0};
  std::atomic<uint64_t> searched{0};            // Registry::loads at the last unsuccessful search; 0: none yet
  std::atomic<uint32_t> asked{0};               // a bit for each scaledMMProvide_t that the provider has answered
  std::atomic<AwaitedKernel*> awaited{nullptr}; // a list, one for each device
};

// The alignments in bytes that a kernel config needs; see scaledMMTableRow_t. If it needs any, a and b must also be contiguous along K and out
// along N, and their row and batch strides must be multiples of these alignments.
struct RowNeeds {
  int32_t align_a = 1, align_b = 1, align_out = 1, store_bytes = 1;
  int32_t block_size = 0;

  bool any() const { return align_a > 1 || align_b > 1 || align_out > 1 || store_bytes > 1; }
};

struct TableRow {
  std::string name;
  RowNeeds needs;
  scaledMMTimeModel_t time{};

  bool has_time() const { return time.unit_m > 0; }

  // The slot of the kernel for a scaledMMDtype_t. nullptr for a number that is none.
  KernelSlot* slot(int32_t dtype) const { return dtype >= 0 && dtype < kDtypes ? &slots_[dtype] : nullptr; }

private:
  mutable KernelSlot slots_[kDtypes];
};

// Immutable once registered, except for the slots; never freed, so that a descriptor may keep a pointer to it.
struct Table {
  std::string arch, source;
  std::unique_ptr<TableRow[]> rows;
  int32_t num_rows = 0;
  std::vector<scaledMMTableBucket_t> buckets;
  int32_t fallback_row = 0;
  std::vector<scaledMMTableMode_t> modes;
  bool tuned = false;

  const TableRow* find_row(const char* name) const;
  // The index of the first matching bucket. serves: see BucketKey.
  int32_t find_bucket(int64_t M, int64_t N, int64_t K, int32_t serves) const;
  // The scaledMMGgufMode_t that AUTO stands for with this many tokens.
  int32_t find_mode(int64_t tokens) const;
};

constexpr int kMaxKinds = 32; // room for kinds of product (problems/kinds.cpp)

struct Arch {
  std::string name;
  std::atomic<const Table*> tables[kMaxKinds]{}; // by scaledMMProduct_t
  KernelSlot zero_point_terms;
  KernelSlot rowwise[std::size(kRowwiseKernels)][kDtypes]; // by Kernel::out_dtype
};

Arch* find_arch(const char* name); // created on first use, never freed

// An architecture's table for a kind of product. If none is registered, the provider is asked for one (with row = NULL).
scaledMMStatus_t require_table(Arch* arch, const Table** table, int32_t product = SCALED_MM_GEMM);

// A kernel, the device that it is for, and its slot.
struct KernelName {
  Arch* arch;
  const char* row;
  int32_t out_dtype; // -1: any
  int32_t device, max_shared_memory;
  KernelSlot* slot;
};

// The kernel, prepared on the device. If no library contains it, the provider is asked for it now.
scaledMMStatus_t require_kernel(const KernelName& name, const Kernel** kernel);

// Asks the provider for the kernel now, unless it is loaded. SUCCESS also if the provider does not load it.
scaledMMStatus_t load_now(const KernelName& name);

// KERNEL_NOT_BUILT. nor: what else is not there, for the message.
scaledMMStatus_t fail_not_built(const KernelName& name, const char* nor = "");

// Whether a library with the kernel is loaded. Without one it costs three loads, unless libraries were loaded since the last call.
bool is_loaded(const KernelName& name);

// Whether the provider has answered the question before.
bool was_asked(const KernelName& name, scaledMMProvide_t when);

// Asks the provider, unless it has answered the same question before.
scaledMMStatus_t ask_once(const KernelName& name, scaledMMProvide_t when);

// What becomes ready when a library with the kernel is loaded; nullptr if one is.
const AwaitedKernel* await_kernel(const KernelName& name);

} // namespace scaled_mm
