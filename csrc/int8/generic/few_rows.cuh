// The kernels of the fallback for few rows of a. A warp multiplies 16 * kSlabs columns of b by all rows of a tile. The warps of a thread block
// share K, which keeps many loads under way. Operands go from memory to registers. K must be contiguous in a and in b.
#pragma once

#include "int8/generic/gemm.cuh"

namespace scaled_mm::generic {

// Up to 16 bytes of a row from k on, zero past its end. Rare, and a function of its own: inlined in all places it takes seconds to compile.
__attribute__((noinline)) static __device__ uint4 load_some_bytes(const int8_t* row, int64_t k, int64_t K) {
  if (k >= K) return make_uint4(0, 0, 0, 0);
  return make_uint4(load_bytes(row, k, K, 1), load_bytes(row, k + 4, K, 1), load_bytes(row, k + 8, K, 1), load_bytes(row, k + 12, K, 1));
}

// 16 bytes of a row from k on, zero past its end. Unaligned ones are read from the two aligned vectors around them if both lie in the row, else byte
// by byte.
template <bool kAligned>
__device__ inline uint4 load_16_bytes(const int8_t* row, int64_t k, int64_t K) {
  if constexpr (kAligned) {
    return k + 16 <= K ? *reinterpret_cast<const uint4*>(row + k) : load_some_bytes(row, k, K);
  } else {
    const unsigned shift = reinterpret_cast<uintptr_t>(row + k) % 16;
    if (k < int64_t(shift) || k + 32 - shift > K) return load_some_bytes(row, k, K);
    const uint4* const from = reinterpret_cast<const uint4*>(row + k - shift);
    const uint4 low = from[0], high = from[1];
    // Shifts by 8 bytes, by 4 bytes, then by the remaining bytes.
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], 8 * (shift & 3));
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// kFragments: fragments of 8 rows of a. kSlabs: slabs of 16 columns of b. kAhead: loads under way in a warp, in steps of 64 bytes of K, if operands
// are aligned. kAnyAlignment: unaligned operands are served too.
template <int kFragments, int kSlabs, int kAhead, bool kAnyAlignment, class Out>
struct FewRows {
  static constexpr bool kTakesAny = kAnyAlignment;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 8 * kFragments, kColumns = 16 * kSlabs;
  static constexpr int kBlocks = kRows <= 16 ? 2 : 1; // thread blocks per SM, at least
  static constexpr int kStep = 64;                    // bytes of K: four threads load 16 each of a row
  static constexpr int kPitch = kColumns + 4;         // from row to row of the sums: no bank conflicts within a warp

  int32_t sums[kSlabs][kFragments][4];

  // The order of K does not change an integer sum. So 16 contiguous bytes of a row are a thread's part of the operands of two instructions, without a
  // shuffle.
  template <bool kAligned>
  __device__ void multiply(const Problem& p, int batch, int64_t first_row, int64_t first_column) {
    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    // Rows past the end read the last row. Their sums are not stored.
    const auto row_of = [&](const Operand& o, int64_t row) {
      return o.data + batch * o.stride_batch + (row < o.rows ? row : o.rows - 1) * o.stride_row;
    };
    const int8_t *columns[kSlabs][2], *rows[kFragments];
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      columns[i][0] = row_of(p.b, first_column + i * 16 + group);
      columns[i][1] = row_of(p.b, first_column + i * 16 + group + 8);
    }
#pragma unroll
    for (int i = 0; i < kFragments; ++i) rows[i] = row_of(p.a, first_row + i * 8 + group);

