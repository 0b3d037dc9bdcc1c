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
  bool pairs; // two columns side by side may be stored at once
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

// The MMA's accumulators of a thread: int32 sums, and for scales of blocks float32 ones.
template <int kFirst, int kSecond, bool kSwapAB, bool kBlockScales, class Out>
class WgmmaOutput {
public:
  static constexpr int kCount = kSecond / 2; // accumulators

  __device__ WgmmaOutput(const WgmmaExperts& p, const WgmmaPlace& place, int row, int lane)
      : p_(p), place_(place), row_(row), lane_(lane), first_n_(place.tile_n * (kSwapAB ? kFirst : kSecond)),
        operands_(operands_of_expert(p.epilogue, p.strides, place.expert, place.first_m)),
        out_(static_cast<Out*>(p.out) + place.first_m * p.out_stride_m) {}

  // value(i, m, n): what accumulator i gives for row m, from the tile's first one on, and column n.
  template <class Value>
  __device__ void store(const Value& value) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; i += 4) {
      const int column = i / 4 * 8 + lane_ % 4 * 2;
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int at = i + half * 2, side = row_ + half * 8;
        if constexpr (kSwapAB) {
          const int n = first_n_ + side;
          if (n >= p_.N) continue;
          store_one(column, n, value(at, column, n));
          store_one(column + 1, n, value(at + 1, column + 1, n));
        } else {
          const int n = first_n_ + column;
          if (side >= place_.rows || n >= p_.N) continue;
          const bool two = n + 1 < p_.N;
          const Out x = value(at, side, n), y = two ? value(at + 1, side, n + 1) : x;
          if (p_.pairs && two) {
            struct alignas(2 * sizeof(Out)) Pair {
              Out x, y;
            };
            *reinterpret_cast<Pair*>(out_ + side * p_.out_stride_m + n) = {x, y};
          } else {
            store_one(side, n, x);
            if (two) store_one(side, n + 1, y);
          }
        }
      }
    }
  }
  __device__ const EpilogueOperands& operands() const { return operands_; }

private:
  // m: from the tile's first row on.
  __device__ void store_one(int m, int n, Out value) const {
    if (m < place_.rows) out_[m * p_.out_stride_m + n * p_.out_stride_n] = value;
  }

  const WgmmaExperts& p_;
  const WgmmaPlace place_;
  const int row_, lane_, first_n_;
  const EpilogueOperands operands_; // rows from the tile's first one on
  Out* const out_;
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
    const WgmmaOutput<kFirst, kSecond, kSwapAB, kBlockScales, Out> output(p, place, row, lane);
    if constexpr (kBlockScales) {
      float sums[kCount];
      block_scaled::sum_blocks<kSwapAB, kDepth, Shape::kBlocks>(mma, first, second, ring, s, p.K, p.scales.half, turns, row, sums);
      output.store([&](int i, int, int n) {
        Out out;
        block_scaled::cast(&out, block_scaled::add_bias(sums[i], load_bias(output.operands(), 0, n)));
        return out;
      });
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
      output.store([&](int i, int m, int n) {
        const int row_of_expert = m < place.rows ? m : place.rows - 1;
        const EpilogueOperands& e = output.operands();
        const int32_t sum = e.row_terms ? subtract_zero_points(acc(i), e.row_terms[row_of_expert], e.col_terms[n]) : acc(i);
        if constexpr (std::is_same_v<Out, int32_t>) {
          return sum;
        } else {
          Out out;
          block_scaled::cast(&out, scale_and_bias(sum, load_a_scale(e, 0, row_of_expert), load_b_scale(e, 0, n), load_bias(e, 0, n)));
          return out;
        }
      });
    }
  }
  clear_rows(static_cast<Out*>(p.out), p.out_stride_m, p.out_stride_n, walk.rows_end(), p.experts.tokens, p.N, kConsumers);
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
    const bool pairs = l.out_stride_n == 1 && (l.M == 1 || l.out_stride_m % 2 == 0) && reinterpret_cast<uintptr_t>(l.out) % (2 * sizeof(Out)) == 0;
    return {block_scaled::TileMaps<kWeightRows>::encode(l.b, N, K, ldb, E, lde),
            c3x::RowsMap<kBlock>::encode(l.a, int(l.M), K, 1, lda, 0, kTokenRows),
            {experts_of(l), expert_strides(l), N, K, (N + kWeightRows - 1) / kWeightRows,
             kBlockScales ? block_scaled::scales_of(l) : block_scaled::Scales{}, epilogue_operands(l), l.out, l.M > 1 ? l.out_stride_m : 0,
             l.N > 1 ? l.out_stride_n : 0, pairs}};
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
