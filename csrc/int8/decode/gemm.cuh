// A kernel for few rows of a, bound by how fast the weights come. out^T = b^T a^T: columns of b fill the wide side of the MMA, 64 to a
// warpgroup.
//
// kSplit blocks of a cluster share a tile of columns, each block a part of K, so that a small weight keeps all multiprocessors busy;
// kShare tiles of columns side by side share the rows of a, each block loading a part of them for all. A block fills its stages with
// weights before the preceding kernel has ended where they are constant (docs/decisions/0011): what all blocks hold is then read
// while that kernel finishes. int32 sums are added in shared memory, exactly, in any order: the first of the kSplit blocks own a slice
// of the tile's rows each, to which the others add. A persistent kernel's blocks load the next tile's weights while they finish one.
#pragma once

#include <algorithm>
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
#include "int8/decode/resident_clusters.cuh"
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
template <int kRows, class Load>
auto map_of(decltype(operand(nullptr, 0, 0, 0, 0, 0)) const& tensor) {
  return make_tma_copy(Load{}, tensor, Step<kRows>{}, Shape<Int<kRows>, Int<kStepK>>{}, Int<1>{});
}
template <int kRows, class Load>
using Map = decltype(map_of<kRows, Load>(operand(nullptr, 0, 0, 0, 0, 0)));
template <int kShare>
using ActivationLoad = std::conditional_t<(kShare > 1), SM90_TMA_LOAD_MULTICAST, SM90_TMA_LOAD>;

template <int kColumns, int kRows, int kShare>
struct Params {
  Map<kColumns, SM90_TMA_LOAD> weights;
  Map<kRows / kShare, ActivationLoad<kShare>> activations;
  int M, N, K, batch;
  int tiles_m, groups_n, clusters;  // tiles along M, groups of kShare tiles along N; clusters in the grid
  bool early_weights, whole_vectors;  // whole_vectors: out takes stores of 16 bytes
  void* out;
  int64_t out_stride_m, out_stride_n, out_batch;
  EpilogueOperands epilogue;
};

// Blocks of a cluster that own rows: as many as divide the tile into whole fragments of 8 rows.
constexpr int owners(int rows, int split) { return split > 1 && rows / 8 % split != 0 ? owners(rows, split / 2) : split; }

// The sums of the cluster's other blocks, in the order of the threads' accumulators: two tiles' where a block computes several.
template <int kSums, int kBuffers>
struct Exchange {
  int32_t sums[kBuffers][kSums];
  FullBarrier summed[kBuffers];   // all others have added theirs
  EmptyBarrier drained[kBuffers];  // all owners have taken theirs
};
struct NoExchange {};

template <int kColumns, int kRows, int kSplit, int kStages, bool kPersistent, class Out>
struct alignas(1024) Shared {
  static constexpr int kOwners = owners(kRows, kSplit), kSlice = kRows / kOwners;  // rows that a block owns
  static constexpr int kBuffers = kPersistent ? 2 : 1;
  static constexpr int kPitch = kColumns + 16 / int(sizeof(Out));  // four rows of a fragment fall into different banks
  int8_t weights[kStages][kColumns * kStepK];
  int8_t activations[kStages][kRows * kStepK];
  Out out[kSlice][kPitch];
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
  std::conditional_t<(kSplit > 1), Exchange<kColumns * kSlice, kBuffers>, NoExchange> exchange;
  float b_scale[kColumns], bias[kColumns], a_scale[kSlice];
  int2 col_terms[kColumns], row_terms[kSlice];
};

// Loads tiles of weights and activations, one thread for a block.
template <int kColumns, int kRows, int kSplit, int kShare, class S>
class Loader {
 public:
  __device__ Loader(const Params<kColumns, kRows, kShare>& p, S& shared, int part, int share) : p_(p), shared_(shared), part_(part), share_(share) {}

  // A stage's barrier is told to wait for both operands.
  __device__ void weights(const Tiles& tile, int step, int stage) {
    shared_.full[stage].arrive_and_expect_tx((kColumns + kRows) * kStepK);
    const auto from = source<kColumns>(p_.weights, p_.N, tile.group() * kShare + share_, tile.batch(), step);
    copy(p_.weights.with(reinterpret_cast<uint64_t&>(shared_.full[stage])), from, target<kColumns>(p_.weights, &shared_.weights[stage][0]));
  }

