// Block-scaled products by wgmma on SM90. A tile is computed by one or two warpgroups, 64 rows of the MMA each. Further warps load ahead, also across
// tiles. Two warpgroups multiply in turn.
//
// kSwapAB: out^T = b^T a^T, so that columns of b fill the wide side of the MMA and few rows of a its narrow side.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdio>

#include "cute/tensor.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"

#include "int8/block_scaled/launch.cuh"
#include "int8/block_scaled/wgmma_blocks.cuh"
#include "int8/block_scaled/wgmma_stages.cuh"
#include "int8/block_scaled/wgmma_store.cuh"
#include "int8/c3x/grid_dependency.cuh"
#include "int8/c3x/partial_map.cuh"
#include "int8/c3x/tensor_map.cuh"
#include "int8/decode/storage.cuh"

namespace scaled_mm::block_scaled {

// An operand [batch, rows, K]: a map whose copy loads a whole tile of kRows rows, and one for the last rows.
template <int kRows>
struct TileMaps {
  c3x::RowsMap<kBlock> whole;
  c3x::PartialMap<kRows, kBlock> last;

  static TileMaps encode(const void* data, int64_t rows, int64_t K, int64_t stride, int64_t batch = 1, int64_t batch_stride = 0) {
    return {c3x::RowsMap<kBlock>::encode(data, int(rows), int(K), int(batch), stride, batch_stride, kRows),
            c3x::PartialMap<kRows, kBlock>::encode(data, int(rows), int(K), int(batch), stride, batch_stride)};
  }
  bool is_encoded() const { return c3x::is_encoded(whole) && (!last.is_needed() || c3x::is_encoded(last)); }

  __device__ int rows_of(int tile) const { return last.parts.rows_of(tile); }
  // rows: `rows_of(tile)`. Not a copy in each branch: ptxas 13.0 then reads a coordinate under a predicate that it sets later.
  __device__ void load(uint64_t* barrier, int8_t* to, int tile, int rows, int k, int batch = 0) const {
    const c3x::RowsMap<kBlock>& map = rows == kRows ? whole : last;
    map.template copy<false>(barrier, to, k, tile * kRows, batch, 0);
  }
};

struct WgmmaProblem {
  int M, N, K;
  int tiles_m, tiles_n;
  Scales scales;
  EpilogueOperands epilogue;
  void* out;
  int64_t out_stride_m, out_stride_n;
  int together; // of `WgmmaStore`
};

template <int kFirst, int kSecond>
struct WgmmaParams {
  TileMaps<kFirst> first; // of the MMA
  TileMaps<kSecond> second;
  WgmmaProblem problem;
};

// The tiles of a thread block: every gridDim.x-th. Groups of kSwizzle adjacent tiles along N are walked down M, so the group's part of b stays in L2.
template <int kSwizzle>
struct WgmmaTiles {
  struct Place {
    int m, n;
  };
  int tiles_m, tiles_n, index;