    constexpr int kSteps = kAligned ? kAhead : 1;
    const int64_t K = p.a.K;
    constexpr int kStride = kWarps * kStep; // from one step of a warp to its next
    const int64_t start = int64_t(warp) * kStep + quad * 16;
    for (int64_t first = start; first < K + quad * 16; first += kSteps * kStride) {
      uint4 b[kSteps][kSlabs][2], a[kSteps][kFragments];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int64_t k = first + step * kStride;
#pragma unroll
        for (int i = 0; i < kSlabs; ++i) {
          b[step][i][0] = load_16_bytes<kAligned>(columns[i][0], k, K);
          b[step][i][1] = load_16_bytes<kAligned>(columns[i][1], k, K);
        }
#pragma unroll
        for (int i = 0; i < kFragments; ++i) a[step][i] = load_16_bytes<kAligned>(rows[i], k, K);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kSlabs; ++i) {
          const uint4 low = b[step][i][0], high = b[step][i][1];
          const uint32_t one[4] = {low.x, high.x, low.y, high.y}, two[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int j = 0; j < kFragments; ++j) {
            mma_m16n8k32(sums[i][j], one, {a[step][j].x, a[step][j].y});
            mma_m16n8k32(sums[i][j], two, {a[step][j].z, a[step][j].w});
          }
        }
      }
    }
  }

  // Adds the warps' sums, exactly, and stores the tile.
  __device__ void store(const Problem& p, int batch, int64_t first_row, int64_t first_column) const {
    __shared__ int32_t tile[kRows * kPitch];
    for (int i = threadIdx.x; i < kRows * kPitch; i += kThreads) tile[i] = 0;
    __syncthreads();
    const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) atomicAdd(&tile[(j * 8 + quad * 2 + e % 2) * kPitch + i * 16 + group + e / 2 * 8], sums[i][j][e]);
      }
    }
    __syncthreads();
    const EpilogueOperands& o = p.epilogue;
    constexpr bool kScaled = DtypeOf<Out>::value != SCALED_MM_DTYPE_INT32;
    Out* const out = static_cast<Out*>(p.out) + batch * p.out_stride_batch;
    for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
      const int64_t m = first_row + i / kColumns, n = first_column + i % kColumns;
      if (m >= p.a.rows || n >= p.b.rows) continue;
      int32_t exact = tile[i / kColumns * kPitch + i % kColumns];
      if (o.row_terms) exact = subtract_zero_points(exact, row_terms_of(o, batch)[m], col_terms_of(o, batch)[n]);
      const float a_scale = kScaled ? load_a_scale(o, batch, m) : 0.0f, b_scale = kScaled ? load_b_scale(o, batch, n) : 0.0f;
      store_out(out + m * p.out_stride_m + n * p.out_stride_n, exact, a_scale, b_scale, kScaled ? load_bias(o, batch, n) : 0.0f);
    }
  }
};

// Only two of them take unaligned operands, to save time of compiling, for which a first product waits.
template <class Out>
using Rows8 = FewRows<1, 1, 4, false, Out>;
template <class Out>
using Rows16 = FewRows<2, 1, 4, true, Out>;
template <class Out>
using Rows32 = FewRows<4, 2, 2, false, Out>;
template <class Out>
using Rows64 = FewRows<8, 2, 1, true, Out>;

template <class Tile, class Out>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) few_rows_kernel(const __grid_constant__ Problem p) {
  const int batch = int(blockIdx.x) / p.tiles, number = int(blockIdx.x) % p.tiles;
  // Tiles of the same columns of b are consecutive: L2 has the columns for the second.
  const int tiles_m = p.tiles / p.tiles_n;
  const int64_t first_row = int64_t(number % tiles_m) * Tile::kRows, first_column = int64_t(number / tiles_m) * Tile::kColumns;
  Tile tile = {};
  const bool aligned = p.access_a == Access::kAligned && p.access_b == Access::kAligned;
  if constexpr (Tile::kTakesAny) {
    if (!aligned) tile.template multiply<false>(p, batch, first_row, first_column);
  }
  if (aligned) tile.template multiply<true>(p, batch, first_row, first_column);
  tile.store(p, batch, first_row, first_column);
}

} // namespace scaled_mm::generic
