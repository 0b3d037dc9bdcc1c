// How a thread stores its accumulators of a wgmma tile.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

#include "core/kernel_abi.h"

namespace scaled_mm::block_scaled {

// A thread has two rows of the MMA's tile, `sides`, and a quarter of its columns. Accumulator i is that of side i % 4 / 2 and of column number
// i / 4 * 2 + i % 2.
struct WgmmaThread {
  int row, lane; // the first side; in the warp

  __device__ int side(int half) const { return row + half * 8; }
  __device__ int column(int number) const { return number / 2 * 8 + lane % 4 * 2 + number % 2; }
  __device__ int side_of(int i) const { return side(i % 4 / 2); }
  __device__ int column_of(int i) const { return column(i / 4 * 2 + i % 2); }
};

// Transposes 8 x 8 elements of 16 bits. Lane l has row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1.
__device__ inline uint32_t transposed(uint32_t two) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(two));
  return result;
}

// Writes a tile of out, whose rows are sides, or with kSwapAB columns. Rows and columns that out does not have are not written.
template <int kSecond, bool kSwapAB, class Out>
struct WgmmaStore {
  static constexpr int kCount = kSecond / 2; // accumulators

  WgmmaThread thread;
  Out* out;          // the tile's first element
  int rows, columns; // of out, from there on
  int64_t stride_m, stride_n;
  int together; // how many elements of a row may be stored at once, `stored_together`

  // value(i): out's element of accumulator i; called for absent elements too.
  template <class Value>
  __device__ void operator()(const Value& value) const {
    if constexpr (kSwapAB && sizeof(Out) == 2) {
      if (together == 4) return fours(value);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      const int side = thread.side_of(i), column = thread.column_of(i);
      if (side >= (kSwapAB ? columns : rows)) continue;
      if constexpr (kSwapAB) {
        one(column, side, value(i));
        one(column + 1, side, value(i + 1));
      } else if (together >= 2 && column + 1 < columns) {
        *reinterpret_cast<Two*>(out + side * stride_m + column) = {value(i), value(i + 1)};
      } else if (column < columns) {
        one(side, column, value(i));
        one(side, column + 1, value(i + 1));
      }
    }
  }

private:
  struct alignas(2 * sizeof(Out)) Two {
    Out x, y;
  };

  __device__ void one(int m, int n, Out value) const {
    if (m < rows && n < columns) out[m * stride_m + n * stride_n] = value;
  }

  // Four columns of out at once. A warp has 16 columns, two in a lane; transposed, four lanes have the 16 columns of a row.
  template <class Value>
  __device__ void fours(const Value& value) const {
    const int lane = thread.lane;
    const bool odd = lane % 2 != 0;
    const int n = thread.row - lane / 4 + lane % 2 * 8 + lane % 4 / 2 * 4;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; i += 4) {
      __syncwarp(); // lanes whose row is absent have skipped the store
      uint32_t of_half[2];
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const Two two = {value(i + 2 * half), value(i + 2 * half + 1)};
        of_half[half] = transposed(reinterpret_cast<const uint32_t&>(two)); // columns 2 (lane % 4) and the next one of the half
      }
      const uint32_t other = __shfl_xor_sync(~0u, odd ? of_half[0] : of_half[1], 1);
      const uint2 four = odd ? uint2{other, of_half[1]} : uint2{of_half[0], other};
      const int m = i / 4 * 8 + lane / 4;
      if (m >= rows) continue;
      Out* const to = out + m * stride_m + n;
      if (n + 3 < columns) {
        *reinterpret_cast<uint2*>(to) = four;
        continue;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 4; ++e) {
        if (n + e < columns) to[e] = reinterpret_cast<const Out*>(&four)[e];
      }
    }
  }
};

// How many elements of a row of out lie side by side at a multiple of their size: 4, 2 or 1.
template <class Out>
int stored_together(const GemmLaunch& l) {
  for (const int count : {4, 2}) {
    const bool aligned = (l.M == 1 || l.out_stride_m % count == 0) && reinterpret_cast<uintptr_t>(l.out) % (count * sizeof(Out)) == 0;
    if (aligned && l.out_stride_n == 1) return count;
  }
  return 1;
}

} // namespace scaled_mm::block_scaled
