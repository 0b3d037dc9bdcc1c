#include "core/handle.h"

#include <cstdio>
#include <new>

#include "core/status.h"

using namespace scaled_mm;

namespace {

// The tile table of a compute capability: its own generation's, shared by chips of one instruction set and memory size.
const char* arch_name(int32_t compute_capability) {
  if (compute_capability < 75) return nullptr;
  if (compute_capability < 80) return "sm75";
  if (compute_capability == 80 || compute_capability == 87) return "sm80";
  if (compute_capability < 90) return "sm89";
  if (compute_capability < 100) return "sm90";
  if (compute_capability < 120) return "sm100";
  return "sm120";
}

}  // namespace

scaledMMStatus_t scaledMMCreateHandle(scaledMMHandle_t* handle, scaledMMDeviceType_t device_type, int32_t device_id,
                                      const char* arch) {
  if (handle == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "handle: expected a place to write to, got a null pointer");
  *handle = nullptr;
  scaledMMHandleInfo_t info = {};
  info.device_type = device_type;
  info.device_id = device_id;
  if (device_type == SCALED_MM_DEVICE_CPU) {
    if (arch != nullptr) return fail(SCALED_MM_STATUS_BAD_PARAM, "arch: expected none on a CPU, got %s", arch);
    info.device_id = 0;
    snprintf(info.arch, sizeof(info.arch), "cpu");
  } else if (device_type == SCALED_MM_DEVICE_CUDA) {
    DeviceProperties properties;
    if (scaledMMStatus_t status = query_device(device_id, &properties)) return status;
    if (device_id >= kMaxDevices) {
      return fail(SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED, "device: expected an index below %d, got %d", kMaxDevices, int(device_id));
    }
    const char* own = arch_name(properties.compute_capability);
    if (own == nullptr) {
      return fail(SCALED_MM_STATUS_ARCHITECTURE_NOT_SUPPORTED,
                  "device: expected compute capability 7.5 (Turing) or newer, got %d.%d on device %d",
                  properties.compute_capability / 10, properties.compute_capability % 10, int(device_id));
    }
    info.compute_capability = properties.compute_capability;
    info.multiprocessors = properties.multiprocessors;
    info.max_shared_memory = properties.max_shared_memory;
    const int written = snprintf(info.arch, sizeof(info.arch), "%s", arch ? arch : own);
    if (written < 1 || written >= int(sizeof(info.arch))) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "arch: expected the name of a tile table such as sm90, got %s", arch);
    }
  } else {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "device_type: expected SCALED_MM_DEVICE_CPU or SCALED_MM_DEVICE_CUDA, got %d", int(device_type));
  }
  auto* made = new (std::nothrow) scaledMMHandle{info, nullptr};
  if (made == nullptr) return fail(SCALED_MM_STATUS_INTERNAL_ERROR, "handle: out of host memory");
  if (device_type == SCALED_MM_DEVICE_CUDA) made->arch = find_arch(info.arch);
  *handle = made;
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMDestroyHandle(scaledMMHandle_t handle) {
  if (handle == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "handle: expected a handle, got a null pointer");
  delete handle;
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t scaledMMGetHandleInfo(scaledMMHandle_t handle, scaledMMHandleInfo_t* info) {
  if (handle == nullptr || info == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "handle, info: expected both, got a null pointer");
  *info = handle->info;
  return SCALED_MM_STATUS_SUCCESS;
}