  // Asks L2 for them.
  __device__ void prefetch_weights(const Tiles& tile, int step) {
    cute::prefetch(p_.weights, source<kColumns>(p_.weights, p_.N, tile.group() * kShare + share_, tile.batch(), step));
  }

  // This block's part of the rows, for all blocks that need them.
  __device__ void activations(const Tiles& tile, int step, int stage) {
    constexpr int kPart = kRows / kShare;
    const auto from = source<kPart>(p_.activations, p_.M, tile.row_tile() * kShare + share_, tile.batch(), step);
    auto to = target<kPart>(p_.activations, &shared_.activations[stage][share_ * kPart * kStepK]);
    auto& barrier = reinterpret_cast<uint64_t&>(shared_.full[stage]);
    if constexpr (kShare > 1) {
      uint16_t blocks = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kShare; ++i) blocks |= uint16_t(1u << (part_ + i * kSplit));
      copy(p_.activations.with(barrier, blocks), from, to);
    } else {
      copy(p_.activations.with(barrier), from, to);
    }
  }

 private:
  template <int kTile, class M>
  __device__ auto source(const M& map, int rows, int tile, int batch, int step) {
    const auto all = map.get_tma_tensor(make_shape(rows, p_.K, p_.batch));
    return map.get_slice(Int<0>{}).partition_S(local_tile(all(_, _, batch), Shape<Int<kTile>, Int<kStepK>>{}, make_coord(tile, step)));
  }
  template <int kTile, class M>
  __device__ auto target(const M& map, int8_t* to) {
    return map.get_slice(Int<0>{}).partition_D(make_tensor(make_smem_ptr(to), Step<kTile>{}));
  }

  const Params<kColumns, kRows, kShare>& p_;
  S& shared_;
  const int part_, share_;
};

// Tells the loaders of all blocks that load for this one that a stage is free. Only where it will be filled again: nothing arrives at a
// block that has ended.
template <int kSplit, int kShare, class S>
class Releases {
 public:
  __device__ Releases(S& shared, int64_t count, int part) : shared_(shared), left_(count), part_(part) {}

  __device__ void release(int stage) {
    if (left_ <= 0) return;
    --left_;
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (kShare > 1) {
      shared_.empty[stage].arrive(part_ + lane * kSplit, lane < kShare);
    } else {
      if (lane == 0) shared_.empty[stage].arrive();
    }
  }

 private:
  S& shared_;
  int64_t left_;
  const int part_;
};

// The block's part of a tile's sums.
template <int kColumns, int kRows, int kStages, class Mma, class S, class R, class Accumulators>
__device__ void multiply(const Mma& mma, S& shared, int steps, Ring<kStages>& ring, R& releases, Accumulators& sums) {
  Mma tiled = mma;
  const auto thread = tiled.get_thread_slice(int(threadIdx.x));
  const auto weights = thread.make_fragment_A(
      thread.partition_A(make_tensor(make_smem_ptr(&shared.weights[0][0]), Steps<kColumns, kStages>{})));
  const auto activations = thread.make_fragment_B(
      thread.partition_B(make_tensor(make_smem_ptr(&shared.activations[0][0]), Steps<kRows, kStages>{})));
  clear(sums);
  tiled.accumulate_ = GMMA::ScaleOut::One;
  int done = ring.stage;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    shared.full[ring.stage].wait(ring.phase);
    warpgroup_fence_operand(sums);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < size<2>(weights); ++k) {
      cute::gemm(tiled, weights(_, _, k, ring.stage), activations(_, _, k, ring.stage), sums);
    }
    warpgroup_commit_batch();
    warpgroup_wait<1>();  // this step is in flight; the one before it has ended, and its stage is free
    if (step > 0) releases.release(done);
    done = ring.stage;
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(sums);
  if (steps > 0) releases.release(done);
}

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

