// A kernel for few rows of a, bound by how fast the weights come. out^T = b^T a^T: columns of b fill the wide side of the MMA, 64 to a
// warpgroup.
//
// A cluster of kSplit blocks shares a tile of columns, each block a part of K, so that a small weight keeps all multiprocessors busy. A
// block fills its stages with weights before the preceding kernel has ended where they are constant (docs/decisions/0011): what all
// blocks hold is then read while that kernel finishes. int32 sums are added in shared memory, exactly, in any order: the first blocks of
// a cluster own a slice of the tile's rows each, to which the others add.
#pragma once

#include <climits>
#include <cstdio>
#include <cstring>
#include <new>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/copy_traits_sm90_tma.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"

#include "int8/c3x/grid_dependency.cuh"
#include "int8/c3x/tensor_map.cuh"
#include "int8/decode/pipeline.cuh"
#include "int8/epilogue/formula.cuh"
#include "int8/launch.cuh"

namespace scaled_mm::decode {

using namespace cute;

constexpr int kStepK = 128;  // of a stage: the width of the swizzle
constexpr int consumers(int columns) { return columns * 2; }  // threads: a warpgroup for 64 columns

using SwizzledRows = GMMA::Layout_K_SW128_Atom<int8_t>;
template <int kRows>
using Step = decltype(tile_to_shape(SwizzledRows{}, Shape<Int<kRows>, Int<kStepK>>{}));
template <int kRows, int kStages>
using Steps = decltype(tile_to_shape(SwizzledRows{}, Shape<Int<kRows>, Int<kStepK>, Int<kStages>>{}));

// [rows, K, batch] in device memory, K contiguous.
inline auto operand(const void* data, int64_t rows, int64_t K, int64_t batch, int64_t row_stride, int64_t batch_stride) {
  return make_tensor(make_gmem_ptr(static_cast<const int8_t*>(data)), make_shape(int(rows), int(K), int(batch)),
                     make_stride(row_stride, Int<1>{}, batch_stride));
}
template <int kRows>
auto map_of(decltype(operand(nullptr, 0, 0, 0, 0, 0)) const& tensor) {
  return make_tma_copy(SM90_TMA_LOAD{}, tensor, Step<kRows>{}, Shape<Int<kRows>, Int<kStepK>>{}, Int<1>{});
}
template <int kRows>
using Map = decltype(map_of<kRows>(operand(nullptr, 0, 0, 0, 0, 0)));

template <int kColumns, int kRows>
struct Params {
  Map<kColumns> weights;
  Map<kRows> activations;
  int M, N, K, batch;
  bool early_weights;
  void* out;
  int64_t out_stride_m, out_stride_n, out_batch;
  EpilogueOperands epilogue;
};

// Blocks of a cluster that own rows: as many as divide the tile into whole fragments of 8 rows.
constexpr int owners(int rows, int split) { return split > 1 && rows / 8 % split != 0 ? owners(rows, split / 2) : split; }

template <int kColumns, int kRows, int kStages, int kOwners, class Out>
struct alignas(1024) Shared {
  static constexpr int kSlice = kRows / kOwners;  // rows that the block owns
  int8_t weights[kStages][kColumns * kStepK];
  int8_t activations[kStages][kRows * kStepK];
  union {
    int32_t sums[kColumns * kSlice];  // of the cluster's other blocks, in the order of the threads' accumulators
    Out out[kSlice][kColumns];        // when they have been read
  };
  float b_scale[kColumns], bias[kColumns], a_scale[kSlice];
  int2 col_terms[kColumns], row_terms[kSlice];
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
  FullBarrier summed;
};

// Loads tiles of weights and activations, one thread for a block.
template <int kColumns, int kRows, class S>
class Loader {
 public:
  __device__ Loader(const Params<kColumns, kRows>& p, S& shared, int column_tile, int row_tile, int batch)
      : p_(p), shared_(shared), column_tile_(column_tile), row_tile_(row_tile), batch_(batch) {}

  // A stage's barrier is told to wait for both operands.
  __device__ void weights(int step, int stage) {
    shared_.full[stage].arrive_and_expect_tx((kColumns + kRows) * kStepK);
    load<kColumns>(p_.weights, p_.N, column_tile_, step, &shared_.weights[stage][0], stage);
  }
  __device__ void activations(int step, int stage) {
    load<kRows>(p_.activations, p_.M, row_tile_, step, &shared_.activations[stage][0], stage);
  }

