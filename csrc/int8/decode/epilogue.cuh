// From a block's sums to the output: the cluster's sums, the formula, the store.
#pragma once

#include "int8/decode/storage.cuh"

namespace scaled_mm::decode {

using namespace cute;

// What the epilogue needs of this block's rows and columns: fetched before the tile is multiplied, put into shared memory after it.
template <int kColumns, class Out, class S>
class Operands {
public:
  __device__ void fetch(const EpilogueOperands& e, int first_column, int first_row, int columns, int rows, int batch) {
    const int thread = int(threadIdx.x);
    if (thread < columns) {
      const int64_t n = int64_t(first_column) + thread;
      if constexpr (!is_same_v<Out, int32_t>) {
        b_scale_ = load_b_scale(e, batch, n);
        bias_ = load_bias(e, batch, n);
      }
      if (e.row_terms) col_terms_ = col_terms_of(e, batch)[n];
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kEach; ++i) {
      if (thread + i * kThreads >= rows) break;
      const int64_t m = int64_t(first_row) + thread + i * kThreads;
      if constexpr (!is_same_v<Out, int32_t>) a_scale_[i] = load_a_scale(e, batch, m);
      if (e.row_terms) row_terms_[i] = row_terms_of(e, batch)[m];
    }
  }

  __device__ void put(const EpilogueOperands& e, S& shared) const {
    const int thread = int(threadIdx.x);
    if (thread < kColumns) {
      shared.b_scale[thread] = b_scale_;
      shared.bias[thread] = bias_;
      if (e.row_terms) shared.col_terms[thread] = col_terms_;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kEach; ++i) {
      if (thread + i * kThreads >= S::kSlice) break;
      shared.a_scale[thread + i * kThreads] = a_scale_[i];
      if (e.row_terms) shared.row_terms[thread + i * kThreads] = row_terms_[i];
    }
  }

private:
  static constexpr int kThreads = consumers(kColumns), kEach = (S::kSlice + kThreads - 1) / kThreads;
  float b_scale_ = 0.0f, bias_ = 0.0f, a_scale_[kEach] = {};
  int2 col_terms_ = {0, 0}, row_terms_[kEach] = {};
};

// Sends this block's sums of rows that other blocks own to their owners. An owner adds what it receives; `own`: the complete sums of its rows.
// number: how many tiles the block has computed before. A sender may end while its words are under way: the receiver waits for them.
template <int kSplit, class S, class Accumulators, int kOwn>
__device__ void exchange(S& shared, const Accumulators& all, int32_t (&own)[kOwn], int part, int share, int number) {
  static_assert(kOwn % 4 == 0, "a fragment of 8 rows is four accumulators of a thread");
  auto& e = shared.exchange;
  constexpr int kThreads = int(sizeof(e.sums[0][0]) / sizeof(int4)) * 4 / kOwn;
  const int buffer = number % S::kBuffers, use = number / S::kBuffers, thread = int(threadIdx.x);
  const uint32_t summed = cast_smem_ptr_to_uint(&e.summed[buffer]), drained = cast_smem_ptr_to_uint(&e.drained[buffer]);
  const bool owns = part < S::kOwners;
  if (owns && thread == 0) e.summed[buffer].arrive_and_expect_tx(sizeof(e.sums[0]));
  if (use > 0) wait_for_cluster(drained, (use - 1) & 1);
  CUTLASS_PRAGMA_UNROLL
  for (int owner = 0; owner < S::kOwners; ++owner) {
    if (owner == part) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOwn; ++i) own[i] = all(owner * kOwn + i);
      continue;
    }
    const uint32_t rank = owner + share * kSplit, barrier = set_block_rank(summed, rank);
    const uint32_t words = set_block_rank(cast_smem_ptr_to_uint(&e.sums[buffer][part - (part > owner)][thread]), rank);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOwn; i += 4) {
      const int at = owner * kOwn + i;
      store_remote(words + i / 4 * kThreads * int(sizeof(int4)), barrier, all(at), all(at + 1), all(at + 2), all(at + 3));
    }
  }
  if (!owns) return;
  wait_for_cluster(summed, use & 1);
  CUTLASS_PRAGMA_UNROLL
  for (int other = 0; other < kSplit - 1; ++other) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOwn; i += 4) {
      const int4 four = e.sums[buffer][other][i / 4 * kThreads + thread];
      own[i] += four.x;
      own[i + 1] += four.y;
      own[i + 2] += four.z;
      own[i + 3] += four.w;
    }
  }
}

// Tells the blocks that share the tile that this one, an owner, has taken its sums: their buffer is free. After all its threads have.
template <int kSplit, class S>
__device__ void drain(S& shared, int share, int number) {
  if (threadIdx.x < kSplit) arrive_remote(cast_smem_ptr_to_uint(&shared.exchange.drained[number % S::kBuffers]), int(threadIdx.x) + share * kSplit);
}

// The tile's values, from its sums into shared memory. where: of a thread's accumulators in the tile.
template <class Out, class S, int kOwn, class Where>
__device__ void compute(const EpilogueOperands& e, S& shared, const int32_t (&sums)[kOwn], const Where& where) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const int n = int(get<0>(where(i))), m = int(get<1>(where(i)));
    const int32_t exact = e.row_terms ? subtract_zero_points(sums[i], shared.row_terms[m], shared.col_terms[n]) : sums[i];
    if constexpr (is_same_v<Out, int32_t>) {
      shared.out[m][n] = exact;
    } else {
      shared.out[m][n] = Out(scale_and_bias(exact, shared.a_scale[m], shared.b_scale[n], shared.bias[n]));
    }
  }
}

// The part of the tile that is inside out, from shared memory.
template <int kColumns, class P, class S>
__device__ void store(const P& p, const S& shared, int first_column, int first_row, int columns, int rows, int batch) {
  using Out = std::remove_all_extents_t<decltype(shared.out)>;
  constexpr int kThreads = consumers(kColumns);
  Out* const out = static_cast<Out*>(p.out) + batch * p.out_batch + int64_t(first_row) * p.out_stride_m + first_column * p.out_stride_n;
  if (p.whole_vectors) {
    constexpr int kVector = 16 / int(sizeof(Out)), kAcross = kColumns / kVector;
    for (int i = int(threadIdx.x); i < rows * kAcross; i += kThreads) {
      const int m = i / kAcross, n = i % kAcross * kVector;
      if (n < columns) *reinterpret_cast<int4*>(out + m * p.out_stride_m + n) = *reinterpret_cast<const int4*>(&shared.out[m][n]);
    }
  } else {
    for (int i = int(threadIdx.x); i < rows * kColumns; i += kThreads) {
      const int m = i / kColumns, n = i % kColumns;
      if (n < columns) out[m * p.out_stride_m + n * p.out_stride_n] = shared.out[m][n];
    }
  }
}

} // namespace scaled_mm::decode
