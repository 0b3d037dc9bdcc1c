// int8/block_scaled/instructions.cuh for gpu.h.
#pragma once

#include "gpu.h"

namespace scaled_mm::block_scaled {

inline uint32_t shared_address(const void* pointer) { return uint32_t(static_cast<const unsigned char*>(pointer) - gpu::shared_memory); }
inline unsigned char* shared_pointer(uint32_t address) {
  if (address % 16) gpu::fail("an address in shared memory that is not a multiple of 16");
  if (address + 16 > gpu::shared_size) gpu::fail("an address past the end of shared memory");
  return gpu::shared_memory + address;
}

inline void copy_async(uint32_t shared, const void* global, int bytes) {
  if (bytes < 0 || bytes > 16) gpu::fail("a copy of other than 0 to 16 bytes");
  if (reinterpret_cast<uintptr_t>(global) % 16) gpu::fail("a copy from an address that is not a multiple of 16");
  const gpu::Copy copy = {shared_pointer(shared), global, bytes};
  if (gpu::eager) gpu::land(copy);
  gpu::threads[gpu::thread_index.x].open.push_back(copy);
}

inline void commit_copies() {
  gpu::Thread& t = gpu::threads[gpu::thread_index.x];
  t.groups.push_back(std::move(t.open));
  t.open.clear();
}

template <int kPending>
inline void wait_for_copies() {
  auto& groups = gpu::threads[gpu::thread_index.x].groups;
  while (groups.size() > size_t(kPending)) {
    for (const gpu::Copy& copy : groups.front()) {
      if (!gpu::eager) gpu::land(copy);
    }
    groups.erase(groups.begin());
  }
}

inline void store_shared(uint32_t shared, uint4 v) { memcpy(shared_pointer(shared), &v, 16); }

inline void load_matrices(uint32_t (&words)[4], uint32_t shared) {
  static const unsigned char* rows[64][32];
  const unsigned warp = gpu::thread_index.x / 32, lane = gpu::thread_index.x % 32;
  rows[warp][lane] = shared_pointer(shared);
  gpu::meet();
  for (unsigned i = 0; i < 4; ++i) {
    unsigned banks = 0;
    for (unsigned row = 0; row < 8; ++row) banks |= 1u << reinterpret_cast<uintptr_t>(rows[warp][i * 8 + row]) / 16 % 8;
    if (banks != 255) gpu::fail("two rows of a matrix lie in the same banks");
    memcpy(&words[i], rows[warp][i * 8 + lane / 4] + lane % 4 * 4, 4);
  }
  gpu::meet();
}

} // namespace scaled_mm::block_scaled
