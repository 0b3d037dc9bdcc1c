#include "core/object.h"

#include <mutex>

#include "core/status.h"

namespace scaled_mm {
namespace {

constexpr const char* kNames[kObjectKinds] = {"handle", "descriptor"};

struct Memory {
  std::mutex mutex;
  ObjectHeader* destroyed = nullptr; // the latest first, because it is in the CPU's caches
};

// Never destroyed: objects may still be used while static objects die.
Memory& memory_of(ObjectKind kind) {
  static Memory* const all = new Memory[kObjectKinds];
  return all[kind];
}

} // namespace

void* take_memory(ObjectKind kind, size_t size) {
  Memory& memory = memory_of(kind);
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    if (ObjectHeader* header = memory.destroyed) {
      memory.destroyed = header->next;
      return header + 1;
    }
  }
  void* fresh = ::operator new(sizeof(ObjectHeader) + size, std::nothrow);
  return fresh ? new (fresh) ObjectHeader{{tag_of(kind) | kDestroyed}, nullptr} + 1 : nullptr;
}

void keep_memory(ObjectKind kind, void* object) {
  Memory& memory = memory_of(kind);
  ObjectHeader* header = header_of(object);
  std::lock_guard<std::mutex> lock(memory.mutex);
  header->next = memory.destroyed;
  memory.destroyed = header;
}

scaledMMStatus_t fail_object(const char* name, ObjectKind kind, const void* object) {
  if (object == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected a %s, got a null pointer", name, kNames[kind]);
  const uint64_t tag = header_of(object)->tag.load(std::memory_order_relaxed);
  for (uint32_t other = 0; other < kObjectKinds; ++other) {
    const uint64_t live = tag_of(ObjectKind(other));
    if (tag != live && tag != (live | kDestroyed)) continue;
    return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected a %s, got a %s%s", name, kNames[kind], tag == live ? "" : "destroyed ", kNames[other]);
  }
  return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected a %s, got a pointer that no create function wrote", name, kNames[kind]);
}

} // namespace scaled_mm
