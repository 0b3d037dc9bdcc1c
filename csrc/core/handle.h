#pragma once

#include "core/device.h"
#include "core/object.h"
#include "core/registry.h"
#include "core/time_model.h"

struct scaledMMHandle {
  static constexpr scaled_mm::ObjectKind kObject = scaled_mm::kHandleObject;

  scaledMMHandleInfo_t info;
  scaled_mm::Arch* arch; // nullptr on a CPU

  scaled_mm::DeviceRates rates() const { return {info.multiprocessors, info.memory_bandwidth * 1e-6}; }
};
