// CUTLASS 2.x INT8 GEMM by mma.sync, for every architecture from Turing on that has no kernels of its own: cp.async loads
// into a ring of stages, or, with two stages, loads through registers as Turing has to. One kernel config of a table is one instance.
#pragma once

#include <climits>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/epilogue/threadblock/default_epilogue_tensor_op.h"
#include "cutlass/epilogue/threadblock/epilogue_with_visitor_callbacks.h"
#include "cutlass/gemm/threadblock/default_mma.h"

#include "int8/c2x/mma.cuh"
#include "int8/epilogue/visitor_sm80.cuh"
#include "int8/launch.cuh"

namespace scaled_mm::c2x {

template <class T> struct CutlassType {
  using type = T;
};
template <> struct CutlassType<__half> {
  using type = cutlass::half_t;
};
template <> struct CutlassType<__nv_bfloat16> {
  using type = cutlass::bfloat16_t;
};

// What differs between the two generations of mma.sync.
template <bool kTuring> struct Generation {
  using Arch = cutlass::arch::Sm75;
  using Instruction = cutlass::gemm::GemmShape<8, 8, 16>;
};
template <> struct Generation<false> {
  using Arch = cutlass::arch::Sm80;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 32>;
};

template <class Row>
struct Problem {
  typename Row::Mma::IteratorA::Params a_params;
  typename Row::Mma::IteratorB::Params b_params;
  int8_t *a, *b;
  int64_t a_batch, b_batch; // from one product of a batch to the next
  int M, N, K;              // K: whole 16-byte vectors; the epilogue adds what is left
  int tiles_m, tiles_n;
  int* arrived;   // split-K: blocks of a tile that are done, zero before the launch
  int4* partials; // split-K: their sums
  typename Row::Visitor::Params epilogue;
};

// The block's tile. Blocks go down M over kSwizzle tiles side by side, whose part of b stays in L2 meanwhile.
template <int kSwizzle>
__device__ inline cutlass::gemm::GemmCoord tile_of_block(int block, int tiles_m, int tiles_n) {
  const int group = block / (kSwizzle * tiles_m);
  const int first_n = group * kSwizzle;
  const int width = kSwizzle < tiles_n - first_n ? kSwizzle : tiles_n - first_n;
  const int in_group = block - first_n * tiles_m;
  return {in_group / width, first_n + in_group % width, 0};
}

// Adds up what the blocks of a tile have, in the block that comes last: true there, and its accumulators are the tile's sums.
// Exact in any order, as integers are. `last` is shared memory that nobody uses at the moment.
// tile: of all tiles of the batch.
template <class Row>
__device__ inline bool reduce_split(const Problem<Row>& p, int64_t tile, int split, bool& last, typename Row::Mma::FragmentC& accumulators) {
  constexpr int kVectors = Row::Mma::FragmentC::kElements / 4;
  const int thread = int(threadIdx.x);
  const auto partial = [&](int of, int i) -> int4& { return p.partials[((tile * Row::kSplit + of) * kVectors + i) * Row::kThreads + thread]; };
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    partial(split, i) = make_int4(accumulators[4 * i], accumulators[4 * i + 1], accumulators[4 * i + 2], accumulators[4 * i + 3]);
  }
  __threadfence();
  __syncthreads();
  if (thread == 0) last = atomicAdd(p.arrived + tile, 1) == Row::kSplit - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  for (int other = 0; other < Row::kSplit; ++other) {
    if (other == split) continue;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const int4 v = __ldcg(&partial(other, i)); // from L2: L1 is not coherent
      accumulators[4 * i] += v.x;
      accumulators[4 * i + 1] += v.y;
      accumulators[4 * i + 2] += v.z;
      accumulators[4 * i + 3] += v.w;
    }
  }
  return true;
}