// Gives the others' rows of this block's sums to their owners, and gets theirs for its own; `own` becomes the sums of the rows that the
// block owns. number: how many tiles the block has had before; last: whether it has none two tiles later.
template <int kSplit, class S, class Accumulators, int kOwn>
__device__ void exchange(S& shared, const Accumulators& all, int32_t (&own)[kOwn], int part, int share, int number, bool last) {
  constexpr int kThreads = int(sizeof(shared.exchange.sums[0]) / sizeof(int32_t)) / kOwn;
  const int buffer = number % S::kBuffers, use = number / S::kBuffers, thread = int(threadIdx.x);
  auto& e = shared.exchange;
  const uint32_t summed = cast_smem_ptr_to_uint(&e.summed[buffer]), drained = cast_smem_ptr_to_uint(&e.drained[buffer]);
  const bool owns = part < S::kOwners;
  if (owns && thread == 0) e.summed[buffer].arrive_and_expect_tx((kSplit - 1) * sizeof(e.sums[0]));
  if (use > 0) wait_for_cluster(drained, (use - 1) & 1);
  CUTLASS_PRAGMA_UNROLL
  for (int owner = 0; owner < S::kOwners; ++owner) {
    const uint32_t rank = owner + share * kSplit, barrier = set_block_rank(summed, rank);
    const uint32_t words = set_block_rank(cast_smem_ptr_to_uint(&e.sums[buffer][thread]), rank);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      if (owner == part) {
        own[i] = all(owner * kOwn + i);
      } else {
        add_remote(words + i * kThreads * int(sizeof(int32_t)), barrier, all(owner * kOwn + i));
      }
    }
  }
  if (!owns) return;
  wait_for_cluster(summed, use & 1);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    int32_t& others = e.sums[buffer][i * kThreads + thread];
    own[i] = int32_t(uint32_t(own[i]) + uint32_t(others));
    if (!last) others = 0;
  }
  if (last) return;
  __syncwarp();
  if (thread % 32 < kSplit) arrive_remote(drained, thread % 32 + share * kSplit);
}

