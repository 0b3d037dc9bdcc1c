// The properties of a GPU, from the driver library, which is opened at run time: the core links no CUDA.
#pragma once

#include "scaled_mm/scaled_mm.h"

namespace scaled_mm {

struct DeviceProperties {
  int32_t compute_capability; // 90 for 9.0
  int32_t multiprocessors;
  int32_t max_shared_memory; // bytes that one thread block may opt in to
  double memory_bandwidth;   // bytes per second, at its peak
};

scaledMMStatus_t query_device(int32_t device_id, DeviceProperties* properties);

// For a scope: calls of this thread do not count against a CUDA graph that another thread captures. Preparing a kernel may load its code,
// which CUDA may forbid to every thread during a global capture, unless the thread's own mode is relaxed.
class RelaxedCapture {
public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

private:
  int mode_;
};

} // namespace scaled_mm
