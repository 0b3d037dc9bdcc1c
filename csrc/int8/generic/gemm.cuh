// The tile kernel of the fallback: any strides and alignment of a, b and out, any K, 0 included. mma.sync, on every architecture. few_rows.cuh has
// the kernels for M <= 64.
#pragma once

#include "int8/epilogue/formula.cuh"
#include "int8/launch.cuh"
#include "int8/mma.cuh"

namespace scaled_mm::generic {

// An operand as rows of K: a's rows are m, b's are n.
struct Operand {
  const int8_t* data;
  int64_t rows, K, stride_row, stride_k, stride_batch;
};

enum class Access { kAligned, kContiguous, kStrided }; // along K: 16-byte loads, bytes in a row, bytes apart

inline Access access_of(const Operand& o) {
  if (o.K > 1 && o.stride_k != 1) return Access::kStrided;
  const bool aligned = reinterpret_cast<uintptr_t>(o.data) % 16 == 0 && (o.rows <= 1 || o.stride_row % 16 == 0) && o.stride_batch % 16 == 0;
  return aligned ? Access::kAligned : Access::kContiguous;
}

// Up to four bytes of a row from k on, zero past its end.
__device__ inline uint32_t load_bytes(const int8_t* row, int64_t k, int64_t K, int64_t stride_k) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (k + i < K) word |= uint32_t(uint8_t(row[(k + i) * stride_k])) << (8 * i);
  }
  return word;
}

// Four bytes of a contiguous row from any address: two aligned words where both lie inside the row, else single bytes.
__device__ inline uint32_t load_unaligned(const int8_t* row, int64_t k, int64_t K) {
  const int8_t* p = row + k;
  const unsigned shift = reinterpret_cast<uintptr_t>(p) & 3;
  if (shift == 0) return k + 4 <= K ? *reinterpret_cast<const uint32_t*>(p) : load_bytes(row, k, K, 1);
  if (k < int64_t(shift) || k - shift + 8 > K) return load_bytes(row, k, K, 1);
  const auto* words = reinterpret_cast<const uint32_t*>(p - shift);
  return __funnelshift_r(words[0], words[1], 8 * shift);
}

// A tile of kRows x kTileK bytes on its way from memory to shared memory, kThreads threads of a block taking part.
template <int kRows, int kTileK, int kThreads>
struct TileLoader {
  static constexpr int kWordsPerRow = kTileK / 4;
  static constexpr int kWords = kRows * kWordsPerRow / kThreads; // a thread's share
  static constexpr int kPitch = kWordsPerRow + 4;                // in words: 4 of padding, against bank conflicts between rows
  static_assert(kRows * kWordsPerRow % (4 * kThreads) == 0, "every thread moves whole 16-byte vectors");

  uint32_t words[kWords];

  __device__ void load(const Operand& o, int batch, Access access, int64_t first_row, int64_t first_k) {
    if (access == Access::kAligned) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const int vector = threadIdx.x + i / 4 * kThreads;
        const int64_t row = first_row + vector / (kWordsPerRow / 4);
        const int64_t k = first_k + vector % (kWordsPerRow / 4) * 16;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < o.rows) {
          const int8_t* data = o.data + batch * o.stride_batch + row * o.stride_row;
          if (k + 16 <= o.K) {
            v = *reinterpret_cast<const uint4*>(data + k);
          } else if (k < o.K) {
            v = make_uint4(load_bytes(data, k, o.K, 1), load_bytes(data, k + 4, o.K, 1), load_bytes(data, k + 8, o.K, 1),
                           load_bytes(data, k + 12, o.K, 1));
          }
        }
        words[i] = v.x;
        words[i + 1] = v.y;
        words[i + 2] = v.z;
        words[i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        int r, w;
        place(access, i, r, w);
        const int64_t row = first_row + r, k = first_k + w * 4;
        words[i] = 0;
        if (row < o.rows && k < o.K) {
          const int8_t* data = o.data + batch * o.stride_batch + row * o.stride_row;
          words[i] = access == Access::kContiguous ? load_unaligned(data, k, o.K) : load_bytes(data, k, o.K, o.stride_k);
        }
      }
    }
  }

  __device__ void store(uint32_t* shared, Access access) const {
    if (access == Access::kAligned) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const int vector = threadIdx.x + i / 4 * kThreads;
        uint32_t* to = shared + vector / (kWordsPerRow / 4) * kPitch + vector % (kWordsPerRow / 4) * 4;
        *reinterpret_cast<uint4*>(to) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        int r, w;
        place(access, i, r, w);
        shared[r * kPitch + w] = words[i];
      }
    }
  }

private:
  // Neighbouring threads read neighbouring addresses: along K where that is contiguous, else along the rows.
  __device__ static void place(Access access, int i, int& row, int& word) {
    const int at = threadIdx.x + i * kThreads;
    row = access == Access::kContiguous ? at / kWordsPerRow : at % kRows;
    word = access == Access::kContiguous ? at % kWordsPerRow : at / kRows;
  }
};

__device__ inline void store_out(int32_t* p, int32_t acc, float, float, float) { *p = acc; }
__device__ inline void store_out(float* p, int32_t acc, float a, float b, float bias) { *p = scale_and_bias(acc, a, b, bias); }
__device__ inline void store_out(__half* p, int32_t acc, float a, float b, float bias) { *p = __float2half_rn(scale_and_bias(acc, a, b, bias)); }
__device__ inline void store_out(__nv_bfloat16* p, int32_t acc, float a, float b, float bias) {
  *p = __float2bfloat16_rn(scale_and_bias(acc, a, b, bias));
}

