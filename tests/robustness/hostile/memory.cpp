// A host without memory: each allocation of a call fails in turn.
#include "tables.h"

#include <cstdlib>
#include <new>
#include <string>

namespace hostile {

namespace {

thread_local long allocations_left = -1; // until operator new fails; -1: it never fails
thread_local bool allocation_failed = false;

// Repeats the call and allows one allocation more each time, until none fails.
template <class Call>
void without_memory(const char* what, scaledMMStatus_t last, const Call& call) {
  context = std::string("without memory: ") + what;
  for (long allowed = 0; allowed < 1000; ++allowed) {
    const scaledMMStatus_t status = CALL([&] {
      allocation_failed = false;
      allocations_left = allowed;
      const scaledMMStatus_t answer = call();
      allocations_left = -1;
      return answer;
    }());
    if (!allocation_failed) {
      REQUIRE(status == last);
      return;
    }
    REQUIRE(status == SCALED_MM_STATUS_INTERNAL_ERROR);
  }
  REQUIRE(!"an end to its allocations");
}

} // namespace

void no_host_memory(scaledMMHandle_t cpu, scaledMMHandle_t gpu, const char* kernels) {
#if defined(HOSTILE_UNDER_THREAD_SANITIZER)
  return; // its pthread_once does not support exceptions
#endif
  const std::string name(100, 'n');
  without_memory("tables", SCALED_MM_STATUS_SUCCESS, [&] {
    Table t;
    t.of_gguf();
    t.rows[1].name = t.table.source = name.c_str();
    return scaledMMRegisterTable(&t.table);
  });
  without_memory("libraries", SCALED_MM_STATUS_SUCCESS, [&] { return scaledMMLoadKernels(kernels); });
  scaledMMHandle_t handle = nullptr;
  without_memory("handles", SCALED_MM_STATUS_SUCCESS, [&] { return scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, 0, "sm_of_memory"); });
  EXPECT(scaledMMDestroyHandle(handle), SUCCESS);
  for (int k = 0; k < kKinds; ++k) {
    const Kind kind = Kind(k);
    const Product p = plain(kind);
    Product wrong = p;
    wrong.tensors[0].shape[0] += 1;
    for (scaledMMHandle_t on : {cpu, gpu}) {
      void *first = nullptr, *d = nullptr, *unused = nullptr;
      scaledMMKernelChoice_t choice;
      EXPECT(create(on, &first, p), SUCCESS); // takes the memory of a destroyed one
      without_memory("descriptors", SCALED_MM_STATUS_SUCCESS, [&] { return create(on, &d, p); });
      without_memory("wrong descriptors", SCALED_MM_STATUS_BAD_TENSOR_SHAPE, [&] { return create(on, &unused, wrong); });
      without_memory("reasons", SCALED_MM_STATUS_SUCCESS, [&] { return get_kernel(d, &choice); });
      without_memory("checks", SCALED_MM_STATUS_BAD_TENSOR_SHAPE, [&] { return check(kind, d, wrong); });
      EXPECT(destroy(d), SUCCESS);
      EXPECT(destroy(first), SUCCESS);
    }
  }
}

} // namespace hostile

// Replaced in the whole program, so that allocations of the core can fail.
void* operator new(size_t size) {
  if (hostile::allocations_left == 0) {
    hostile::allocation_failed = true;
    throw std::bad_alloc();
  }
  if (hostile::allocations_left > 0) --hostile::allocations_left;
  if (void* memory = malloc(size)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](size_t size) { return operator new(size); }
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
void operator delete[](void* memory) noexcept { free(memory); }
void operator delete[](void* memory, size_t) noexcept { free(memory); }
