/* A libcuda.so.1 without a GPU: one device of compute capability FAKE_COMPUTE_CAPABILITY (default 90) whose memory is the
 * host's. With kernels that are plain loops (host_kernels.cpp) the whole C core runs on any machine.
 * FAKE_CUINIT makes cuInit fail, FAKE_DEVICES is the number of devices, FAKE_SMS that of
 * their SMs (default 132). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long DevicePointer;

static int number(const char* variable, int otherwise) {
  const char* value = getenv(variable);
  return value ? atoi(value) : otherwise;
}

int cuInit(unsigned flags) {
  (void)flags;
  return number("FAKE_CUINIT", 0);
}
int cuDeviceGetCount(int* count) {
  *count = number("FAKE_DEVICES", 1);
  return 0;
}
int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const int capability = number("FAKE_COMPUTE_CAPABILITY", 90);
  (void)device;
  switch (attribute) {
  case 16: *value = number("FAKE_SMS", 132); return 0; /* multiprocessors */
  case 36: *value = 3350000; return 0;                 /* kHz of the memory's clock, and bits of its bus: 3.35 TB/s, as an H100 */
  case 37: *value = 4000; return 0;
  case 75: *value = capability / 10; return 0; /* compute capability, major and minor */
  case 76: *value = capability % 10; return 0;
  case 97: *value = 232448; return 0; /* shared memory that a block may opt in to */
  default: return 1;
  }
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  static int only;
  (void)device;
  *context = &only;
  return 0;
}
int cuCtxSetCurrent(void* context) { return context == NULL; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAlloc_v2(DevicePointer* pointer, size_t bytes) {
  void* memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  *pointer = (DevicePointer)(uintptr_t)memory;
  return memory == NULL && bytes > 0;
}
int cuMemcpyHtoD_v2(DevicePointer to, const void* from, size_t bytes) {
  memcpy((void*)(uintptr_t)to, from, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, DevicePointer from, size_t bytes) {
  memcpy(to, (const void*)(uintptr_t)from, bytes);
  return 0;
}
int cuStreamCreate(void** stream, unsigned flags) {
  static int only;
  (void)flags;
  *stream = &only;
  return 0;
}
int cuStreamSynchronize(void* stream) { return stream == NULL; }
