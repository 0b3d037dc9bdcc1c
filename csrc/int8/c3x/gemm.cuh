// CUTLASS 3.x INT8 GEMM for SM90: TMA loads, wgmma, warp-specialised schedules. One kernel config is one instance.
#pragma once

#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "int8/c3x/loads.cuh"
#include "int8/c3x/prefetch.cuh"
#include "int8/c3x/stream_k.cuh"
#include "int8/c3x/swizzle.h"
#include "int8/c3x/tensor_map.cuh"
#include "int8/epilogue/visitor_sm90.cuh"
#include "int8/launch.cuh"

namespace scaled_mm::c3x {

// Names of the table's schedules and what they mean to CUTLASS.
struct WarpSpecialized {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecialized;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
  using Scheduler = cutlass::gemm::PersistentScheduler;
};
struct Pingpong {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
  using Scheduler = cutlass::gemm::PersistentScheduler;
};
struct Cooperative {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
  using Scheduler = cutlass::gemm::PersistentScheduler;
};
// Cooperative with the scheduler stream_k: the tiles after the last but one full wave are divided along K, so that all thread blocks compute
// equally many steps. A divided tile's int32 sums are added in the workspace: exactly, so in any order.
struct StreamK : Cooperative {
  using Scheduler = cutlass::gemm::StreamKScheduler;
};

template <class T> struct CutlassType {
  using type = T;
};
template <> struct CutlassType<__half> {
  using type = cutlass::half_t;
};
template <> struct CutlassType<__nv_bfloat16> {
  using type = cutlass::bfloat16_t;
};

using Raster = cutlass::gemm::kernel::detail::RasterOrderOptions;

// kStages 0: as many as fit beside the epilogue. kRaster and kSwizzle: the order in which a persistent grid walks the
// tiles, which decides what of a and b is still in L2 when the next tile wants it. kPrefetch: see PrefetchingKernel, 0 none.
// kEarlyWeights: load constant weights before the preceding kernel has ended (loads.cuh).
template <int kTileM, int kTileN, int kTileK, int kClusterM, int kClusterN, class TableSchedule, int kStages, bool kSwapAB, Raster kRaster,
          int kSwizzle, int kPrefetch, bool kEarlyWeights, class Out>
struct Gemm {
  using Tile = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;
  using ElementOut = typename CutlassType<Out>::type;
  // Swapped, the kernel computes out transposed: b's columns are its rows, and it writes them down out's columns.
  using LayoutOut = cute::conditional_t<kSwapAB, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  static constexpr int kAlignOut = 16 / sizeof(Out);

  // In pingpong one warpgroup holds a whole tile's accumulators. Above 160 columns, four-byte results would spill, so the kernel is cooperative.
  static constexpr bool kPingpong = cute::is_same_v<TableSchedule, Pingpong> && kTileM == 128;
  using Schedule = cute::conditional_t<kPingpong && (kTileN > 160) && sizeof(Out) == 4, Cooperative, TableSchedule>;

  // 16 results of a thread would spill: four-byte ones beside the accumulators of 256x192, two-byte ones in pingpong from 160 columns. The store then
  // takes 16 columns at a time.
  static constexpr int kStoreM = kTileN % 16 != 0                                     ? 0
                                 : kPingpong && kTileN >= 160 && sizeof(Out) == 2     ? 64
                                 : sizeof(Out) == 4 && kTileM == 256 && kTileN >= 192 ? 128
                                                                                      : 0;
  using StoreTile = cute::conditional_t<kStoreM == 0, cutlass::epilogue::collective::EpilogueTileAuto, cute::Shape<cute::Int<kStoreM>, cute::_16>>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, StoreTile, int32_t, float, void, LayoutOut, kAlignOut, ElementOut,
      LayoutOut, kAlignOut, typename Schedule::Epilogue, ScaledEpilogueSm90<Tile, ElementOut, kSwapAB>>::CollectiveOp;

  using Stages = cute::conditional_t<kStages == 0, cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
                                     cutlass::gemm::collective::StageCount<kStages>>;

  using BaseMainloop =
      typename cutlass::gemm::collective::CollectiveBuilder<cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, cutlass::layout::RowMajor,
                                                            16, int8_t, cutlass::layout::ColumnMajor, 16, int32_t, Tile, Cluster, Stages,
                                                            typename Schedule::Mainloop>::CollectiveOp;
  using Mainloop = Loads<BaseMainloop, kSwapAB ? 0 : 1>; // also the one that waits for the preceding kernel

