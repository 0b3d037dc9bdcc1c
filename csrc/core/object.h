// Handles and descriptors, which callers hold by opaque pointers, and the tag that detects a wrong pointer.
//
// The memory of an object is never freed: the next object of its kind reuses it. So the tag in front of an object may be read after the object
// was destroyed. A destroyed object, or one of another kind, gives a typed error at the cost of one load and one comparison per call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "scaled_mm/scaled_mm.h"

namespace scaled_mm {

enum ObjectKind : uint32_t { kHandleObject, kDescriptorObject, kObjectKinds };

constexpr uint64_t tag_of(ObjectKind kind) { return 0x5ca1edbb00000000u | kind; }
constexpr uint64_t kDestroyed = 1 << 16; // set in the tag of a destroyed object

struct alignas(std::max_align_t) ObjectHeader {
  std::atomic<uint64_t> tag;
  ObjectHeader* next; // in the list of destroyed objects
};

inline ObjectHeader* header_of(const void* object) { return const_cast<ObjectHeader*>(static_cast<const ObjectHeader*>(object) - 1); }

void* take_memory(ObjectKind kind, size_t size); // nullptr: out of host memory
void keep_memory(ObjectKind kind, void* memory);

struct Destroy {
  template <class T>
  void operator()(T* object) const {
    object->~T();
    keep_memory(T::kObject, object);
  }
};

// T::kObject is T's kind. An object counts as destroyed until `publish`. nullptr: out of host memory.
template <class T>
std::unique_ptr<T, Destroy> make_object() {
  static_assert(alignof(T) <= alignof(std::max_align_t), "what operator new gives");
  void* memory = take_memory(T::kObject, sizeof(T));
  return std::unique_ptr<T, Destroy>(memory ? new (memory) T : nullptr);
}

template <class T>
T* publish(std::unique_ptr<T, Destroy> made) {
  header_of(made.get())->tag.store(tag_of(T::kObject), std::memory_order_release);
  return made.release();
}

// Fails with a message that says what `object` is instead of a live object of this kind.
scaledMMStatus_t fail_object(const char* name, ObjectKind kind, const void* object);

template <class T>
scaledMMStatus_t check_object(const char* name, const T* object) {
  if (object != nullptr && header_of(object)->tag.load(std::memory_order_acquire) == tag_of(T::kObject)) return SCALED_MM_STATUS_SUCCESS;
  return fail_object(name, T::kObject, object);
}

// If several calls destroy the same object, also concurrently, exactly one succeeds.
template <class T>
scaledMMStatus_t destroy_object(const char* name, T* object) {
  uint64_t tag = tag_of(T::kObject);
  if (object == nullptr || !header_of(object)->tag.compare_exchange_strong(tag, tag | kDestroyed)) {
    return fail_object(name, T::kObject, object);
  }
  Destroy()(object);
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace scaled_mm
