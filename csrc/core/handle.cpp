#include "core/handle.h"

#include <cstdio>
#include <utility>

#include "core/arch.h"
#include "core/status.h"

using namespace scaled_mm;

scaledMMStatus_t scaledMMCreateHandle(scaledMMHandle_t* handle, scaledMMDeviceType_t device_type, int32_t device_id, const char* arch) try {
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
    if (scaledMMStatus_t status = choose_arch(arch, device_id, properties, info.arch, sizeof(info.arch))) return status;
    info.compute_capability = properties.compute_capability;
    info.multiprocessors = properties.multiprocessors;
    info.max_shared_memory = properties.max_shared_memory;
    info.memory_bandwidth = properties.memory_bandwidth;
  } else {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "device_type: expected SCALED_MM_DEVICE_CPU or SCALED_MM_DEVICE_CUDA, got %d", int(device_type));
  }
  auto made = make_object<scaledMMHandle>();
  if (made == nullptr) return fail(SCALED_MM_STATUS_INTERNAL_ERROR, "handle: out of host memory");
  made->info = info;
  made->arch = device_type == SCALED_MM_DEVICE_CUDA ? find_arch(info.arch) : nullptr;
  *handle = publish(std::move(made));
  return SCALED_MM_STATUS_SUCCESS;
} catch (const std::exception& error) {
  return fail_exception(error);
}

scaledMMStatus_t scaledMMDestroyHandle(scaledMMHandle_t handle) { return destroy_object("handle", handle); }

scaledMMStatus_t scaledMMGetHandleInfo(scaledMMHandle_t handle, scaledMMHandleInfo_t* info) {
  if (scaledMMStatus_t status = check_object("handle", handle)) return status;
  if (info == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "info: expected a place to write to, got a null pointer");
  *info = handle->info;
  return SCALED_MM_STATUS_SUCCESS;
}