  __device__ bool is_valid() const { return index < tiles_m * tiles_n; }
  __device__ void advance() { index += int(gridDim.x); }
  __device__ Place place() const {
    const int first_n = index / (kSwizzle * tiles_m) * kSwizzle, rest = tiles_n - first_n;
    const int width = rest < kSwizzle ? rest : kSwizzle, in_group = index - first_n * tiles_m;
    return {in_group / width, first_n + in_group % width};
  }
};

template <int kFirst, int kSecond, int kStages, int kDepth, int kSwizzle, bool kSwapAB, class Mma, class Out>
__global__ void __launch_bounds__(WgmmaShape<kFirst, kSecond, kStages, kDepth, kSwapAB>::kThreads,
                                  WgmmaShape<kFirst, kSecond, kStages, kDepth, kSwapAB>::kResident)
    wgmma_kernel(const __grid_constant__ WgmmaParams<kFirst, kSecond> params) {
  using namespace cute;
  using Shape = WgmmaShape<kFirst, kSecond, kStages, kDepth, kSwapAB>;
  constexpr int kConsumers = Shape::kConsumers, kCount = kSecond / 2, kTokenRows = Shape::kTokenRows;
  let_next_kernel_start();
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<typename Shape::Storage*>(memory);
  const WgmmaProblem& p = params.problem;
  WgmmaTiles<kSwizzle> tiles{p.tiles_m, p.tiles_n, int(blockIdx.x)};

  if (threadIdx.x == kConsumers) Shape::init(s);
  __syncthreads();

  if (threadIdx.x >= kConsumers) {
    if constexpr (Shape::kReconfigure) cutlass::arch::warpgroup_reg_dealloc<Shape::kLoaderRegisters>();
    wait_for_preceding_kernel();
    StageLoads<Shape, kStages, kDepth> loads(s, int(threadIdx.x) - kConsumers);
    for (; tiles.is_valid(); tiles.advance()) {
      const auto place = tiles.place();
      const int tile_first = kSwapAB ? place.n : place.m, tile_second = kSwapAB ? place.m : place.n;
      const int first_m = place.m * kTokenRows, first_n = place.n * Shape::kWeightRows;
      const int rows_first = params.first.rows_of(tile_first), rows_second = params.second.rows_of(tile_second);
      loads.load_tile(
          p.K, rows_first, [&](uint64_t* barrier, int8_t* to, int k) { params.first.load(barrier, to, tile_first, rows_first, k); }, rows_second,
          [&](uint64_t* barrier, int8_t* to, int k) { params.second.load(barrier, to, tile_second, rows_second, k); }, p.scales,
          p.scales.a + first_m * p.scales.a_stride_m, p.M - first_m, p.scales.b + first_n / p.scales.block() * p.scales.b_stride_n);
    }
    return;
  }

  if constexpr (Shape::kReconfigure) cutlass::arch::warpgroup_reg_alloc<Shape::kConsumerRegisters>();
  wait_for_preceding_kernel();
  const int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) / 32 * 16 + lane / 4;
  Mma mma;
  const auto thread = mma.get_thread_slice(int(threadIdx.x));
  const auto first =
      thread.make_fragment_A(thread.partition_A(make_tensor(make_smem_ptr(&s.first[0][0]), decode::Steps<kFirst, kStages * kDepth>{})));
  const auto second =
      thread.make_fragment_B(thread.partition_B(make_tensor(make_smem_ptr(&s.second[0][0]), decode::Steps<kSecond, kStages * kDepth>{})));
  const Turns<(kFirst > 64)> turns;
  Ring<kStages> ring;
  for (; tiles.is_valid(); tiles.advance()) {
    const auto place = tiles.place();
    const int first_m = place.m * kTokenRows, first_n = place.n * (kSwapAB ? kFirst : kSecond);
    float sums[kCount];
    sum_blocks<kSwapAB, kDepth, Shape::kBlocks>(mma, first, second, ring, s, p.K, p.scales.half, turns, row, sums);
    const WgmmaThread at{row, lane};
    Out* const out = static_cast<Out*>(p.out) + first_m * p.out_stride_m + first_n * p.out_stride_n;
    const auto bias_of = [&](int n) { return load_bias(p.epilogue, 0, min(first_n + n, p.N - 1)); };
    const float bias_of_sides[2] = {kSwapAB ? bias_of(at.side(0)) : 0, kSwapAB ? bias_of(at.side(1)) : 0};
    const WgmmaStore<kSecond, kSwapAB, Out> store{at, out, p.M - first_m, p.N - first_n, p.out_stride_m, p.out_stride_n, p.together};
    store([&](int i) {
      Out result;
      cast(&result, add_bias(sums[i], kSwapAB ? bias_of_sides[i % 4 / 2] : bias_of(at.column_of(i))));
      return result;
    });
  }
}

