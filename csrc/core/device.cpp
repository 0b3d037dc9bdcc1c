#include "core/device.h"

#include <dlfcn.h>

#include "core/status.h"

namespace scaled_mm {
namespace {

// Attribute numbers of the driver's stable interface (cuda.h).
constexpr int kMultiprocessorCount = 16;
constexpr int kMemoryClockKhz = 36;
constexpr int kMemoryBusBits = 37;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;
constexpr int kMaxSharedMemoryPerBlockOptin = 97;

struct Driver {
  int (*init)(unsigned) = nullptr;
  int (*device_count)(int*) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*attribute)(int*, int, int) = nullptr;
  int (*exchange_capture_mode)(int*) = nullptr; // nullptr: a driver before CUDA 10.1
  bool loaded = false;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
    device_count = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
    device_get = reinterpret_cast<int (*)(int*, int)>(dlsym(library, "cuDeviceGet"));
    attribute = reinterpret_cast<int (*)(int*, int, int)>(dlsym(library, "cuDeviceGetAttribute"));
    exchange_capture_mode = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuThreadExchangeStreamCaptureMode"));
    loaded = init && device_count && device_get && attribute;
  }
};

constexpr int kCaptureModeRelaxed = 2;

const Driver& the_driver() {
  static const Driver driver;
  return driver;
}

void exchange_capture_mode(int* mode) {
  if (the_driver().exchange_capture_mode) the_driver().exchange_capture_mode(mode);
}

// Bytes per second. If the driver reports no clock or bus width: the number of SMs times what data-centre GPUs have per SM.
double memory_bandwidth(const Driver& driver, int device, int multiprocessors) {
  int clock_khz = 0, bus_bits = 0;
  if (driver.attribute(&clock_khz, kMemoryClockKhz, device) || driver.attribute(&bus_bits, kMemoryBusBits, device) || clock_khz < 1 || bus_bits < 1) {
    return 2e10 * multiprocessors;
  }
  return 2.0 * clock_khz * (bus_bits / 8.0) * 1e3; // two transfers a clock
}

} // namespace

RelaxedCapture::RelaxedCapture() : mode_(kCaptureModeRelaxed) { exchange_capture_mode(&mode_); }
RelaxedCapture::~RelaxedCapture() { exchange_capture_mode(&mode_); }

scaledMMStatus_t query_device(int32_t device_id, DeviceProperties* properties) {
  const Driver& driver = the_driver();
  if (!driver.loaded) {
    return fail(SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED, "device: expected a CUDA GPU, got a machine without an NVIDIA driver (libcuda.so.1)");
  }
  if (int error = driver.init(0)) {
    return fail(SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED, "device: expected a CUDA GPU, the driver's cuInit answered error %d", error);
  }
  int count = 0;
  if (int error = driver.device_count(&count)) {
    return fail(SCALED_MM_STATUS_CUDA_ERROR, "device: cuDeviceGetCount answered error %d", error);
  }
  if (device_id < 0 || device_id >= count) {
    return fail(SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED, "device: expected one of %d CUDA devices, got index %d", count, int(device_id));
  }
  int device = 0, major = 0, minor = 0, multiprocessors = 0, shared_memory = 0;
  int error = driver.device_get(&device, device_id);
  if (!error) error = driver.attribute(&major, kComputeCapabilityMajor, device);
  if (!error) error = driver.attribute(&minor, kComputeCapabilityMinor, device);
  if (!error) error = driver.attribute(&multiprocessors, kMultiprocessorCount, device);
  if (!error) error = driver.attribute(&shared_memory, kMaxSharedMemoryPerBlockOptin, device);
  if (error) return fail(SCALED_MM_STATUS_CUDA_ERROR, "device: cuDeviceGetAttribute answered error %d", error);
  *properties = DeviceProperties{major * 10 + minor, multiprocessors, shared_memory, memory_bandwidth(driver, device, multiprocessors)};
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace scaled_mm
