// The properties of a GPU, from the driver library, which is opened at run time: the core links no CUDA.
#pragma once

#include "scaled_mm/scaled_mm.h"

namespace scaled_mm {

struct DeviceProperties {
  int32_t compute_capability; // 90 for 9.0
  int32_t multiprocessors;
  int32_t max_shared_memory; // bytes that one thread block may opt in to
};

scaledMMStatus_t query_device(int32_t device_id, DeviceProperties* properties);

} // namespace scaled_mm