  static constexpr bool kPersistent = !cute::is_same_v<Schedule, WarpSpecialized>;
  static constexpr bool kStreamK = cute::is_same_v<Schedule, StreamK>;
  static_assert(!kStreamK || kPrefetch == 0, "a thread block's first step of K is not the tile's");
  using BaseKernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue, typename Schedule::Scheduler>;
  using GemmKernel = PrefetchingKernel<BaseKernel, kPersistent, kSwapAB, kPrefetch>;

  static_assert(GemmKernel::SharedStorageSize <= 227 * 1024, "the shared memory of SM90");

  static DeviceKernel& kernel() {
    static DeviceKernel one(&cutlass::device_kernel<GemmKernel>);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    if constexpr (kStreamK) {
      if (scaledMMStatus_t status = prepare_kernel(clear_counters_kernel(), 0, device, message, size)) return status;
    }
    return prepare_kernel(kernel(), GemmKernel::SharedStorageSize, device, message, size);
  }

  using Params = typename GemmKernel::Params;
  static_assert(sizeof(Params) <= LaunchCache::kBytes && alignof(Params) <= LaunchCache::kAlignment, "the parameters fit a launch cache");
  static_assert(std::is_trivially_copyable_v<Params>, "the parameters may be kept as bytes");

  // Encodes the tensor maps: about a tenth of a launch's host time.
  static Params encode(const GemmLaunch& l) {
    // A dimension of one has no stride of its own, but a tensor map wants a legal one.
    const int64_t packed_k = (l.K + 15) / 16 * 16;
    const int64_t packed_n = (l.N + kAlignOut - 1) / kAlignOut * kAlignOut;
    const int64_t lda = l.M > 1 ? l.a_stride_m : packed_k;
    const int64_t ldb = l.N > 1 ? l.b_stride_n : packed_k;
    const int64_t ldd = l.M > 1 ? l.out_stride_m : packed_n;

    const auto* first = static_cast<const int8_t*>(kSwapAB ? l.b : l.a);
    const auto* second = static_cast<const int8_t*>(kSwapAB ? l.a : l.b);
    // The batch is the tensor maps' third dimension: an operand that all products share has stride 0 there.
    const BatchStrides& batch = l.batch_strides;
    const typename GemmKernel::StrideA first_stride{kSwapAB ? ldb : lda, cute::_1{}, kSwapAB ? batch.b : batch.a};
    const typename GemmKernel::StrideB second_stride{kSwapAB ? lda : ldb, cute::_1{}, kSwapAB ? batch.a : batch.b};
    typename GemmKernel::StrideD out_stride{};
    cute::get<kSwapAB ? 1 : 0>(out_stride) = ldd;
    cute::get<2>(out_stride) = batch.out;

    typename GemmKernel::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                             {int(kSwapAB ? l.N : l.M), int(kSwapAB ? l.M : l.N), int(l.K), int(l.batch)},
                                             {{first, first_stride, second, second_stride}, kEarlyWeights && l.constant_b},
                                             {epilogue_operands(l), nullptr, {}, static_cast<ElementOut*>(l.out), out_stride}};
    if constexpr (kPersistent) {
      arguments.scheduler.raster_order = kRaster;
      const TileGrid grid{((kSwapAB ? l.N : l.M) + kTileM - 1) / kTileM, ((kSwapAB ? l.M : l.N) + kTileN - 1) / kTileN, kClusterM, kClusterN};
      arguments.scheduler.max_swizzle_size = swizzle_of(grid, kSwizzle);
    }
    if constexpr (kStreamK) {
      arguments.scheduler.decomposition_mode = SchedulerParams::DecompositionMode::StreamK; // CUTLASS's heuristic may leave half of a wave idle
      arguments.scheduler.reduction_mode = SchedulerParams::ReductionMode::Nondeterministic;
    }
    arguments.hw_info.device_id = l.device;
    arguments.hw_info.sm_count = l.multiprocessors;
    return GemmKernel::to_underlying_arguments(arguments, nullptr);
  }

