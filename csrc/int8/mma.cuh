// mma.sync for INT8, as PTX. No .satfinite: the accumulator wraps modulo 2^32, which the zero-point arithmetic relies on.
#pragma once

#include <cstdint>

namespace scaled_mm {

// d += a (8 x 16) * b (16 x 8), every architecture from Turing on.
__device__ inline void mma_m8n8k16(int& d0, int& d1, uint32_t a, uint32_t b) {
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};\n" : "+r"(d0), "+r"(d1) : "r"(a), "r"(b));
}

// d += a (16 x 32) * b (32 x 8). Turing has the small instruction only, four of which make this one, fragments included.
__device__ inline void mma_m16n8k32(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  mma_m8n8k16(d[0], d[1], a[0], b[0]);
  mma_m8n8k16(d[0], d[1], a[2], b[1]);
  mma_m8n8k16(d[2], d[3], a[1], b[0]);
  mma_m8n8k16(d[2], d[3], a[3], b[1]);
#else
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

} // namespace scaled_mm