// kTileM, kTileN: of the MMA, so of out^T where kSwapAB. One instance for a kernel config and an output dtype.
template <int kTileM, int kTileN, int kStages, int kDepth, int kSwizzle, bool kSwapAB, class Out>
struct Wgmma {
  static_assert((kTileM == 64 || kTileM == 128) && kTileN % 8 == 0 && kTileN <= 128 && kStages >= 2, "the rules of the table");
  static_assert(kBlock % (kSwapAB ? kTileM : kTileN) == 0, "a tile has one scale of b for a block of K");
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<int8_t, int8_t, int32_t, cute::Shape<cute::_64, cute::Int<kTileN>, cute::Int<kBlock>>>(),
      cute::Layout<cute::Shape<cute::Int<kTileM / 64>, cute::_1, cute::_1>>{}));
  using Shape = WgmmaShape<kTileM, kTileN, kStages, kDepth, kSwapAB>;
  using Params = WgmmaParams<kTileM, kTileN>;
  static constexpr int kSharedMemory = int(sizeof(typename Shape::Storage));
  static_assert(kSharedMemory <= 227 * 1024, "the shared memory of SM90");
  static_assert(sizeof(Params) <= LaunchCache::kBytes && alignof(Params) <= LaunchCache::kAlignment, "the parameters fit a launch cache");

  static DeviceKernel& kernel() {
    static DeviceKernel one(&wgmma_kernel<kTileM, kTileN, kStages, kDepth, kSwizzle, kSwapAB, Mma, Out>);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    return prepare_kernel(kernel(), kSharedMemory, device, message, size);
  }

  static Params encode(const GemmLaunch& l) {
    // A dimension of one has no stride of its own, but a tensor map wants a legal one.
    const int64_t packed_k = (l.K + 15) / 16 * 16;
    const int64_t lda = l.M > 1 ? l.a_stride_m : packed_k, ldb = l.N > 1 ? l.b_stride_n : packed_k;
    constexpr int kM = kSwapAB ? kTileN : kTileM, kN = kSwapAB ? kTileM : kTileN;
    const WgmmaProblem problem{int(l.M),
                               int(l.N),
                               int(l.K),
                               int((l.M + kM - 1) / kM),
                               int((l.N + kN - 1) / kN),
                               scales_of(l),
                               epilogue_operands(l),
                               l.out,
                               l.M > 1 ? l.out_stride_m : 0,
                               l.N > 1 ? l.out_stride_n : 0,
                               stored_together<Out>(l)};
    if constexpr (kSwapAB) {
      return {TileMaps<kTileM>::encode(l.b, l.N, l.K, ldb), TileMaps<kTileN>::encode(l.a, l.M, l.K, lda), problem};
    } else {
      return {TileMaps<kTileM>::encode(l.a, l.M, l.K, lda), TileMaps<kTileN>::encode(l.b, l.N, l.K, ldb), problem};
    }
  }

  static scaledMMStatus_t check_maps(const Params& params, char* message, size_t size) {
    if (params.first.is_encoded() && params.second.is_encoded()) return SCALED_MM_STATUS_SUCCESS;
    snprintf(message, size, "cuTensorMapEncodeTiled: the driver refused the tensor map of %s", params.first.is_encoded() == kSwapAB ? "a" : "b");
    return SCALED_MM_STATUS_CUDA_ERROR;
  }

  static scaledMMStatus_t launch_encoded(Params& params, const GemmLaunch& l, char* message, size_t size) {
    LaunchShape shape;
    shape.grid = dim3(unsigned(std::min(params.problem.tiles_m * params.problem.tiles_n, l.multiprocessors * Shape::kResident)));
    shape.block = dim3(Shape::kThreads);
    shape.shared_memory = kSharedMemory;
    shape.dependent = true;
    void* pointers[] = {&params};
    return launch_kernel(kernel(), shape, pointers, l, message, size);
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    int tiles = 0;
    constexpr int kSide = std::max(kSwizzle, 2); // index + gridDim.x must not overflow
    if (scaledMMStatus_t status = count_tiles(l, kSwapAB ? kTileN : kTileM, kSwapAB ? kTileM : kTileN, kSide, &tiles, message, size)) return status;
    return launch_with_maps<Params>(l, message, size, &encode, &check_maps, &launch_encoded);
  }

  static constexpr Kernel entry(const char* row) { return {row, DtypeOf<Out>::value, kSharedMemory, &prepare, &launch}; }
};

} // namespace scaled_mm::block_scaled
