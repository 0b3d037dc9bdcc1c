// The grouped variant of the mma.sync kernels of c2x/: one launch, whose blocks go from tile to tile of all experts.
#pragma once

#include "int8/c2x/gemm.cuh"
#include "int8/grouped/launch.cuh"

namespace scaled_mm::grouped {

template <class Row>
struct C2xProblem {
  Experts experts;
  ExpertStrides strides;
  typename Row::Mma::IteratorA::Params a_params;
  typename Row::Mma::IteratorB::Params b_params;
  int N, K; // K: whole 16-byte vectors; the epilogue adds what is left
  int tiles_n;
  typename Row::Visitor::Params epilogue; // of expert 0, as if all tokens were its
};

// In shared memory after the main loop. In registers, the operands of the tile's expert would spill.
template <class Row>
struct C2xEpilogueStorage {
  typename Row::Epilogue::SharedStorage exchange;
  typename Row::Visitor::Params own;
};

template <class Row>
__global__ void __launch_bounds__(Row::kThreads, 1) c2x_kernel(const __grid_constant__ C2xProblem<Row> p) {
  using Mma = typename Row::Mma;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Row::SharedStorage*>(shared_bytes);
  const int thread = int(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(kWholeWarp, thread / 32, 0); // the same for the whole warp, and the compiler knows it
  const auto& all = p.epilogue;

  TileWalk<Mma::Shape::kM> walk(p.experts, p.tiles_n);
  for (int number = int(blockIdx.x); walk.find(number); number += int(gridDim.x)) {
    const int begin = walk.begin, rows = walk.rows;
    const int8_t* a = all.tail.a + begin * all.tail.a_stride;
    const int8_t* b = all.tail.b + walk.expert * p.strides.b;
    const int tiles_m = (rows + Mma::Shape::kM - 1) / Mma::Shape::kM;
    const auto tile = c2x::tile_of_block<Row::kSwizzle>(walk.in_expert, tiles_m, p.tiles_n);
    typename Mma::IteratorA iterator_a(p.a_params, const_cast<int8_t*>(a), {rows, p.K}, thread, {tile.m() * Mma::Shape::kM, 0});
    typename Mma::IteratorB iterator_b(p.b_params, const_cast<int8_t*>(b), {p.K, p.N}, thread, {0, tile.n() * Mma::Shape::kN});

    typename Mma::FragmentC accumulators;
    accumulators.clear();
    __syncthreads(); // shared memory still holds the epilogue of the tile before
    if (const int iterations = (p.K + Mma::Shape::kK - 1) / Mma::Shape::kK) {
      Mma mma(shared.mainloop, thread, warp, lane);
      mma(iterations, accumulators, iterator_a, iterator_b, accumulators);
    }
    auto& storage = *reinterpret_cast<C2xEpilogueStorage<Row>*>(shared_bytes);
    __syncthreads(); // every warp has read its last stage
    if (thread == 0) {
      storage.own = {operands_of_expert(all.operands, p.strides, walk.expert, begin),
                     {a, b, all.tail.a_stride, all.tail.b_stride, all.tail.begin, all.tail.end},
                     all.out + begin * all.out_stride,
                     all.out_stride};
    }
    __syncthreads();
    typename Row::Epilogue epilogue(storage.own, storage.exchange, thread, warp, lane);
    epilogue(accumulators, tile, cute::make_shape(rows, p.N, 1), thread);
  }
  clear_rows(all.out, all.out_stride, 1, walk.rows_end(), p.experts.zeroed, p.N, int(blockDim.x));
}

// Row: an instance of c2x::Gemm, whose tile, main loop and epilogue this takes over; Out: its output type.
template <class Row, class Out>
struct C2x {
  static_assert(Row::kSplit == 1, "a grouped row does not split K");
  static_assert(sizeof(C2xEpilogueStorage<Row>) <= Row::kSharedMemory, "the epilogue's storage must fit into the main loop's shared memory");
  static constexpr int kSharedMemory = Row::kSharedMemory;
  using Mma = typename Row::Mma;

  static PersistentKernel& kernel() {
    static PersistentKernel one(&c2x_kernel<Row>, Row::kThreads, kSharedMemory);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) { return kernel().prepare(device, message, size); }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    // A dimension of one has no stride of its own.
    const int64_t lda = l.M > 1 ? l.a_stride_m : 0, ldb = l.N > 1 ? l.b_stride_n : 0, ldd = l.M > 1 ? l.out_stride_m : 0;
    const auto *a = static_cast<const int8_t*>(l.a), *b = static_cast<const int8_t*>(l.b);
    const int K = int(l.K), whole = K / 16 * 16;
    const int64_t tiles_n = (l.N + Mma::Shape::kN - 1) / Mma::Shape::kN;
    C2xProblem<Row> p{experts_of(l),
                      expert_strides(l),
                      typename Mma::IteratorA::Params(cutlass::layout::RowMajor(lda)),
                      typename Mma::IteratorB::Params(cutlass::layout::ColumnMajor(ldb)),
                      int(l.N),
                      whole,
                      int(tiles_n),
                      {epilogue_operands(l), {a, b, lda, ldb, whole, K}, static_cast<Out*>(l.out), ldd}};
    return kernel().launch(l, Mma::Shape::kM, Mma::Shape::kN, &p, message, size);
  }

  static constexpr Kernel entry(const char* row) { return {row, DtypeOf<Out>::value, kSharedMemory, &prepare, &launch}; }
};

} // namespace scaled_mm::grouped