 private:
  template <int kTile>
  __device__ void load(const Map<kTile>& map, int rows, int tile, int step, int8_t* to, int stage) {
    const auto slice = map.get_slice(Int<0>{});
    const auto all = map.get_tma_tensor(make_shape(rows, p_.K, p_.batch));
    const auto from = slice.partition_S(local_tile(all(_, _, batch_), Shape<Int<kTile>, Int<kStepK>>{}, make_coord(tile, step)));
    copy(map.with(reinterpret_cast<uint64_t&>(shared_.full[stage])), from, slice.partition_D(make_tensor(make_smem_ptr(to), Step<kTile>{})));
  }

  const Params<kColumns, kRows>& p_;
  S& shared_;
  const int column_tile_, row_tile_, batch_;
};

// The block's part of the sums.
template <int kColumns, int kRows, int kStages, class Mma, class S, class Accumulators>
__device__ void multiply(const Mma& mma, S& shared, int steps, Accumulators& sums) {
  Mma tiled = mma;
  const auto thread = tiled.get_thread_slice(int(threadIdx.x));
  const auto weights = thread.make_fragment_A(
      thread.partition_A(make_tensor(make_smem_ptr(&shared.weights[0][0]), Steps<kColumns, kStages>{})));
  const auto activations = thread.make_fragment_B(
      thread.partition_B(make_tensor(make_smem_ptr(&shared.activations[0][0]), Steps<kRows, kStages>{})));
  tiled.accumulate_ = GMMA::ScaleOut::Zero;
  Ring<kStages> ring, done;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    shared.full[ring.stage].wait(ring.phase);
    warpgroup_fence_operand(sums);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < size<2>(weights); ++k) {
      cute::gemm(tiled, weights(_, _, k, ring.stage), activations(_, _, k, ring.stage), sums);
      tiled.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    if (step > 0) {  // one step is in flight; the one before it has ended, and its stage is free
      warpgroup_wait<1>();
      shared.empty[done.stage].arrive();
      done.advance();
    }
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(sums);
}

// What the epilogue needs of this block's rows and columns, in shared memory.
template <int kColumns, class Out, class S>
__device__ void load_operands(const EpilogueOperands& e, S& shared, int first_column, int first_row, int columns, int rows, int batch) {
  for (int i = int(threadIdx.x); i < kColumns; i += consumers(kColumns)) {
    const bool inside = i < columns;
    const int64_t n = int64_t(first_column) + i;
    if constexpr (!is_same_v<Out, int32_t>) {
      shared.b_scale[i] = inside ? load_b_scale(e, batch, n) : 0.0f;
      shared.bias[i] = inside ? load_bias(e, batch, n) : 0.0f;
    }
    if (e.row_terms) shared.col_terms[i] = inside ? col_terms_of(e, batch)[n] : make_int2(0, 0);
  }
  for (int i = int(threadIdx.x); i < S::kSlice; i += consumers(kColumns)) {
    const bool inside = i < rows;
    const int64_t m = int64_t(first_row) + i;
    if constexpr (!is_same_v<Out, int32_t>) shared.a_scale[i] = inside ? load_a_scale(e, batch, m) : 0.0f;
    if (e.row_terms) shared.row_terms[i] = inside ? row_terms_of(e, batch)[m] : make_int2(0, 0);
  }
}

template <int kColumns, int kRows, int kSplit, int kStages, class Mma, class Out>
__global__ void __launch_bounds__(consumers(kColumns) + 32) kernel(const __grid_constant__ Params<kColumns, kRows> p) {
  let_next_kernel_start();
  constexpr int kConsumers = consumers(kColumns), kThreads = kConsumers + 32;
  const auto sync_consumers = [] { cutlass::arch::NamedBarrier::sync(kConsumers, 0); };
  extern __shared__ __align__(1024) char memory[];
  constexpr int kOwners = owners(kRows, kSplit), kSlice = kRows / kOwners;
  using S = Shared<kColumns, kRows, kStages, kOwners, Out>;
  S& shared = *reinterpret_cast<S*>(memory);
  const int rank = int(blockIdx.x) % kSplit, column_tile = int(blockIdx.x) / kSplit, row_tile = int(blockIdx.y), batch = int(blockIdx.z);
  const int all_steps = (p.K + kStepK - 1) / kStepK;
  const int begin = int(int64_t(all_steps) * rank / kSplit), end = int(int64_t(all_steps) * (rank + 1) / kSplit);

  // One thread makes the barriers and loads: it need not wait for the others to see the barriers before it asks for weights.
  Loader<kColumns, kRows, S> loader(p, shared, column_tile, row_tile, batch);
  const bool loads = threadIdx.x == kConsumers;
  const int first = min(end - begin, kStages);
  if (loads) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(kConsumers);
    }
    shared.summed.init(1);
    if (kSplit > 1 && rank < kOwners) shared.summed.arrive_and_expect_tx((kSplit - 1) * sizeof(shared.sums));
    cutlass::arch::fence_barrier_init();
    cutlass::arch::fence_view_async_shared();  // the barriers, for the loads that this thread starts
    if (p.early_weights) {
      for (int i = 0; i < first; ++i) loader.weights(begin + i, i);
    }
  }
  __syncwarp();
  if constexpr (kSplit > 1) {
    if (rank < kOwners) {
      for (int i = int(threadIdx.x); i < kColumns * kSlice; i += kThreads) shared.sums[i] = 0;
    }
    cluster_sync();
  } else {
    __syncthreads();
  }

  if (threadIdx.x >= kConsumers) {
    if (!loads) return;
    wait_for_preceding_kernel();
    for (int i = 0; i < first; ++i) {
      if (!p.early_weights) loader.weights(begin + i, i);
      loader.activations(begin + i, i);
    }
    Ring<kStages> ring;
    for (int step = begin + kStages; step < end; ++step, ring.advance()) {
      shared.empty[ring.stage].wait(ring.phase);
      loader.weights(step, ring.stage);
      loader.activations(step, ring.stage);
    }
    return;
  }

  const bool owns = rank < kOwners;
  const int first_column = column_tile * kColumns, first_row = row_tile * kRows + rank * kSlice;
  const int columns = min(kColumns, p.N - first_column), rows = max(0, min(kSlice, p.M - first_row));
  wait_for_preceding_kernel();
  if (owns) load_operands<kColumns, Out>(p.epilogue, shared, first_column, first_row, columns, rows, batch);

  const Mma mma{};
  auto all = partition_fragment_C(mma, Shape<Int<kColumns>, Int<kRows>>{});
  if (begin < end) {
    multiply<kColumns, kRows, kStages>(mma, shared, end - begin, all);
  } else {
    clear(all);
  }

  // A thread's accumulators go down the rows by fragments of 8, so a slice is a run of them.
  constexpr int kOwn = int(size(all)) / kOwners;
  int32_t sums[kOwn];
  CUTLASS_PRAGMA_UNROLL
  for (int owner = 0; owner < kOwners; ++owner) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      if (owner == rank) {
        sums[i] = all(owner * kOwn + i);
      } else {
        add_remote(cast_smem_ptr_to_uint(&shared.sums[i * kConsumers + int(threadIdx.x)]), cast_smem_ptr_to_uint(&shared.summed), owner,
                   all(owner * kOwn + i));
      }
    }
  }
  if (!owns) return;
  if constexpr (kSplit > 1) {
    wait_for_cluster(cast_smem_ptr_to_uint(&shared.summed));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOwn; ++i) sums[i] = int32_t(uint32_t(sums[i]) + uint32_t(shared.sums[i * kConsumers + int(threadIdx.x)]));
  }

  sync_consumers();  // the operands are there, and the sums of all threads have been read
  // Where the accumulators of the first slice are in the tile, which is where those of any are in theirs.
  const auto where = mma.get_thread_slice(int(threadIdx.x)).partition_C(make_identity_tensor(Shape<Int<kColumns>, Int<kRows>>{}));
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const int n = int(get<0>(where(i))), m = int(get<1>(where(i)));
    const int32_t exact = p.epilogue.row_terms ? subtract_zero_points(sums[i], shared.row_terms[m], shared.col_terms[n]) : sums[i];
    if constexpr (is_same_v<Out, int32_t>) {
      shared.out[m][n] = exact;
    } else {
      shared.out[m][n] = Out(scale_and_bias(exact, shared.a_scale[m], shared.b_scale[n], shared.bias[n]));
    }
  }
  sync_consumers();
  Out* const out = static_cast<Out*>(p.out) + batch * p.out_batch + int64_t(first_row) * p.out_stride_m + first_column * p.out_stride_n;
  for (int i = int(threadIdx.x); i < rows * kColumns; i += kConsumers) {
    const int m = i / kColumns, n = i % kColumns;
    if (n < columns) out[m * p.out_stride_m + n * p.out_stride_n] = shared.out[m][n];
  }
}

