// Whether the driver took a tensor map. CUTLASS encodes them while it makes a kernel's parameters, and where the driver refuses one it
// says so on stderr and goes on: the kernel would fault, and take the process's context with it.
#pragma once

#include <cstdio>
#include <cstring>
#include <new>

#include "cute/arch/copy_sm90_desc.hpp"
#include "int8/launch.cuh"

namespace scaled_mm::c3x {

// A map that was not encoded has the zeros it was born with.
template <class Tma>
bool is_encoded(const Tma& tma) {
  const cute::TmaDescriptor none{};
  return memcmp(tma.get_tma_descriptor(), &none, sizeof(none)) != 0;
}

template <class Params>
scaledMMStatus_t check_encoded(const Params& params, char* message, size_t size) {
  const char* refused = !is_encoded(params.mainloop.tma_load_a)    ? "first"
                        : !is_encoded(params.mainloop.tma_load_b)  ? "second"
                        : !is_encoded(params.epilogue.tma_store_d) ? "output"
                                                                   : nullptr;
  if (refused == nullptr) return SCALED_MM_STATUS_SUCCESS;
  snprintf(message, size, "cuTensorMapEncodeTiled: the driver refused the tensor map of the kernel's %s operand", refused);
  return SCALED_MM_STATUS_CUDA_ERROR;
}

} // namespace scaled_mm::c3x

namespace scaled_mm {

// Launches a kernel whose parameters hold tensor maps: encodes them, unless the descriptor's cache has them for the same pointers.
template <class Params>
scaledMMStatus_t launch_with_maps(const GemmLaunch& l, char* message, size_t size, Params (*encode)(const GemmLaunch&),
                                  scaledMMStatus_t (*check)(const Params&, char*, size_t),
                                  scaledMMStatus_t (*launch)(Params&, const GemmLaunch&, char*, size_t)) {
  const void* pointers[8] = {l.a, l.b, l.out, l.a_scale, l.b_scale, l.bias, l.row_terms, l.col_terms};
  if (l.cache && l.cache->filled && memcmp(pointers, l.cache->pointers, sizeof(pointers)) == 0) {
    return launch(*reinterpret_cast<Params*>(l.cache->bytes), l, message, size);
  }
  CurrentDevice current(l.device); // the driver encodes tensor maps
  if (current.error()) return cuda_failure(current.error(), "cudaSetDevice", message, size);
  Params params = encode(l);
  if (scaledMMStatus_t status = check(params, message, size)) return status;
  if (l.cache) {
    new (l.cache->bytes) Params(params);
    memcpy(l.cache->pointers, pointers, sizeof(pointers));
    l.cache->filled = true;
  }
  return launch(params, l, message, size);
}

} // namespace scaled_mm
