// Products of experts by wgmma on SM90, with scales of channels or of blocks. Thread blocks go from tile to tile of all experts; some of their warps
// load ahead, also across tiles. All experts' weights share one tensor map, whose third dimension is the expert, and the tokens have one, so no map
// is edited on the device. A tile of tokens may also load rows of the next expert; they belong to elements of out that are not stored.
//
// kSwapAB: out^T = b^T a^T, so that columns of b fill the wide side of the MMA and few rows of a its narrow side.
#pragma once

#include "int8/block_scaled/wgmma.cuh"
#include "int8/grouped/launch.cuh"

namespace scaled_mm::grouped {

struct WgmmaExperts {
  Experts experts;
  ExpertStrides strides; // b_scale: of vectors, or of matrices of blocks
  int N, K, tiles_n;
  block_scaled::Scales scales; // of blocks
  EpilogueOperands epilogue;
  void* out;
  int64_t out_stride_m, out_stride_n;
  int together; // of `block_scaled::WgmmaStore`
};

template <int kWeightRows>
struct WgmmaExpertsParams {
  block_scaled::TileMaps<kWeightRows> weights; // [E, N, K]
  c3x::RowsMap<block_scaled::kBlock> tokens;   // [tokens, K]
  WgmmaExperts problem;
};

// The tile that a walk has found: its expert's rows that are left from its first one on, and its first column.
struct WgmmaPlace {
  int expert, first_m, rows, tile_n;

  template <int kTokenRows>
  __device__ static WgmmaPlace of(const TileWalk<kTokenRows>& walk) {
    const int tiles_m = (walk.rows + kTokenRows - 1) / kTokenRows, m = walk.in_expert % tiles_m * kTokenRows;
    return {walk.expert, walk.begin + m, walk.rows - m, walk.in_expert / tiles_m};
  }
};

// The elements of out that a thread's accumulators give: int32 sums, and for scales of blocks float32 ones.
template <int kFirst, int kSecond, bool kSwapAB, bool kBlockScales, class Out>
class WgmmaOutput {
public:
  // Reads the scales of channels before the main loop, which hides the latency of memory.
  __device__ WgmmaOutput(const WgmmaExperts& p, const WgmmaPlace& place, block_scaled::WgmmaThread thread)
      : p_(p), place_(place), thread_(thread), first_n_(place.tile_n * (kSwapAB ? kFirst : kSecond)),
        operands_(operands_of_expert(p.epilogue, p.strides, place.expert, place.first_m)) {
    if constexpr (kScales) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) side_scale_[half] = scale_of(thread.side(half), kSwapAB);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kColumns; ++j) column_scale_[j] = scale_of(thread.column(j), !kSwapAB);
    }
  }

  // Of accumulator i with scales of channels.
  __device__ Out scaled(int i, int32_t sum) const {
    const int n = n_of(i);
    if (operands_.row_terms) {
      const int m = row_of_expert(kSwapAB ? thread_.column_of(i) : thread_.side_of(i));
      sum = subtract_zero_points(sum, operands_.row_terms[m], operands_.col_terms[n]);
    }
    if constexpr (kScales) {
      const float side = side_scale_[i % 4 / 2], column = column_scale_[i / 4 * 2 + i % 2];
      Out out;
      block_scaled::cast(&out, scale_and_bias(sum, kSwapAB ? column : side, kSwapAB ? side : column, load_bias(operands_, 0, n)));
      return out;
    } else {
      return sum;
    }
  }
  // Of a float32 sum with scales of blocks.
  __device__ Out with_bias(int i, float sum) const {
    Out out;
    block_scaled::cast(&out, block_scaled::add_bias(sum, load_bias(operands_, 0, n_of(i))));
    return out;
  }

  // value(i): the element of accumulator i.
  template <class Value>
  __device__ void store(const Value& value) const {
    Out* const out = static_cast<Out*>(p_.out) + place_.first_m * p_.out_stride_m + first_n_ * p_.out_stride_n;
    const block_scaled::WgmmaStore<kSecond, kSwapAB, Out> store{thread_,         out,        place_.rows, p_.N - first_n_, p_.out_stride_m,
                                                                p_.out_stride_n, p_.together};
    store(value);
  }

private:
  static constexpr int kColumns = kSecond / 4;
  static constexpr bool kScales = !kBlockScales && !std::is_same_v<Out, int32_t>;

  // Past the last row and column: the last one, whose element is not stored.
  __device__ int row_of_expert(int m) const { return min(m, place_.rows - 1); }
  __device__ int column_of_out(int n) const { return min(first_n_ + n, p_.N - 1); }
  __device__ int n_of(int i) const { return column_of_out(kSwapAB ? thread_.side_of(i) : thread_.column_of(i)); }
  __device__ float scale_of(int at, bool of_b) const {
    return of_b ? load_b_scale(operands_, 0, column_of_out(at)) : load_a_scale(operands_, 0, row_of_expert(at));
  }

  const WgmmaExperts& p_;
  const WgmmaPlace place_;
  const block_scaled::WgmmaThread thread_;
  const int first_n_;
  const EpilogueOperands operands_; // rows from the tile's first one on
  float side_scale_[kScales ? 2 : 1], column_scale_[kScales ? kColumns : 1];
};