struct Problem {
  Operand a, b;
  Access access_a, access_b;
  void* out;
  int64_t out_stride_m, out_stride_n, out_stride_batch;
  EpilogueOperands epilogue;
  int tiles_n, tiles; // in a row of tiles, in a product
};

constexpr int kThreads = 128;

// One tile of a product's out, from row tile_m and column tile_n on, by all threads of a block.
template <int kTileM, int kTileN, int kTileK, class Out>
__device__ __forceinline__ void multiply_tile(const Problem& p, int batch, int64_t tile_m, int64_t tile_n) {
  constexpr int kWarpM = kTileM / 2, kWarpN = kTileN / 2; // 2 x 2 warps
  constexpr int kMmaM = kWarpM / 16, kMmaN = kWarpN / 8;
  static_assert(kWarpM % 16 == 0 && kWarpN % 8 == 0 && kTileK % 32 == 0, "whole m16n8k32 fragments");
  using LoaderA = TileLoader<kTileM, kTileK, kThreads>;
  using LoaderB = TileLoader<kTileN, kTileK, kThreads>;
  constexpr int kPitch = LoaderA::kPitch;
  alignas(16) __shared__ uint32_t shared_a[kTileM * kPitch];
  alignas(16) __shared__ uint32_t shared_b[kTileN * kPitch];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, quad = lane % 4; // the fragment layouts of mma.m16n8k32
  const int warp_m = warp / 2 * kWarpM, warp_n = warp % 2 * kWarpN;

  int acc[kMmaM][kMmaN][4] = {};
  LoaderA loader_a;
  LoaderB loader_b;
  const int64_t K = p.a.K;
  // The loads appear once, inside the loop. A second copy before the loop would take longer to compile.
  for (int64_t k = 0;; k += kTileK) {
    if (k > 0) {
      loader_a.store(shared_a, p.access_a);
      loader_b.store(shared_b, p.access_b);
      __syncthreads();
    }
    if (k < K) { // this tile travels while the one before is multiplied
      loader_a.load(p.a, batch, p.access_a, tile_m, k);
      loader_b.load(p.b, batch, p.access_b, tile_n, k);
    }
    if (k == 0) {
      if (K == 0) break;
      continue;
    }
#pragma unroll
    for (int step = 0; step < kTileK / 32; ++step) {
      uint32_t a[kMmaM][4], b[kMmaN][2];
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
        const uint32_t* row = shared_a + (warp_m + i * 16 + group) * kPitch + step * 8 + quad;
        a[i][0] = row[0];
        a[i][1] = row[8 * kPitch];
        a[i][2] = row[4];
        a[i][3] = row[8 * kPitch + 4];
      }
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        const uint32_t* row = shared_b + (warp_n + j * 8 + group) * kPitch + step * 8 + quad;
        b[j][0] = row[0];
        b[j][1] = row[4];
      }
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) mma_m16n8k32(acc[i][j], a[i], b[j]);
      }
    }
    __syncthreads();
    if (k >= K) break;
  }

  const EpilogueOperands& e = p.epilogue;
  constexpr bool kScaled = DtypeOf<Out>::value != SCALED_MM_DTYPE_INT32;
  Out* const out = static_cast<Out*>(p.out) + batch * p.out_stride_batch;
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int64_t n = tile_n + warp_n + j * 8 + quad * 2 + column;
      if (n >= p.b.rows) continue;
      const float b_scale = kScaled ? load_b_scale(e, batch, n) : 0.0f;
      const float bias = kScaled ? load_bias(e, batch, n) : 0.0f;
      const int2 col_terms = e.row_terms ? col_terms_of(e, batch)[n] : make_int2(0, 0);
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t m = tile_m + warp_m + i * 16 + group + half * 8;
          if (m >= p.a.rows) continue;
          int32_t exact = acc[i][j][half * 2 + column];
          if (e.row_terms) exact = subtract_zero_points(exact, row_terms_of(e, batch)[m], col_terms);
          store_out(out + m * p.out_stride_m + n * p.out_stride_n, exact, kScaled ? load_a_scale(e, batch, m) : 0.0f, b_scale, bias);
        }
      }
    }
  }
}

template <int kTileM, int kTileN, int kTileK, class Out>
__global__ void __launch_bounds__(kThreads) gemm_kernel(const __grid_constant__ Problem p) {
  const int batch = int(blockIdx.x) / p.tiles, tile = int(blockIdx.x) % p.tiles;
  multiply_tile<kTileM, kTileN, kTileK, Out>(p, batch, int64_t(tile / p.tiles_n) * kTileM, int64_t(tile % p.tiles_n) * kTileN);
}

// Fills in everything but `tiles`, which depends also on the rows of a kernel's tile.
inline Problem problem_of(const GemmLaunch& l, int64_t tile_n) {
  Problem p{};
  p.a = {static_cast<const int8_t*>(l.a), l.M, l.K, l.a_stride_m, l.a_stride_k, l.batch_strides.a};
  p.b = {static_cast<const int8_t*>(l.b), l.N, l.K, l.b_stride_n, l.b_stride_k, l.batch_strides.b};
  p.access_a = access_of(p.a);
  p.access_b = access_of(p.b);
  p.out = l.out;
  p.out_stride_m = l.out_stride_m;
  p.out_stride_n = l.out_stride_n;
  p.out_stride_batch = l.batch_strides.out;
  p.epilogue = epilogue_operands(l);
  p.tiles_n = int((l.N + tile_n - 1) / tile_n);
  return p;
}

} // namespace scaled_mm::generic
