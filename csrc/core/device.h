// What the core asks of a GPU, through the driver library that the machine has (or has not): the core links no CUDA.
#pragma once

#include "scaled_mm/scaled_mm.h"

namespace scaled_mm {

struct DeviceProperties {
  int32_t compute_capability; // 90 for 9.0
  int32_t multiprocessors;
  int32_t max_shared_memory; // bytes, opt-in, per block
};

scaledMMStatus_t query_device(int32_t device_id, DeviceProperties* properties);

} // namespace scaled_mm