using block_scaled::WgmmaShape;

template <int kFirst, int kSecond, int kStages, int kDepth, bool kSwapAB, bool kBlockScales, class Mma, class Out>
__global__ void __launch_bounds__(WgmmaShape<kFirst, kSecond, kStages, kDepth, kSwapAB, kBlockScales>::kThreads,
                                  WgmmaShape<kFirst, kSecond, kStages, kDepth, kSwapAB, kBlockScales>::kResident)
    wgmma_kernel(const __grid_constant__ WgmmaExpertsParams<kSwapAB ? kFirst : kSecond> params) {
  using namespace cute;
  using Shape = WgmmaShape<kFirst, kSecond, kStages, kDepth, kSwapAB, kBlockScales>;
  constexpr int kConsumers = Shape::kConsumers, kCount = kSecond / 2, kBlock = block_scaled::kBlock;
  constexpr int kTokenRows = Shape::kTokenRows;
  let_next_kernel_start();
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<typename Shape::Storage*>(memory);
  const WgmmaExperts& p = params.problem;
  const int lane = int(threadIdx.x) % 32;

  if (threadIdx.x == kConsumers) Shape::init(s);
  __syncthreads();

  TileWalk<kTokenRows> walk(p.experts, p.tiles_n);
  if (threadIdx.x >= kConsumers) {
    if constexpr (Shape::kReconfigure) cutlass::arch::warpgroup_reg_dealloc<Shape::kLoaderRegisters>();
    if (!kBlockScales && threadIdx.x >= kConsumers + 64) return; // nothing to load
    wait_for_preceding_kernel();
    block_scaled::StageLoads<Shape, kStages, kDepth> loads(s, int(threadIdx.x) - kConsumers);
    for (int number = int(blockIdx.x); walk.find(number); number += int(gridDim.x)) {
      const WgmmaPlace place = WgmmaPlace::of(walk);
      const int rows = params.weights.rows_of(place.tile_n);
      const auto load_weights = [&](uint64_t* barrier, int8_t* to, int k) { params.weights.load(barrier, to, place.tile_n, rows, k, place.expert); };
      const auto load_tokens = [&](uint64_t* barrier, int8_t* to, int k) { params.tokens.template copy<false>(barrier, to, k, place.first_m, 0, 0); };
      const float *of_a = nullptr, *of_b = nullptr;
      if constexpr (kBlockScales) {
        of_a = p.scales.a + place.first_m * p.scales.a_stride_m;
        of_b = p.scales.b + place.expert * p.strides.b_scale + place.tile_n * Shape::kWeightRows / p.scales.block() * p.scales.b_stride_n;
      }
      if constexpr (kSwapAB) {
        loads.load_tile(p.K, rows, load_weights, kTokenRows, load_tokens, p.scales, of_a, place.rows, of_b);
      } else {
        loads.load_tile(p.K, kTokenRows, load_tokens, rows, load_weights, p.scales, of_a, place.rows, of_b);
      }
      __syncwarp();
    }
    return;
  }

  if constexpr (Shape::kReconfigure) cutlass::arch::warpgroup_reg_alloc<Shape::kConsumerRegisters>();
  wait_for_preceding_kernel();
  decode::Ring<kStages> ring;
  const int row = int(threadIdx.x) / 32 * 16 + lane / 4; // of the MMA's tile, the thread's first one
  Mma mma;
  const auto thread = mma.get_thread_slice(int(threadIdx.x));
  const auto first =
      thread.make_fragment_A(thread.partition_A(make_tensor(make_smem_ptr(&s.first[0][0]), decode::Steps<kFirst, kStages * kDepth>{})));
  const auto second =
      thread.make_fragment_B(thread.partition_B(make_tensor(make_smem_ptr(&s.second[0][0]), decode::Steps<kSecond, kStages * kDepth>{})));
  auto acc = partition_fragment_C(mma, cute::Shape<Int<kFirst>, Int<kSecond>>{});
  static_assert(size(acc) == kCount);
  const block_scaled::Turns<(kBlockScales && kFirst > 64)> turns;
  // Starts the MMAs of `count` slots of the stage, from `slot` on.
  const auto multiply = [&](int slot, auto count) {
    warpgroup_fence_operand(acc);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < decltype(count)::value; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < size<2>(first); ++k) {
        cute::gemm(mma, first(_, _, k, ring.stage * kDepth + slot + i), second(_, _, k, ring.stage * kDepth + slot + i), acc);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
    }
    warpgroup_commit_batch();
  };
  for (int number = int(blockIdx.x); walk.find(number); number += int(gridDim.x)) {
    const WgmmaPlace place = WgmmaPlace::of(walk);
    const WgmmaOutput<kFirst, kSecond, kSwapAB, kBlockScales, Out> output(p, place, {row, lane});
    if constexpr (kBlockScales) {
      float sums[kCount];
      block_scaled::sum_blocks<kSwapAB, kDepth, Shape::kBlocks>(mma, first, second, ring, s, p.K, p.scales.half, turns, row, sums);
      output.store([&](int i) { return output.with_bias(i, sums[i]); });
    } else {
      mma.accumulate_ = GMMA::ScaleOut::Zero;
      int held = 0; // the stage that the MMAs under way read
      int left = p.K;
      for (; left > (kDepth - 1) * kBlock; left -= kDepth * kBlock, ring.advance()) {
        s.full[ring.stage].wait(ring.phase);
        multiply(0, Int<kDepth>{});
        if (left < p.K) {
          warpgroup_wait<1>();
          if (lane == 0) s.empty[held].arrive();
        }
        held = ring.stage;
      }
      warpgroup_wait<0>();
      if (kDepth == 1 || p.K > (kDepth - 1) * kBlock) {
        if (lane == 0) s.empty[held].arrive();
      }
      if (kDepth > 1 && left > 0) { // the last stage has fewer than kDepth slots
        s.full[ring.stage].wait(ring.phase);
        for (int slot = 0; left > 0; ++slot, left -= kBlock) {
          multiply(slot, _1{});
          warpgroup_wait<0>();
        }
        if (lane == 0) s.empty[ring.stage].arrive();
        ring.advance();
      }
      warpgroup_fence_operand(acc);
      output.store([&](int i) { return output.scaled(i, acc(i)); });
    }
  }
  clear_rows(static_cast<Out*>(p.out), p.out_stride_m, p.out_stride_n, walk.rows_end(), p.experts.zeroed, p.N, kConsumers);
}