// One block at least: without that the compiler spills accumulators of some tiles to fit more blocks.
template <class Row>
__global__ void __launch_bounds__(Row::kThreads, 1) gemm_kernel(const __grid_constant__ Problem<Row> p) {
  using Mma = typename Row::Mma;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Row::SharedStorage*>(shared_bytes);

  const auto tile = tile_of_block<Row::kSwizzle>(int(blockIdx.x), p.tiles_m, p.tiles_n);
  const int thread = int(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0); // the same for the whole warp, and the compiler knows it
  // This block's part of K: whole tiles, the last part what is left.
  const int split = Row::kSplit > 1 ? int(blockIdx.y) : 0;
  const int batch = int(blockIdx.z);
  const int tiles_k = (p.K + Mma::Shape::kK - 1) / Mma::Shape::kK;
  const int part = (tiles_k + Row::kSplit - 1) / Row::kSplit * Mma::Shape::kK;
  const int k_begin = min(split * part, p.K), k_end = min(k_begin + part, p.K);
  const cutlass::MatrixCoord a_offset{tile.m() * Mma::Shape::kM, k_begin}, b_offset{k_begin, tile.n() * Mma::Shape::kN};
  typename Mma::IteratorA iterator_a(p.a_params, p.a + batch * p.a_batch, {p.M, k_end}, thread, a_offset);
  typename Mma::IteratorB iterator_b(p.b_params, p.b + batch * p.b_batch, {k_end, p.N}, thread, b_offset);

  typename Mma::FragmentC accumulators;
  accumulators.clear();
  if (const int iterations = (k_end - k_begin + Mma::Shape::kK - 1) / Mma::Shape::kK) {
    Mma mma(shared.mainloop, thread, warp, lane);
    mma(iterations, accumulators, iterator_a, iterator_b, accumulators);
  }
  if constexpr (Row::kSplit > 1) {
    const int64_t tile_of_all = int64_t(batch) * gridDim.x + blockIdx.x;
    if (!reduce_split(p, tile_of_all, split, shared.last_of_tile, accumulators)) return;
  }
  typename Row::Epilogue epilogue(p.epilogue, shared.epilogue, thread, warp, lane);
  epilogue(accumulators, tile, cute::make_shape(p.M, p.N, 1), thread);
}

template <int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kWarpK, int kStages, int kSwizzle_, int kSplit_, class Out>
struct Gemm {
  static constexpr int kSwizzle = kSwizzle_, kSplit = kSplit_;
  static constexpr int kVectorOut = 16 / sizeof(Out);
  static constexpr int kSlices = kTileK / kWarpK; // warps that share a warp tile, each with a part of the tile's K
  using Arch = typename Generation<kStages == 2>::Arch;
  using Instruction = typename Generation<kStages == 2>::Instruction;
  using Tile = cutlass::gemm::GemmShape<kTileM, kTileN, kTileK>;
  using Warp = cutlass::gemm::GemmShape<kWarpM, kWarpN, kWarpK>;
  using ElementOut = typename CutlassType<Out>::type;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;

  using Mma = typename cutlass::gemm::threadblock::DefaultMma<int8_t, RowMajor, 16, int8_t, ColumnMajor, 16, int32_t, RowMajor,
                                                              cutlass::arch::OpClassTensorOp, Arch, Tile, Warp, Instruction, kStages,
                                                              cutlass::arch::OpMultiplyAdd>::ThreadblockMma;

  using ThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, Warp, ElementOut, kVectorOut>;
  using Visitor = ScaledEpilogueSm80<ThreadMap, Out>;
  // Of CUTLASS's own epilogue only the way of the accumulators through shared memory is used.
  using Exchange = cutlass::epilogue::threadblock::DefaultEpilogueTensorOp<
      Tile, typename Mma::Operator, kSlices, cutlass::epilogue::thread::LinearCombination<ElementOut, kVectorOut, int32_t, float>, kVectorOut>;
  using Epilogue = cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<typename Exchange::Epilogue, Visitor, 1, false>;

  static constexpr int kThreads = Tile::kM / Warp::kM * (Tile::kN / Warp::kN) * kSlices * 32;
  union SharedStorage {
    typename Mma::SharedStorage mainloop;
    typename Epilogue::SharedStorage epilogue;
    bool last_of_tile;
  };
  static constexpr int kSharedMemory = sizeof(SharedStorage);

