// Null pointers, objects of the wrong kind, destroyed objects.
#include "hostile.h"

#include <climits>

namespace hostile {

void null_pointers(scaledMMHandle_t handle) {
  context = "null pointers";
  scaledMMHandleInfo_t info;
  EXPECT(scaledMMCreateHandle(nullptr, SCALED_MM_DEVICE_CPU, 0, nullptr), NULL_POINTER);
  EXPECT(scaledMMDestroyHandle(nullptr), NULL_POINTER);
  EXPECT(scaledMMGetHandleInfo(nullptr, &info), NULL_POINTER);
  EXPECT(scaledMMGetHandleInfo(handle, nullptr), NULL_POINTER);
  for (int k = 0; k < kKinds; ++k) {
    const Kind kind = Kind(k);
    const Product p = plain(kind);
    void* d = nullptr;
    void* const none[kMost] = {};
    size_t bytes;
    int32_t type, id;
    scaledMMKernelChoice_t choice;
    EXPECT(create(nullptr, &d, p), NULL_POINTER);
    EXPECT(create(handle, nullptr, p), NULL_POINTER);
    Product missing = p;
    for (bool& present : missing.present) present = false;
    EXPECT(create(handle, &d, missing), NULL_POINTER);
    EXPECT(create(handle, &d, p), SUCCESS);
    EXPECT_MESSAGE(get_workspace_size(d, nullptr), NULL_POINTER, "bytes: expected");
    EXPECT_MESSAGE(get_kernel(d, nullptr), NULL_POINTER, "choice: expected");
    EXPECT(get_device(d, nullptr, &id), NULL_POINTER);
    EXPECT(get_device(d, &type, nullptr), NULL_POINTER);
    EXPECT(calculate(kind, d, nullptr, 0, none), NULL_POINTER);
    EXPECT(check(kind, d, missing), BAD_PARAM);
    EXPECT(get_workspace_size(nullptr, &bytes), NULL_POINTER);
    EXPECT(get_kernel(nullptr, &choice), NULL_POINTER);
    EXPECT(get_device(nullptr, &type, &id), NULL_POINTER);
    EXPECT(calculate(kind, nullptr, nullptr, 0, none), NULL_POINTER);
    EXPECT(check(kind, nullptr, p), NULL_POINTER);
    EXPECT(destroy(d), SUCCESS);
    EXPECT(destroy(nullptr), NULL_POINTER);
  }
}

namespace {

// Functions that take the kind of product refuse the object, and the message says what it is.
void refuse_kind(Kind kind, void* object, const char* got) {
  const Product p = plain(kind);
  void* const none[kMost] = {};
  EXPECT_MESSAGE(check(kind, object, p), BAD_PARAM, got);
  EXPECT_MESSAGE(calculate(kind, object, nullptr, 0, none), BAD_PARAM, got);
}

// All functions of descriptors refuse the object, and say what it is.
void refuse_object(Kind kind, void* object, const char* got) {
  size_t bytes;
  int32_t type, id;
  scaledMMKernelChoice_t choice;
  EXPECT_MESSAGE(get_workspace_size(object, &bytes), BAD_PARAM, got);
  EXPECT_MESSAGE(get_device(object, &type, &id), BAD_PARAM, got);
  EXPECT_MESSAGE(get_kernel(object, &choice), BAD_PARAM, got);
  refuse_kind(kind, object, got);
  EXPECT_MESSAGE(destroy(object), BAD_PARAM, got);
}

void refuse_as_handle(void* object, const char* got) {
  const auto handle = static_cast<scaledMMHandle_t>(object);
  scaledMMHandleInfo_t info;
  void* d = nullptr;
  EXPECT_MESSAGE(scaledMMGetHandleInfo(handle, &info), BAD_PARAM, got);
  for (int kind = 0; kind < kKinds; ++kind) EXPECT_MESSAGE(create(handle, &d, plain(Kind(kind))), BAD_PARAM, got);
  EXPECT_MESSAGE(scaledMMDestroyHandle(handle), BAD_PARAM, got);
}

} // namespace

void wrong_objects() {
  scaledMMHandle_t handle = nullptr;
  void* objects[kKinds] = {};
  EXPECT(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CPU, 0, nullptr), SUCCESS);
  for (int kind = 0; kind < kKinds; ++kind) EXPECT(create(handle, &objects[kind], plain(Kind(kind))), SUCCESS);
  for (int kind = 0; kind < kKinds; ++kind) {
    context = "wrong kind " + std::to_string(kind);
    refuse_object(Kind(kind), handle, "got a handle");
    refuse_as_handle(objects[kind], "got a descriptor");
    for (int other = 0; other < kKinds; ++other) {
      if (other != kind) refuse_kind(Kind(kind), objects[other], kGot[other]);
    }
    const auto d = static_cast<scaledMMDescriptor_t>(objects[kind]);
    const Descs descs(plain(Kind(kind)));
    const int32_t own = kProducts[kind];
    void* const none[kMost] = {};
    int unknown = 0; // the first number that is no scaledMMProduct_t
    while (scaledMMGetOperandName(unknown, 0) != nullptr) ++unknown;
    for (int product : {-1, unknown, INT_MAX, INT_MIN}) {
      EXPECT_MESSAGE(scaledMMCheckTensors(d, product, descs.t, kMost), BAD_PARAM, "product: expected a scaledMMProduct_t");
      EXPECT_MESSAGE(scaledMMCalculate(d, product, nullptr, 0, none, kMost, nullptr), BAD_PARAM, "product: expected a scaledMMProduct_t");
      REQUIRE(scaledMMGetOperandName(product, 0) == nullptr);
    }
    for (int count : {-1, 0, kTensors[kind] - 1, kTensors[kind] + 1, INT_MAX}) {
      EXPECT_MESSAGE(scaledMMCheckTensors(d, own, descs.t, count), BAD_PARAM, "operands: expected");
      EXPECT_MESSAGE(scaledMMCalculate(d, own, nullptr, 0, none, count, nullptr), BAD_PARAM, "operands: expected");
      REQUIRE(count < kTensors[kind] || scaledMMGetOperandName(own, count) == nullptr);
    }
    EXPECT_MESSAGE(scaledMMCheckTensors(d, own, nullptr, kTensors[kind]), NULL_POINTER, "operands: expected");
    EXPECT_MESSAGE(scaledMMCalculate(d, own, nullptr, 0, nullptr, kTensors[kind], nullptr), NULL_POINTER, "operands: expected");
  }
  alignas(16) static char memory[8192] = {};
  for (int kind = 0; kind < kKinds; ++kind) refuse_object(Kind(kind), memory + 64, "got a pointer that no create function wrote");

  for (int kind = 0; kind < kKinds; ++kind) {
    context = "destroyed " + std::to_string(kind);
    EXPECT(destroy(objects[kind]), SUCCESS);
    refuse_object(Kind(kind), objects[kind], "got a destroyed descriptor");
  }
  EXPECT(scaledMMDestroyHandle(handle), SUCCESS);
  refuse_as_handle(handle, "got a destroyed handle");
  refuse_object(kGemm, handle, "got a destroyed handle");

  context = "a descriptor outlives its handle";
  void* d = nullptr;
  scaledMMHandle_t second = nullptr;
  EXPECT(scaledMMCreateHandle(&second, SCALED_MM_DEVICE_CPU, 0, nullptr), SUCCESS);
  EXPECT(create(second, &d, plain(kGemm)), SUCCESS);
  EXPECT(scaledMMDestroyHandle(second), SUCCESS);
  EXPECT(check(kGemm, d, plain(kGemm)), SUCCESS);
  EXPECT(destroy(d), SUCCESS);
}

} // namespace hostile
