// The fused epilogue as a visitor of CUTLASS 2.x's epilogue: the counterpart of visitor_sm90.cuh for mma.sync kernels.
//
// CUTLASS brings the accumulators through shared memory, so that a thread visits 16 bytes of out side by side. What varies
// along N is read into registers once a tile, since a thread keeps its columns; what varies along M once a step of rows.
#pragma once

#include "cutlass/epilogue/threadblock/fusion/visitor_2x.hpp"

#include "int8/epilogue/formula.cuh"

namespace scaled_mm {

// Rows of K bytes, as the epilogue sees them: only past `begin`, for what the main loop's 16-byte loads left over.
struct KTail {
  const int8_t *a, *b;
  int64_t a_stride, b_stride;
  int begin, end;
  int64_t a_batch = 0, b_batch = 0; // from one product of a batch to the next
};

// Four bytes of a row from k on, zero past its end. Rows start on 16 bytes and k is a multiple of 4.
__device__ inline int load_tail(const int8_t* row, int k, int end) {
  if (k + 4 <= end) return *reinterpret_cast<const int*>(row + k);
  uint32_t word = 0;
  for (int i = 0; k + i < end; ++i) word |= uint32_t(uint8_t(row[k + i])) << (8 * i);
  return int(word);
}

// sum of a[m, k] * b[k, n] over the tail.
__device__ inline int32_t multiply_tail(const KTail& t, int batch, int64_t m, int64_t n) {
  const int8_t *a = t.a + batch * t.a_batch + m * t.a_stride, *b = t.b + batch * t.b_batch + n * t.b_stride;
  int32_t sum = 0;
  for (int k = t.begin; k < t.end; k += 4) sum = __dp4a(load_tail(a, k, t.end), load_tail(b, k, t.end), sum);
  return sum;
}

__device__ inline void convert(int32_t* out, const float (&)[4], const int32_t (&exact)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = exact[i];
}
__device__ inline void convert(float* out, const float (&scaled)[4], const int32_t (&)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = scaled[i];
}
__device__ inline void convert(__half* out, const float (&scaled)[8], const int32_t (&)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) reinterpret_cast<__half2*>(out)[i / 2] = __floats2half2_rn(scaled[i], scaled[i + 1]);
}
__device__ inline void convert(__nv_bfloat16* out, const float (&scaled)[8], const int32_t (&)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    reinterpret_cast<__nv_bfloat162*>(out)[i / 2] = __floats2bfloat162_rn(scaled[i], scaled[i + 1]);
  }
}

// ThreadMap: cutlass's OutputTileThreadLayout of the tile, which says where in out each visited vector lies.
template <class ThreadMap, class Out>
struct ScaledEpilogueSm80 {
  static constexpr bool kScaled = DtypeOf<Out>::value != SCALED_MM_DTYPE_INT32;
  static constexpr int kVector = ThreadMap::kElementsPerAccess;
  static constexpr int kColumns = ThreadMap::Iterations::kColumn; // vectors of a thread side by side in a row
  static constexpr int kRows = ThreadMap::Iterations::kRow;       // rows of a thread in a step
  static_assert(kVector * sizeof(Out) == 16, "a thread stores 16 bytes at a time");

  struct Params {
    EpilogueOperands operands;
    KTail tail;
    Out* out;
    int64_t out_stride, out_batch = 0;
  };
  using Arguments = Params;
  struct SharedStorage {};

  CUTLASS_DEVICE ScaledEpilogueSm80(Params const& params, SharedStorage const&) : params_(params) {}

  template <class Coords>
  struct Callbacks : cutlass::epilogue::threadblock::detail::EmptyCallbacks {
    Params const& p;
    Coords coords; // (VECTOR, COLUMN, ROW, STEP) -> (m, n) in out
    int M, N, batch;
    float b_scale[kColumns][kVector], bias[kColumns][kVector];
    float a_scale[kRows];

    CUTLASS_DEVICE Callbacks(Params const& params, Coords const& where, int m, int n)
        : p(params), coords(where), M(m), N(n), batch(int(blockIdx.z)) {}

    CUTLASS_DEVICE void begin_epilogue() {
      if constexpr (kScaled) {
        CUTLASS_PRAGMA_UNROLL
        for (int column = 0; column < kColumns; ++column) {
          const int n = cute::get<1>(coords(0, column, 0, 0));
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kVector; ++i) {
            const bool inside = n + i < N;
            b_scale[column][i] = inside ? load_b_scale(p.operands, batch, n + i) : 0.0f;
            bias[column][i] = inside ? load_bias(p.operands, batch, n + i) : 0.0f;
          }
        }
      }
    }

    CUTLASS_DEVICE void begin_step(int step) {
      if constexpr (kScaled) {
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < kRows; ++row) {
          const int m = cute::get<0>(coords(0, 0, row, step));
          a_scale[row] = m < M ? load_a_scale(p.operands, batch, m) : 0.0f;
        }
      }
    }

    CUTLASS_DEVICE void visit(int step, int row, int column, int, cutlass::Array<int32_t, kVector> const& acc) {
      const auto where = coords(0, column, row, step);
      const int64_t m = cute::get<0>(where), n = cute::get<1>(where);
      if (m >= M || n >= N) return;
      const int inside = N - n < kVector ? int(N - n) : kVector;

      int32_t exact[kVector];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) exact[i] = acc[i];
      if (p.tail.begin < p.tail.end) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVector; ++i) {
          if (i < inside) exact[i] += multiply_tail(p.tail, batch, m, n + i);
        }
      }
      if (p.operands.row_terms) {
        const int2 row_terms = row_terms_of(p.operands, batch)[m];
        const int2* col_terms = col_terms_of(p.operands, batch);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVector; ++i) {
          if (i < inside) exact[i] = subtract_zero_points(exact[i], row_terms, col_terms[n + i]);
        }
      }
      float scaled[kVector];
      if constexpr (kScaled) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVector; ++i) scaled[i] = scale_and_bias(exact[i], a_scale[row], b_scale[column][i], bias[column][i]);
      }
      alignas(16) Out vector[kVector];
      convert(vector, scaled, exact);
      Out* out = p.out + batch * p.out_batch + m * p.out_stride + n;
      if (inside == kVector) {
        *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(vector);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVector; ++i) {
          if (i < inside) out[i] = vector[i];
        }
      }
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord tile, int thread, ProblemShape shape) {
    const auto coords = cute::group_modes<3, 6>(ThreadMap::partition(cute::make_identity_tensor(shape), thread, tile));
    return Callbacks<decltype(coords)>(params_, coords, cute::get<0>(shape), cute::get<1>(shape));
  }

private:
  Params const& params_;
};

} // namespace scaled_mm
