// Handles and descriptors: what a caller holds by an opaque pointer, and what tells a wrong pointer from a right one.
//
// The memory of an object is never given back: the next object of its kind uses it again. So the tag in front of an object may be read
// after it was destroyed, and another kind of object or a destroyed one is a typed error, for one load and one comparison a call.
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
constexpr uint64_t kDestroyed = 1 << 16; // in the tag of an object that was destroyed

struct alignas(std::max_align_t) ObjectHeader {
  std::atomic<uint64_t> tag;
  ObjectHeader* next; // of the destroyed objects
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

// T has its kind as T::kObject. An object counts as destroyed until it is published. nullptr: out of host memory.
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

// Says what came instead of a live object.
scaledMMStatus_t fail_object(const char* name, ObjectKind kind, const void* object);

template <class T>
scaledMMStatus_t check_object(const char* name, const T* object) {
  if (object != nullptr && header_of(object)->tag.load(std::memory_order_acquire) == tag_of(T::kObject)) return SCALED_MM_STATUS_SUCCESS;
  return fail_object(name, T::kObject, object);
}

// Of several calls for one object, at the same time too, one succeeds.
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
