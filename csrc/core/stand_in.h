// The kernel of a plan. If the kernel config that the table selects is not built, another one of the table stands in for it.
#pragma once

#include "core/handle.h"
#include "core/problem.h"

namespace scaled_mm {

struct KernelPlan {
  const Kernel* kernel = nullptr;
  const TableRow* stand_in = nullptr;    // whose kernel it is; nullptr: the selected kernel config's
  const AwaitedKernel* better = nullptr; // the selected kernel config's; nullptr without a stand-in
};

struct KernelWish {
  const Table* table;
  const TableRow* row; // the selected kernel config
  int32_t bucket;      // of the table; -1: the kernel config was named by the caller, so it runs or nothing does
};

// Finds the kernel of a product, prepared on the device. Stand-ins are tried by their predicted time, then those without one (of GGUF products
// whose bucket names a kernel config: all) in the order of the table, then the fallback. One that is neither loaded nor built is passed over, as is
// one that cannot take the product or run on the device. If none is left, the fallback is built.
scaledMMStatus_t plan_kernel(const scaledMMHandle& handle, const KernelWish& wish, const Problem& problem, KernelPlan* plan);

} // namespace scaled_mm
