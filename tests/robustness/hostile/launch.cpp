// Use of a created descriptor: every function, and launches with allocations of exactly the bytes that the tensors span.
#include "hostile.h"

#include <cstdlib>
#include <cstring>
#include <vector>

namespace hostile {

std::atomic<long> launches[kKinds]{};

namespace {

constexpr int64_t kMostBytes = 1 << 20;

// Bytes from the data pointer to the end of the last element. kMostBytes + 1: too many to allocate.
int64_t span_of(const scaledMMTensorDesc_t& t) {
  const __int128 bytes = scaledMMGetBlockBytes(t.dtype);
  __int128 last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return 0;
    last += __int128(t.shape[i] - 1) * t.strides[i];
  }
  __int128 span = last + 1;
  if (bytes == 0)
    span *= t.dtype == kInt8 ? 1 : t.dtype == SCALED_MM_DTYPE_FLOAT16 || t.dtype == SCALED_MM_DTYPE_BFLOAT16 ? 2 : 4;
  else if (t.flags & SCALED_MM_TENSOR_PACKED)
    span = __int128((t.shape[0] + 63) / 64) * ((t.shape[1] + 255) / 256) * (512 * bytes + 128);
  else
    span = __int128(t.shape[0] - 1) * t.strides[0] + t.shape[1] / 32 * bytes;
  return span > kMostBytes ? kMostBytes + 1 : int64_t(span);
}

// Skipped if the product is too large for loops on the CPU.
void launch(const Product& p, void* d, size_t workspace_size, Random& random) {
  double work = 1;
  for (int i = 0; i < p.tensors[0].ndim; ++i) work *= double(p.tensors[0].shape[i]);
  work *= double(p.tensors[p.kind == kGguf ? 2 : 1].shape[p.tensors[p.kind == kGguf ? 2 : 1].ndim - 1]);
  void* pointers[kMost] = {};
  std::vector<void*> allocated;
  bool fits = work < 20000 && workspace_size < size_t(kMostBytes);
  for (int i = 0; i < kTensors[p.kind] && fits; ++i) {
    if (!p.present[i]) continue;
    const int64_t bytes = span_of(p.tensors[i]);
    fits = bytes <= kMostBytes;
    if (!fits) break;
    allocated.push_back(pointers[i] = malloc(size_t(bytes)));
    for (int64_t at = 0; at < bytes; ++at) static_cast<uint8_t*>(pointers[i])[at] = uint8_t(random() & 0x3f); // floats stay small
    if ((p.kind == kGrouped || p.kind == kGroupedBlockScaled) && i == 6 && bytes >= 4)
      memset(pointers[i], pick(random, {0, 0x80, 0xff, 0x7f}), 4); // kernels do not trust expert offsets
  }
  if (fits) {
    void* workspace = malloc(workspace_size);
    EXPECT(calculate(p.kind, d, workspace, workspace_size, pointers), SUCCESS);
    if (work > 0) ++launches[p.kind];
    if (workspace_size > 0 && work > 0) EXPECT(calculate(p.kind, d, workspace, workspace_size - 1, pointers), INSUFFICIENT_WORKSPACE);
    EXPECT(calculate(p.kind, d, workspace, workspace_size, pointers), SUCCESS);
    for (int i = 0; i < kTensors[p.kind]; ++i) {
      if (p.present[i] && i > 0) continue;
      void* kept = pointers[i];
      pointers[i] = static_cast<char*>(kept) + 1; // out is misaligned, or an absent tensor has a pointer
      REQUIRE(CALL(calculate(p.kind, d, workspace, workspace_size, pointers)) != SCALED_MM_STATUS_SUCCESS);
      pointers[i] = kept;
    }
    free(workspace);
  }
  for (void* pointer : allocated) free(pointer);
}

} // namespace

void use(const Product& p, void* d, bool on_gpu, const Product& other, Random& random) {
  size_t bytes = 0;
  int32_t type = -1, id = -1;
  scaledMMKernelChoice_t choice = {};
  EXPECT(get_workspace_size(d, &bytes), SUCCESS);
  EXPECT(get_device(d, &type, &id), SUCCESS);
  EXPECT(get_kernel(d, &choice), SUCCESS);
  REQUIRE(type == (on_gpu ? SCALED_MM_DEVICE_CUDA : SCALED_MM_DEVICE_CPU) && id == 0);
  REQUIRE(choice.row != nullptr && strlen(choice.row) > 0 && strlen(choice.reason) > 0 && bytes < size_t(1) << 62);
  EXPECT(check(p.kind, d, p), SUCCESS);
  CALL(check(p.kind, d, other));
  void* const none[kMost] = {};
  const scaledMMStatus_t status = CALL(calculate(p.kind, d, nullptr, 0, none));
  REQUIRE(on_gpu || status != SCALED_MM_STATUS_SUCCESS);
  void* wild[kMost];
  for (void*& pointer : wild) pointer = reinterpret_cast<void*>(pick(random, {uintptr_t(1), uintptr_t(4096), UINTPTR_MAX, UINTPTR_MAX - 15}));
  if (!on_gpu) REQUIRE(CALL(calculate(p.kind, d, wild[0], SIZE_MAX, wild)) != SCALED_MM_STATUS_SUCCESS);
  if (on_gpu) launch(p, d, bytes, random);
}

void try_product(scaledMMHandle_t handle, bool on_gpu, const Product& p, const Product& other, Random& random) {
  void* d = reinterpret_cast<void*>(1);
  if (CALL(create(handle, &d, p)) != SCALED_MM_STATUS_SUCCESS) {
    REQUIRE(d == nullptr);
    return;
  }
  use(p, d, on_gpu, other, random);
  EXPECT(destroy(d), SUCCESS);
}

} // namespace hostile