template <int kColumns, int kRows, int kSplit, int kShare, int kStages, bool kPersistent, class Mma, class Out>
__global__ void __launch_bounds__(consumers(kColumns) + 32) kernel(const __grid_constant__ Params<kColumns, kRows, kShare> p) {
  let_next_kernel_start();
  constexpr int kConsumers = consumers(kColumns), kThreads = kConsumers + 32, kBlocks = kSplit * kShare;
  const auto sync_consumers = [] { cutlass::arch::NamedBarrier::sync(kConsumers, 0); };
  extern __shared__ __align__(1024) char memory[];
  using S = Shared<kColumns, kRows, kSplit, kStages, kPersistent, Out>;
  S& shared = *reinterpret_cast<S*>(memory);
  // A block's place in its cluster: which part of K, which of the tiles side by side.
  const int rank = int(blockIdx.x) % kBlocks, part = rank % kSplit, share = rank / kSplit;
  const int all_steps = p.K / kStepK + (p.K % kStepK != 0);
  const int begin = int(int64_t(all_steps) * part / kSplit), steps = int(int64_t(all_steps) * (part + 1) / kSplit) - begin;
  const Tiles mine = {p.tiles_m, p.groups_n, p.tiles_m * p.groups_n * p.batch, int(blockIdx.x) / kBlocks, p.clusters};
  const int64_t total = int64_t(steps) * mine.left();

  // One thread makes the barriers and loads: it need not wait for the others to see the barriers before it asks for weights.
  Loader<kColumns, kRows, kSplit, kShare, S> loader(p, shared, part, share);
  const bool loads = threadIdx.x == kConsumers;
  const int first = int(min(total, int64_t(kStages)));
  // f(tile, step, stage) for the loads that need not wait for a free stage.
  const auto for_the_first = [&](auto&& f) {
    Tiles tile = mine;
    for (int i = 0, step = 0; i < first; ++i) {
      f(tile, begin + step, i);
      if (++step == steps) {
        step = 0;
        tile.next();
      }
    }
  };
  if (loads) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(kShare * kConsumers / 32);
    }
    if constexpr (kSplit > 1) {
      for (int i = 0; i < S::kBuffers; ++i) {
        shared.exchange.summed[i].init(1);
        shared.exchange.drained[i].init(S::kOwners * kConsumers / 32);
      }
    }
    cutlass::arch::fence_barrier_init();
    cutlass::arch::fence_view_async_shared();  // the barriers, for the loads that this thread starts
    if (p.early_weights) {
      for_the_first([&](const Tiles& tile, int step, int stage) { loader.weights(tile, step, stage); });
    } else {
      for_the_first([&](const Tiles& tile, int step, int) { loader.prefetch_weights(tile, step); });
    }
  }
  __syncwarp();
  if constexpr (kSplit > 1) {
    int32_t* const sums = &shared.exchange.sums[0][0];
    for (int i = int(threadIdx.x); i < int(sizeof(shared.exchange.sums) / sizeof(int32_t)); i += kThreads) sums[i] = 0;
  }
  if constexpr (kBlocks > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  if (threadIdx.x >= kConsumers) {
    if (!loads) return;
    wait_for_preceding_kernel();
    for_the_first([&](const Tiles& tile, int step, int stage) {
      if (!p.early_weights) loader.weights(tile, step, stage);
      loader.activations(tile, step, stage);
    });
    Ring<kStages> ring;
    Tiles tile = mine;
    int skipped = 0;  // those of the first that are under way
    for (; tile.valid(); tile.next()) {
      for (int step = 0; step < steps; ++step) {
        if (skipped < first) {
          ++skipped;
          continue;
        }
        shared.empty[ring.stage].wait(ring.phase);
        loader.weights(tile, begin + step, ring.stage);
        loader.activations(tile, begin + step, ring.stage);
        ring.advance();
      }
    }
    return;
  }

  wait_for_preceding_kernel();
  const bool owns = part < S::kOwners;
  const Mma mma{};
  // Where the accumulators of the first slice are in the tile, which is where those of any are in theirs.
  const auto where = mma.get_thread_slice(int(threadIdx.x)).partition_C(make_identity_tensor(Shape<Int<kColumns>, Int<kRows>>{}));
  auto all = partition_fragment_C(mma, Shape<Int<kColumns>, Int<kRows>>{});
  constexpr int kOwn = int(size(all)) / S::kOwners;  // a thread's accumulators go down the rows by fragments of 8, so a slice is a run of them
  Ring<kStages> ring;
  Releases<kSplit, kShare, S> releases(shared, total - kStages, part);
  int number = 0;
  for (Tiles tile = mine; tile.valid(); tile.next(), ++number) {
    const int batch = tile.batch();
    const int first_column = (tile.group() * kShare + share) * kColumns, first_row = tile.row_tile() * kRows + part * S::kSlice;
    const int columns = max(0, min(kColumns, p.N - first_column)), rows = max(0, min(S::kSlice, p.M - first_row));
    Operands<kColumns, Out, S> operands;
    if (owns) operands.fetch(p.epilogue, first_column, first_row, columns, rows, batch);
    multiply<kColumns, kRows, kStages>(mma, shared, steps, ring, releases, all);
    int32_t sums[kOwn];
    if constexpr (kSplit > 1) {
      exchange<kSplit>(shared, all, sums, part, share, number, tile.index + S::kBuffers * tile.stride >= tile.count);
      if (!owns) continue;
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOwn; ++i) sums[i] = all(i);
    }

    operands.put(p.epilogue, shared);
    sync_consumers();
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
    if (p.whole_vectors) {
      constexpr int kVector = 16 / int(sizeof(Out)), kAcross = kColumns / kVector;
      for (int i = int(threadIdx.x); i < rows * kAcross; i += kConsumers) {
        const int m = i / kAcross, n = i % kAcross * kVector;
        if (n < columns) *reinterpret_cast<int4*>(out + m * p.out_stride_m + n) = *reinterpret_cast<const int4*>(&shared.out[m][n]);
      }
    } else {
      for (int i = int(threadIdx.x); i < rows * kColumns; i += kConsumers) {
        const int m = i / kColumns, n = i % kColumns;
        if (n < columns) out[m * p.out_stride_m + n * p.out_stride_n] = shared.out[m][n];
      }
    }
  }
}

// kColumns: of b, a block's, kRows: of a. kSplit: blocks of a cluster that share a tile's K; kShare: tiles of columns in a cluster.
// kPersistent: as many blocks as the GPU holds, with several tiles each. One row of sm90.yaml is one instance.
template <int kColumns, int kRows, int kSplit, int kShare, int kStages, bool kPersistent, class Out>
struct Gemm {
  static_assert((kColumns == 64 || kColumns == 128) && kRows % (8 * kShare) == 0 && kRows <= 256 && kSplit >= 1 && kShare >= 1 &&
                    kSplit * kShare <= 8 && kStages >= 2,
                "the rules of the table");
  using Mma = decltype(make_tiled_mma(GMMA::ss_op_selector<int8_t, int8_t, int32_t, Shape<_64, Int<kRows>, Int<kStepK>>>(),
                                      Layout<Shape<Int<kColumns / 64>, _1, _1>>{}));
  using P = Params<kColumns, kRows, kShare>;
  static constexpr int kBlocks = kSplit * kShare;  // of a cluster
  static constexpr int kSharedMemory = int(sizeof(Shared<kColumns, kRows, kSplit, kStages, kPersistent, Out>));
  static_assert(kSharedMemory <= 227 * 1024, "the shared memory of SM90");
  static_assert(sizeof(P) <= LaunchCache::kBytes && alignof(P) <= LaunchCache::kAlignment, "the parameters fit a launch cache");