// kColumns: of b, a block's, kRows: of a. kSplit: blocks of a cluster, which share K. One row of sm90.yaml is one instance.
template <int kColumns, int kRows, int kSplit, int kStages, class Out>
struct Gemm {
  static_assert((kColumns == 64 || kColumns == 128) && kRows % 8 == 0 && kRows <= 256 && kSplit >= 1 && kSplit <= 8 && kStages >= 2, "the rules of the table");
  using Mma = decltype(make_tiled_mma(GMMA::ss_op_selector<int8_t, int8_t, int32_t, Shape<_64, Int<kRows>, Int<kStepK>>>(),
                                      Layout<Shape<Int<kColumns / 64>, _1, _1>>{}));
  using P = Params<kColumns, kRows>;
  static constexpr int kSharedMemory = int(sizeof(Shared<kColumns, kRows, kStages, owners(kRows, kSplit), Out>));
  static_assert(kSharedMemory <= 227 * 1024, "the shared memory of SM90");
  static_assert(sizeof(P) <= LaunchCache::kBytes && alignof(P) <= LaunchCache::kAlignment, "the parameters fit a launch cache");

  static DeviceKernel& device_kernel() {
    static DeviceKernel one(&kernel<kColumns, kRows, kSplit, kStages, Mma, Out>);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    return prepare_kernel(device_kernel(), kSharedMemory, device, message, size);
  }

