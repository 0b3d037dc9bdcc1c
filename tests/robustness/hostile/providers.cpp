// Kernel providers: wrong answers, and none.
#include "tables.h"

#include <climits>

namespace hostile {

namespace {

int provider_answer = 0;

} // namespace

scaledMMStatus_t provider(const char* arch, const char*, int32_t, int32_t, void* user) {
  if (user != nullptr) ++*static_cast<int*>(user);
  return arch == nullptr ? SCALED_MM_STATUS_INTERNAL_ERROR : scaledMMStatus_t(provider_answer);
}

// A handle whose architecture has no kernels, and at first no tables.
void providers() {
  context = "providers";
  scaledMMHandle_t handle = nullptr;
  int asked = 0;
  void* d = nullptr;
  Product p = plain(kGrouped);
  EXPECT(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, 0, "sm75"), SUCCESS);
  EXPECT(scaledMMSetKernelProvider(provider, &asked), SUCCESS);
  EXPECT(create(handle, &d, p), ARCHITECTURE_NOT_SUPPORTED);
  for (int answer : {-1, 16, INT_MAX, INT_MIN}) {
    provider_answer = answer;
    EXPECT_MESSAGE(create(handle, &d, p), INTERNAL_ERROR, "kernel provider: expected a scaledMMStatus_t");
  }
  REQUIRE(asked == 5 && d == nullptr);
  EXPECT(scaledMMSetKernelProvider(nullptr, nullptr), SUCCESS);
  EXPECT(create(handle, &d, p), ARCHITECTURE_NOT_SUPPORTED);
  EXPECT_TABLE(, SUCCESS);
  EXPECT(create(handle, &d, plain(kGemm)), KERNEL_NOT_BUILT);
  EXPECT(scaledMMDestroyHandle(handle), SUCCESS);
}

} // namespace hostile
