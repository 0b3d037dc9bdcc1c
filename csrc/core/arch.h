// Which tile table serves a device: its own, or that of an older architecture (forced dispatch).
#pragma once

#include "core/device.h"

namespace scaled_mm {

// Writes the name of the table for a device. `forced`: a name such as "sm80". nullptr: SCALED_MM_ARCH if it is set, else the device's own.
scaledMMStatus_t choose_arch(const char* forced, int32_t device_id, const DeviceProperties& device, char* name, size_t size);

} // namespace scaled_mm
