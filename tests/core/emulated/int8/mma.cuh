// int8/mma.cuh for gpu.h: the fragments as the PTX ISA draws them, multiplied by loops.
#pragma once

#include "gpu.h"

namespace scaled_mm {

inline void mma_m16n8k32(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static uint32_t words_a[64][32][4], words_b[64][32][2];
  const unsigned warp = gpu::thread_index.x / 32, lane = gpu::thread_index.x % 32;
  memcpy(words_a[warp][lane], a, sizeof(a));
  memcpy(words_b[warp][lane], b, sizeof(b));
  gpu::meet();
  for (int i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + i % 2;
    uint32_t sum = uint32_t(d[i]);
    for (unsigned k = 0; k < 32; ++k) {
      // a: rows 0-7 of k 0-15, rows 8-15 of it, then the same of k 16-31; four k in a word. b: k 0-15, then 16-31.
      const auto* of_a = reinterpret_cast<const int8_t*>(&words_a[warp][row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2]);
      const auto* of_b = reinterpret_cast<const int8_t*>(&words_b[warp][column * 4 + k % 16 / 4][k / 16]);
      sum += uint32_t(int32_t(of_a[k % 4]) * of_b[k % 4]);
    }
    d[i] = int(sum);
  }
  gpu::meet();
}

} // namespace scaled_mm
