/* device [INDEX [ARCH]]: a handle on a CUDA device, and what it says about it. Exit status 1: none, and on stderr why. */
#include <scaled_mm/scaled_mm.h>

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char** argv) {
  scaledMMHandle_t handle = NULL;
  scaledMMHandleInfo_t info;
  scaledMMStatus_t status = scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, argc > 1 ? atoi(argv[1]) : 0, argc > 2 ? argv[2] : NULL);
  if (status == SCALED_MM_STATUS_SUCCESS) status = scaledMMGetHandleInfo(handle, &info);
  if (status != SCALED_MM_STATUS_SUCCESS) {
    fprintf(stderr, "%s: %s\n", scaledMMGetStatusName(status), scaledMMGetLastErrorMessage());
    return 1;
  }
  printf("%s %d %d %d\n", info.arch, info.compute_capability, info.multiprocessors, info.max_shared_memory);
  return scaledMMDestroyHandle(handle) != SCALED_MM_STATUS_SUCCESS;
}
