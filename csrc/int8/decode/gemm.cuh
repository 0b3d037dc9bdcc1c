// A kernel for few rows of a, bound by how fast the weights come. out^T = b^T a^T: columns of b fill the wide side of the MMA, 64 to a
// warpgroup.
//
// kSplit blocks of a cluster share a tile of columns, each block a part of K, so that a small weight keeps all SMs busy;
// kShare tiles of columns side by side share the rows of a, each block loading a part of them for all. A block fills its stages with
// weights before the preceding kernel has ended where they are constant (docs/decisions/0011): what all blocks hold is then read
// while that kernel finishes. The first of the kSplit blocks own a slice of the tile's rows each, to which the others send their int32 sums;
// they are added exactly, in any order. A persistent kernel's blocks load the next tile's weights while they finish one.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <new>

#include "int8/c3x/grid_dependency.cuh"
#include "int8/c3x/tensor_map.cuh"
#include "int8/decode/epilogue.cuh"
#include "int8/decode/mainloop.cuh"
#include "int8/decode/resident_clusters.cuh"
#include "int8/launch.cuh"

namespace scaled_mm::decode {

using namespace cute;

template <int kColumns, int kRows, int kSplit, int kShare, int kStages, bool kPersistent, class Mma, class Out>
__global__ void __launch_bounds__(consumers(kColumns) + 32) kernel(const __grid_constant__ Params<kColumns, kRows, kShare> p) {
  let_next_kernel_start();
  constexpr int kConsumers = consumers(kColumns), kBlocks = kSplit * kShare;
  const auto sync_consumers = [] { cutlass::arch::NamedBarrier::sync(kConsumers, 0); };
  extern __shared__ __align__(1024) char memory[];
  using S = Shared<kColumns, kRows, kSplit, kStages, kPersistent, Out>;
  S& shared = *reinterpret_cast<S*>(memory);
  // A block's place in its cluster: which part of K, which of the tiles side by side.
  const int rank = int(blockIdx.x) % kBlocks, part = rank % kSplit, share = rank / kSplit;
  const int all_steps = p.K / kStepK + (p.K % kStepK != 0);
  const int begin = int(int64_t(all_steps) * part / kSplit), steps = int(int64_t(all_steps) * (part + 1) / kSplit) - begin;
  const Tiles<kPersistent> mine = {p.tiles_m, p.groups_n, p.tiles_m * p.groups_n * p.batch, int(blockIdx.x) / kBlocks, p.clusters};
  const Place home = mine.place(); // before anything is waited for: a division takes a hundred cycles
  const int64_t total = int64_t(steps) * mine.left();

  // One thread makes the barriers and loads: it need not wait for the others to see the barriers before it asks for weights.
  Loader<kColumns, kRows, kSplit, kShare, S> loader(p, shared, part, share);
  const bool loads = threadIdx.x == kConsumers;
  const int first = int(min(total, int64_t(kStages)));
  // f(place, step, stage) for the loads that need not wait for a free stage.
  const auto for_the_first = [&](auto&& f) {
    Tiles<kPersistent> tile = mine;
    Place place = home;
    for (int i = 0, step = 0; i < first; ++i) {
      f(place, begin + step, i);
      if (++step < steps || !kPersistent) continue;
      step = 0;
      tile.next();
      place = tile.place();
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
        shared.exchange.drained[i].init(S::kOwners);
      }
    }
    cutlass::arch::fence_barrier_init();
    cutlass::arch::fence_view_async_shared(); // the barriers, for the loads that this thread starts
    if (p.early_weights) {
      for_the_first([&](const Place& place, int step, int stage) { loader.weights(place, step, stage); });
    } else {
      for_the_first([&](const Place& place, int step, int) { loader.prefetch_weights(place, step); });
    }
  }
  __syncwarp();
  if constexpr (kBlocks > 1) {
    cluster_arrive_relaxed(); // the barriers are all that the others must see, and their fence is above
    cluster_wait();
  } else {
    __syncthreads();
  }

  if (threadIdx.x >= kConsumers) {
    if (!loads) return;
    wait_for_preceding_kernel();
    for_the_first([&](const Place& place, int step, int stage) {
      if (!p.early_weights) loader.weights(place, step, stage);
      loader.activations(place, step, stage);
    });
    Ring<kStages> ring;
    int skip = first; // those are under way
    Place place = home;
    for (Tiles<kPersistent> tile = mine; tile.valid(); tile.next()) {
      if (tile.index != mine.index) place = tile.place();
      const int skipped = min(skip, steps);
      skip -= skipped;
      for (int step = skipped; step < steps; ++step, ring.advance()) {
        shared.empty[ring.stage].wait(ring.phase);
        loader.weights(place, begin + step, ring.stage);
        loader.activations(place, begin + step, ring.stage);
      }
    }
    return;
  }