  static DeviceKernel& kernel() {
    static DeviceKernel one(&gemm_kernel<Gemm>);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    return prepare_kernel(kernel(), kSharedMemory, device, message, size);
  }

  static int64_t tiles(int64_t M, int64_t N) { return (M + kTileM - 1) / kTileM * ((N + kTileN - 1) / kTileN); }
  // A counter for every tile, then its blocks' sums.
  static int64_t counter_bytes(int64_t M, int64_t N, int64_t batch) { return (tiles(M, N) * batch * int64_t(sizeof(int)) + 15) / 16 * 16; }
  static int64_t workspace_size(int64_t M, int64_t N, int64_t batch) {
    return counter_bytes(M, N, batch) + tiles(M, N) * batch * kSplit * kTileM * kTileN * kSlices * int64_t(sizeof(int));
  }

  static scaledMMStatus_t clear_counters(const GemmLaunch& l, char* message, size_t size) {
    CurrentDevice current(l.device);
    if (current.error()) return cuda_failure(current.error(), "cudaSetDevice", message, size);
    if (cudaError_t error = cudaMemsetAsync(l.workspace, 0, size_t(counter_bytes(l.M, l.N, l.batch)), static_cast<cudaStream_t>(l.stream))) {
      cudaGetLastError();
      return cuda_failure(error, "cudaMemsetAsync", message, size);
    }
    return SCALED_MM_STATUS_SUCCESS;
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    const int64_t tiles_m = (l.M + kTileM - 1) / kTileM, tiles_n = (l.N + kTileN - 1) / kTileN;
    // Coordinates are 32-bit, those of the last tile's far corner too.
    constexpr int64_t kMost = INT_MAX;
    if (l.M > kMost - kTileM || l.N > kMost - kTileN || tiles_m > kMost / (tiles_n * kSwizzle)) {
      snprintf(message, size, "out: expected at most %d rows, columns and tiles of %dx%d, got M = %lld, N = %lld", INT_MAX, kTileM, kTileN,
               static_cast<long long>(l.M), static_cast<long long>(l.N));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    // A dimension of one has no stride of its own.
    const int64_t lda = l.M > 1 ? l.a_stride_m : 0, ldb = l.N > 1 ? l.b_stride_n : 0, ldd = l.M > 1 ? l.out_stride_m : 0;
    const auto *a = static_cast<const int8_t*>(l.a), *b = static_cast<const int8_t*>(l.b);
    const int K = int(l.K), whole = K / 16 * 16;
    Problem<Gemm> p{
        typename Mma::IteratorA::Params(RowMajor(lda)),
        typename Mma::IteratorB::Params(ColumnMajor(ldb)),
        const_cast<int8_t*>(a),
        const_cast<int8_t*>(b),
        l.batch_strides.a,
        l.batch_strides.b,
        int(l.M),
        int(l.N),
        whole,
        int(tiles_m),
        int(tiles_n),
        nullptr,
        nullptr,
        {epilogue_operands(l), {a, b, lda, ldb, whole, K, l.batch_strides.a, l.batch_strides.b}, static_cast<Out*>(l.out), ldd, l.batch_strides.out}};
    if constexpr (kSplit > 1) {
      if (scaledMMStatus_t status = clear_counters(l, message, size)) return status;
      p.arrived = static_cast<int*>(l.workspace);
      p.partials = reinterpret_cast<int4*>(static_cast<char*>(l.workspace) + counter_bytes(l.M, l.N, l.batch));
    }
    LaunchShape shape;
    shape.grid = dim3(unsigned(tiles_m * tiles_n), kSplit, unsigned(l.batch)); // the core keeps the batch within the grid's limit
    shape.block = dim3(kThreads);
    shape.shared_memory = kSharedMemory;
    void* pointers[] = {&p};
    return launch_kernel(kernel(), shape, pointers, l, message, size);
  }

  static constexpr Kernel entry(const char* row) {
    return {row, DtypeOf<Out>::value, kSharedMemory, &prepare, &launch, kSplit > 1 ? &workspace_size : nullptr};
  }
};

} // namespace scaled_mm::c2x