  static DeviceKernel& device_kernel() {
    static DeviceKernel one(&kernel<kColumns, kRows, kSplit, kShare, kStages, kPersistent, Mma, Out>);
    return one;
  }
  static ResidentClusters& resident_clusters() {
    static ResidentClusters one;
    return one;
  }

  static LaunchShape launch_shape(unsigned clusters) {
    LaunchShape shape;
    shape.grid = dim3(clusters * kBlocks);
    shape.block = dim3(consumers(kColumns) + 32);
    shape.cluster = dim3(kBlocks);
    shape.shared_memory = kSharedMemory;
    shape.dependent = true;
    return shape;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    if (scaledMMStatus_t status = prepare_kernel(device_kernel(), kSharedMemory, device, message, size)) return status;
    int clusters;
    return kPersistent ? resident_clusters().find(device_kernel(), launch_shape(1), device, &clusters, message, size) : SCALED_MM_STATUS_SUCCESS;
  }

  static int64_t tiles_m(const GemmLaunch& l) { return (l.M + kRows - 1) / kRows; }
  static int64_t groups_n(const GemmLaunch& l) { return (l.N + kColumns * kShare - 1) / (kColumns * kShare); }

  static P encode(const GemmLaunch& l) {
    // A dimension of one has no stride of its own, but a tensor map wants a legal one.
    const int64_t packed_k = (l.K + 15) / 16 * 16, lda = l.M > 1 ? l.a_stride_m : packed_k, ldb = l.N > 1 ? l.b_stride_n : packed_k;
    const auto whole = [](int64_t elements) { return elements * int64_t(sizeof(Out)) % 16 == 0; };
    const bool whole_vectors = l.out_stride_n == 1 && whole(l.out_stride_m) && whole(l.batch_strides.out) && whole(l.N) &&
                               reinterpret_cast<uintptr_t>(l.out) % 16 == 0;
    return {map_of<kColumns, SM90_TMA_LOAD>(operand(l.b, l.N, l.K, l.batch, ldb, l.batch_strides.b)),
            map_of<kRows / kShare, ActivationLoad<kShare>>(operand(l.a, l.M, l.K, l.batch, lda, l.batch_strides.a)),
            int(l.M), int(l.N), int(l.K), int(l.batch), int(tiles_m(l)), int(groups_n(l)), 0, l.constant_b, whole_vectors, l.out,
            l.out_stride_m, l.out_stride_n, l.batch_strides.out, epilogue_operands(l)};
  }

  static scaledMMStatus_t launch_encoded(P& params, const GemmLaunch& l, char* message, size_t size) {
    params.clusters = params.tiles_m * params.groups_n * params.batch;
    if constexpr (kPersistent) {
      int most;
      if (scaledMMStatus_t status = resident_clusters().find(device_kernel(), launch_shape(1), l.device, &most, message, size)) return status;
      params.clusters = std::min(params.clusters, most);
    }
    void* pointers[] = {&params};
    return launch_kernel(device_kernel(), launch_shape(unsigned(params.clusters)), pointers, l, message, size);
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    constexpr int64_t kMost = INT_MAX / std::max(kBlocks, 2);  // a grid is no wider, and Tiles counts to twice as many
    if (l.M > INT_MAX - kRows || l.N > INT_MAX - kColumns * kShare || tiles_m(l) * groups_n(l) > kMost / l.batch) {
      snprintf(message, size, "out: expected at most %lld tiles of %d x %d for this kernel, got M = %lld, N = %lld, B = %lld",
               static_cast<long long>(kMost), kRows, kColumns * kShare, static_cast<long long>(l.M), static_cast<long long>(l.N),
               static_cast<long long>(l.batch));
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