  static scaledMMStatus_t check_maps(const Params& params, char* message, size_t size) {
    const auto encoded = [](const auto& partial) { return !partial.last.is_needed() || is_encoded(partial.last); };
    if (encoded(params.mainloop.partial_0) && encoded(params.mainloop.partial_1)) return check_encoded<Params>(params, message, size);
    snprintf(message, size, "cuTensorMapEncodeTiled: the driver refused the tensor map of a partial tile");
    return SCALED_MM_STATUS_CUDA_ERROR;
  }

  using SchedulerParams = typename GemmKernel::TileScheduler::Params;
  static constexpr int kMostMultiprocessors = 160; // more than SM90 has
  static constexpr int kWarpgroups = 2;            // that compute a tile of StreamK; each has a counter

  static int64_t sum_bytes(int64_t tiles) {
    return int64_t(SchedulerParams::get_reduction_workspace_size(uint64_t(tiles), {kTileM, kTileN, kTileK}, 32));
  }
  static int64_t counter_bytes(int64_t tiles) { return int64_t(SchedulerParams::get_barrier_workspace_size(uint64_t(tiles), kWarpgroups, 32)); }

  // The sums of all tiles that may be divided, then their counters. They are fewer than two waves.
  static int64_t workspace_size(int64_t M, int64_t N, int64_t batch) {
    const auto blocks = [](int64_t size, int tile, int cluster) { return (size + tile * cluster - 1) / (tile * cluster) * cluster; };
    const int64_t tiles = blocks(kSwapAB ? N : M, kTileM, kClusterM) * blocks(kSwapAB ? M : N, kTileN, kClusterN);
    const int64_t divided = tiles > 2 * kMostMultiprocessors / batch ? 2 * kMostMultiprocessors : tiles * batch;
    return sum_bytes(divided) + counter_bytes(divided);
  }

  // Checks that the workspace suffices on this GPU, and clears the counters of divided tiles.
  static scaledMMStatus_t prepare_workspace(Params& params, const GemmLaunch& l, char* message, size_t size) {
    const int64_t divided = params.scheduler.sk_tiles_;
    if (sum_bytes(divided) + counter_bytes(divided) > workspace_size(l.M, l.N, l.batch)) {
      snprintf(message, size, "device: expected at most %d SMs, for which the workspace is sized, got %d", kMostMultiprocessors,
               int(l.multiprocessors));
      return SCALED_MM_STATUS_INSUFFICIENT_WORKSPACE;
    }
    params.scheduler.reduction_workspace_ = l.workspace;
    return launch_clear_counters(static_cast<char*>(l.workspace) + sum_bytes(divided), counter_bytes(divided), l, message, size);
  }

  static scaledMMStatus_t launch_encoded(Params& params, const GemmLaunch& l, char* message, size_t size) {
    LaunchShape shape;
    shape.dependent = true;
    if constexpr (kStreamK) {
      if (params.scheduler.sk_tiles_ > 0) {
        if (scaledMMStatus_t status = prepare_workspace(params, l, message, size)) return status;
      }
    }
    shape.grid = GemmKernel::get_grid_shape(params);
    shape.block = GemmKernel::get_block_shape();
    shape.cluster = dim3(kClusterM, kClusterN, 1);
    shape.shared_memory = GemmKernel::SharedStorageSize;
    void* pointers[] = {&params};
    return launch_kernel(kernel(), shape, pointers, l, message, size);
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    if constexpr (!kPersistent) {
      constexpr int64_t kMost = int64_t(65535) * kTileN; // one block a tile, and a grid is no higher
      if ((kSwapAB ? l.M : l.N) > kMost) {
        snprintf(message, size, "out: expected at most %lld %s for this kernel, got M = %lld, N = %lld", static_cast<long long>(kMost),
                 kSwapAB ? "rows" : "columns", static_cast<long long>(l.M), static_cast<long long>(l.N));
        return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
      }
    }
    return launch_with_maps<Params>(l, message, size, &encode, &check_maps, &launch_encoded);
  }

  static constexpr Kernel entry(const char* row) {
    Kernel kernel = {row, DtypeOf<Out>::value, int32_t(GemmKernel::SharedStorageSize), &prepare, &launch};
    if constexpr (kStreamK) kernel.workspace_size = &workspace_size;
    return kernel;
  }
};

} // namespace scaled_mm::c3x
