#pragma once

#include "core/device.h"
#include "core/registry.h"

struct scaledMMHandle {
  scaledMMHandleInfo_t info;
  scaled_mm::Arch* arch;  // nullptr on a CPU
};