  static P encode(const GemmLaunch& l) {
    // A dimension of one has no stride of its own, but a tensor map wants a legal one.
    const int64_t packed_k = (l.K + 15) / 16 * 16, lda = l.M > 1 ? l.a_stride_m : packed_k, ldb = l.N > 1 ? l.b_stride_n : packed_k;
    return {map_of<kColumns>(operand(l.b, l.N, l.K, l.batch, ldb, l.batch_strides.b)),
            map_of<kRows>(operand(l.a, l.M, l.K, l.batch, lda, l.batch_strides.a)),
            int(l.M), int(l.N), int(l.K), int(l.batch), l.constant_b, l.out, l.out_stride_m, l.out_stride_n, l.batch_strides.out,
            epilogue_operands(l)};
  }

  static scaledMMStatus_t launch_encoded(P& params, const GemmLaunch& l, char* message, size_t size) {
    LaunchShape shape;
    shape.grid = dim3(unsigned((l.N + kColumns - 1) / kColumns * kSplit), unsigned((l.M + kRows - 1) / kRows), unsigned(l.batch));
    shape.block = dim3(consumers(kColumns) + 32);
    shape.cluster = dim3(kSplit, 1, 1);
    shape.shared_memory = kSharedMemory;
    shape.dependent = true;
    void* pointers[] = {&params};
    return launch_kernel(device_kernel(), shape, pointers, l, message, size);
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    constexpr int64_t kMost = int64_t(65535) * kRows;  // a grid is no higher
    if (l.M > kMost || l.N > INT_MAX / kSplit - kColumns) {
      snprintf(message, size, "out: expected at most %lld rows and %d columns for this kernel, got M = %lld, N = %lld",
               static_cast<long long>(kMost), INT_MAX / kSplit - kColumns, static_cast<long long>(l.M), static_cast<long long>(l.N));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    return launch_with_maps<P>(l, message, size, &encode, &check_maps, &launch_encoded);
  }

  static scaledMMStatus_t check_maps(const P& params, char* message, size_t size) {
    if (c3x::is_encoded(params.weights) && c3x::is_encoded(params.activations)) return SCALED_MM_STATUS_SUCCESS;
    snprintf(message, size, "cuTensorMapEncodeTiled: the driver refused the tensor map of %s", c3x::is_encoded(params.weights) ? "a" : "b");
    return SCALED_MM_STATUS_CUDA_ERROR;
  }

  static constexpr Kernel entry(const char* row) { return {row, DtypeOf<Out>::value, int32_t(kSharedMemory), &prepare, &launch}; }
};

}  // namespace scaled_mm::decode
