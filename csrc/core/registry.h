// What is there to launch: tile tables by architecture, and the kernels that libraries brought. Process-wide, thread-safe.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/kernel_abi.h"

namespace scaled_mm {

constexpr int kDtypes = 11;     // scaledMMDtype_t
constexpr int kMaxDevices = 64; // bits of KernelSlot::prepared

// One kernel as the dispatch sees it: found once, prepared once per device, then two loads a launch.
struct KernelSlot {
  std::atomic<const Kernel*> kernel{nullptr};
  std::atomic<uint64_t> prepared{0};
};

// What a kernel row asks of the memory it works on, in bytes; see scaledMMTableRow_t. A row that needs anything needs K contiguous in a and b,
// N contiguous in out, and row and batch strides that are multiples of its alignments.
struct RowNeeds {
  int32_t align_a = 1, align_b = 1, align_out = 1, store_bytes = 1;

  bool any() const { return align_a > 1 || align_b > 1 || align_out > 1 || store_bytes > 1; }
};

struct TableRow {
  std::string name;
  RowNeeds needs;
  mutable KernelSlot slots[kDtypes];
};

// Immutable once registered (the slots fill in); never freed, so that a descriptor may keep a pointer to it.
struct Table {
  std::string arch, source;
  std::unique_ptr<TableRow[]> rows;
  int32_t num_rows = 0;
  std::vector<scaledMMTableBucket_t> buckets;
  int32_t fallback_row = 0;
  std::vector<scaledMMTableMode_t> modes;
  bool tuned = false;

  const TableRow* find_row(const char* name) const;
  // Index of the first bucket that fits. serves: which flags of buckets (SCALED_MM_BUCKET_*) the product answers.
  int32_t find_bucket(int64_t M, int64_t N, int64_t K, int32_t serves) const;
  // scaledMMGgufMode_t that AUTO is for this many tokens.
  int32_t find_mode(int64_t tokens) const;
};

constexpr int kMaxKinds = 8; // room for kinds of product (problems/kinds.cpp)

struct Arch {
  std::string name;
  std::atomic<const Table*> tables[kMaxKinds]{}; // by scaledMMTableKind_t
  KernelSlot zero_point_terms;
};

Arch* find_arch(const char* name); // made on first use, never freed

// The table of an architecture, asking the provider for it (row NULL) if none is registered.
scaledMMStatus_t require_table(Arch* arch, const Table** table, scaledMMTableKind_t kind = SCALED_MM_TABLE_GEMM);

// The kernel for a slot, prepared on the device; asks the provider when no library holds it.
scaledMMStatus_t require_kernel(Arch* arch, const char* row, int32_t out_dtype, int32_t device, int32_t max_shared_memory, KernelSlot* slot,
                                const Kernel** kernel);

} // namespace scaled_mm
