// Whether the driver took a tensor map. CUTLASS encodes them while it makes a kernel's parameters, and where the driver refuses one it
// says so on stderr and goes on: the kernel would fault, and take the process's context with it.
#pragma once

#include <cstdio>
#include <cstring>

#include "cute/arch/copy_sm90_desc.hpp"
#include "core/kernel_abi.h"

namespace scaled_mm::c3x {

// A map that was not encoded has the zeros it was born with.
template <class Tma>
bool is_encoded(const Tma& tma) {
  const cute::TmaDescriptor none{};
  return memcmp(tma.get_tma_descriptor(), &none, sizeof(none)) != 0;
}

template <class Params>
scaledMMStatus_t check_encoded(const Params& params, char* message, size_t size) {
  const char* refused = !is_encoded(params.mainloop.tma_load_a)   ? "first"
                        : !is_encoded(params.mainloop.tma_load_b) ? "second"
                        : !is_encoded(params.epilogue.tma_store_d) ? "output"
                                                                   : nullptr;
  if (refused == nullptr) return SCALED_MM_STATUS_SUCCESS;
  snprintf(message, size, "cuTensorMapEncodeTiled: the driver refused the tensor map of the kernel's %s operand", refused);
  return SCALED_MM_STATUS_CUDA_ERROR;
}

}  // namespace scaled_mm::c3x