// kTileM, kTileN: of the MMA, so of out^T where kSwapAB. One instance for a kernel config and an output dtype.
template <int kTileM, int kTileN, int kStages, int kDepth, bool kSwapAB, bool kBlockScales, class Out>
struct Wgmma {
  static_assert((kTileM == 64 || kTileM == 128) && kTileN % 8 == 0 && kTileN <= 128 && kStages >= 2, "the rules of the table");
  static constexpr int kTokenRows = kSwapAB ? kTileN : kTileM, kWeightRows = kSwapAB ? kTileM : kTileN;
  static_assert(!kBlockScales || block_scaled::kBlock % kWeightRows == 0, "a tile has one scale of b for a block of K");
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<int8_t, int8_t, int32_t, cute::Shape<cute::_64, cute::Int<kTileN>, cute::Int<block_scaled::kBlock>>>(),
      cute::Layout<cute::Shape<cute::Int<kTileM / 64>, cute::_1, cute::_1>>{}));
  using Shape = WgmmaShape<kTileM, kTileN, kStages, kDepth, kSwapAB, kBlockScales>;
  using Params = WgmmaExpertsParams<kWeightRows>;
  static constexpr int kSharedMemory = int(sizeof(typename Shape::Storage));
  static_assert(kSharedMemory <= 227 * 1024, "the shared memory of SM90");

  static PersistentKernel& kernel() {
    static PersistentKernel one(&wgmma_kernel<kTileM, kTileN, kStages, kDepth, kSwapAB, kBlockScales, Mma, Out>, Shape::kThreads, kSharedMemory);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) { return kernel().prepare(device, message, size); }

  static Params encode(const GemmLaunch& l) {
    using block_scaled::kBlock;
    // A dimension of one has no stride of its own, but a tensor map wants a legal one.
    const int64_t packed_k = (l.K + 15) / 16 * 16;
    const int64_t lda = l.M > 1 ? l.a_stride_m : packed_k, ldb = l.N > 1 ? l.b_stride_n : packed_k;
    const int E = int(l.groups->experts), N = int(l.N), K = int(l.K);
    const int64_t lde = E > 1 ? l.groups->b_stride : ldb * N;
    return {block_scaled::TileMaps<kWeightRows>::encode(l.b, N, K, ldb, E, lde),
            c3x::RowsMap<kBlock>::encode(l.a, int(l.M), K, 1, lda, 0, kTokenRows),
            {experts_of(l), expert_strides(l), N, K, (N + kWeightRows - 1) / kWeightRows,
             kBlockScales ? block_scaled::scales_of(l) : block_scaled::Scales{}, epilogue_operands(l), l.out, l.M > 1 ? l.out_stride_m : 0,
             l.N > 1 ? l.out_stride_n : 0, block_scaled::stored_together<Out>(l)}};
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    Params params = encode(l);
    const bool loads = l.groups->experts > 0; // nothing else has tiles, and the driver refuses a map without elements
    if (loads && (!params.weights.is_encoded() || !c3x::is_encoded(params.tokens))) {
      snprintf(message, size, "cuTensorMapEncodeTiled: the driver refused the tensor map of %s", params.weights.is_encoded() ? "a" : "b");
      return SCALED_MM_STATUS_CUDA_ERROR;
    }
    return kernel().launch(l, kTokenRows, kWeightRows, &params, message, size, true);
  }

  static constexpr Kernel entry(const char* row) { return {row, DtypeOf<Out>::value, kSharedMemory, &prepare, &launch}; }
};

} // namespace scaled_mm::grouped