  wait_for_preceding_kernel();
  const bool owns = part < S::kOwners;
  const Mma mma{};
  // Coordinates in the tile of the first slice's accumulators. Every slice has the same ones, counted from its own first row.
  const auto where = mma.get_thread_slice(int(threadIdx.x)).partition_C(make_identity_tensor(Shape<Int<kColumns>, Int<kRows>>{}));
  auto all = partition_fragment_C(mma, Shape<Int<kColumns>, Int<kRows>>{});
  constexpr int kOwn = int(size(all)) / S::kOwners; // a thread's accumulators go down the rows by fragments of 8, so a slice is a run of them
  Ring<kStages> ring;
  Releases<kSplit, kShare, S> releases(shared, total - kStages, part);
  Place place = home;
  int number = 0;
  for (Tiles<kPersistent> tile = mine; tile.valid(); tile.next(), ++number) {
    if (number > 0) place = tile.place();
    const int first_column = (place.group * kShare + share) * kColumns, first_row = place.row_tile * kRows + part * S::kSlice;
    const int columns = max(0, min(kColumns, p.N - first_column)), rows = max(0, min(S::kSlice, p.M - first_row));
    Operands<kColumns, Out, S> operands;
    if (owns) operands.fetch(p.epilogue, first_column, first_row, columns, rows, place.batch);
    multiply<kColumns, kRows, kStages>(mma, shared, steps, ring, releases, all);
    int32_t sums[kOwn];
    if constexpr (kSplit > 1) {
      exchange<kSplit>(shared, all, sums, part, share, number);
      if (!owns) continue;
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOwn; ++i) sums[i] = all(i);
    }

    operands.put(p.epilogue, shared);
    sync_consumers();
    if constexpr (kSplit > 1 && kPersistent) {
      if (tile.index + S::kBuffers * tile.stride < tile.count) drain<kSplit>(shared, share, number); // else nobody waits, or is there
    }
    compute<Out>(p.epilogue, shared, sums, where);
    sync_consumers();
    store<kColumns>(p, shared, first_column, first_row, columns, rows, place.batch);
  }
}

// kColumns: of b, a block's, kRows: of a. kSplit: blocks of a cluster that share a tile's K; kShare: tiles of columns in a cluster.
// kPersistent: as many blocks as the GPU holds, with several tiles each. One kernel config of sm90.yaml is one instance.
template <int kColumns, int kRows, int kSplit, int kShare, int kStages, bool kPersistent, class Out>
struct Gemm {
  static_assert((kColumns == 64 || kColumns == 128) && kRows % (8 * kShare) == 0 && kRows <= 256 && kSplit >= 1 && kShare >= 1 &&
                    kSplit * kShare <= 8 && kStages >= 2,
                "the rules of the table");
  using Mma = decltype(make_tiled_mma(GMMA::ss_op_selector<int8_t, int8_t, int32_t, Shape<_64, Int<kRows>, Int<kStepK>>>(),
                                      Layout<Shape<Int<kColumns / 64>, _1, _1>>{}));
  using P = Params<kColumns, kRows, kShare>;
  static constexpr int kBlocks = kSplit * kShare; // of a cluster
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
    const bool whole_vectors =
        l.out_stride_n == 1 && whole(l.out_stride_m) && whole(l.batch_strides.out) && whole(l.N) && reinterpret_cast<uintptr_t>(l.out) % 16 == 0;
    const auto weights = operand(l.b, l.N, l.K, l.batch, ldb, l.batch_strides.b);
    const auto activations = operand(l.a, l.M, l.K, l.batch, lda, l.batch_strides.a);
    return {map_of<kColumns, SM90_TMA_LOAD>(weights),
            map_of<kRows / kShare, ActivationLoad<kShare>>(activations),
            decltype(P::last_weights)::encode(l.b, int(l.N), int(l.K), int(l.batch), ldb, l.batch_strides.b),
            decltype(P::last_activations)::encode(l.a, int(l.M), int(l.K), int(l.batch), lda, l.batch_strides.a),
            decltype(P::row_tiles)::of(int(l.M)),
            int(l.M),
            int(l.N),
            int(l.K),
            int(l.batch),
            int(tiles_m(l)),
            int(groups_n(l)),
            0,
            l.constant_b,
            whole_vectors,
            l.out,
            l.out_stride_m,
            l.out_stride_n,
            l.batch_strides.out,
            epilogue_operands(l)};
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
    constexpr int64_t kMost = INT_MAX / std::max(kBlocks, 2); // a grid is no wider, and Tiles counts to twice as many
    if (l.M > INT_MAX - kRows || l.N > INT_MAX - kColumns * kShare || tiles_m(l) * groups_n(l) > kMost / l.batch) {
      snprintf(message, size, "out: expected at most %lld tiles of %d x %d for this kernel, got M = %lld, N = %lld, B = %lld",
               static_cast<long long>(kMost), kRows, kColumns * kShare, static_cast<long long>(l.M), static_cast<long long>(l.N),
               static_cast<long long>(l.batch));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    return launch_with_maps<P>(l, message, size, &encode, &check_maps, &launch_encoded);
  }

  static scaledMMStatus_t check_maps(const P& params, char* message, size_t size) {
    const auto encoded = [](const auto& map, const auto& last) { return c3x::is_encoded(map) && (!last.is_needed() || c3x::is_encoded(last)); };
    const bool weights = encoded(params.weights, params.last_weights), activations = encoded(params.activations, params.last_activations);
    if (weights && activations) return SCALED_MM_STATUS_SUCCESS;
    snprintf(message, size, "cuTensorMapEncodeTiled: the driver refused the tensor map of %s", weights ? "a" : "b");
    return SCALED_MM_STATUS_CUDA_ERROR;
  }

  static constexpr Kernel entry(const char* row) { return {row, DtypeOf<Out>::value, int32_t(kSharedMemory), &prepare, &launch}; }
};

} // namespace scaled_mm::decode
