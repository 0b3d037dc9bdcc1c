// The grouped variant of c3x/ for SM90: CUTLASS 3.x's pointer-array kernel, whose producer and epilogue warps edit their tensor
// maps when a tile belongs to another expert than the one before. One launch: what CUTLASS reads from memory (sizes, pointers and
// strides of every expert) is worked out by the blocks themselves before they begin.
#pragma once

#include "cutlass/gemm/group_array_problem_shape.hpp"

#include "int8/c3x/gemm.cuh"
#include "int8/grouped/launch.cuh"
#include "int8/grouped/visitor_sm90.cuh"

namespace scaled_mm::grouped {

// Names of the table's schedules and what they mean to CUTLASS here.
struct Pingpong {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};
struct Cooperative {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

// A main loop whose tensor maps go on past an expert's end, to the last token and the last expert's weights: a partial tile is filled with the next
// experts' rows, which takes a fifth of the time of the zeros that TMA writes past the end of a tensor (c3x/partial_map.cuh). None of them reach an
// element of out that is stored. kTokens: which of the MMA's operands a is, 0 or 1.
template <class Base, int kTokens>
struct AllExperts : Base {
  struct Arguments : Base::Arguments {
    const int32_t* begin; // each expert's first row
    int32_t tokens;
    int32_t adjoining; // experts whose weights lie one after the other: all or 0
  };
  struct Params : Base::Params {
    const int32_t* begin;
    int32_t tokens, adjoining;
  };

  template <class Problem>
  static constexpr Params to_underlying_arguments(Problem const& problem, Arguments const& arguments, void* workspace) {
    return {Base::to_underlying_arguments(problem, arguments, workspace), arguments.begin, arguments.tokens, arguments.adjoining};
  }

  // Called by all lanes of the producer's warp.
  template <class Maps, class Problem>
  CUTLASS_DEVICE void tensormaps_perform_update(typename Base::TensorMapStorage& shared, Params const& params, Maps const& maps, Problem problem,
                                                int32_t expert) {
    cute::get<kTokens>(problem) = params.tokens - params.begin[expert];
    if (params.adjoining > 0) cute::get<1 - kTokens>(problem) *= params.adjoining - expert;
    Base::tensormaps_perform_update(shared, params, maps, problem, expert);
  }
};

// What CUTLASS reads, one entry for each expert.
template <class Gemm>
struct Problems {
  typename Gemm::Shape* shapes;
  const int8_t** first;
  const int8_t** second;
  typename Gemm::ElementOut** out;
  typename Gemm::StrideFirst* stride_first;
  typename Gemm::StrideSecond* stride_second;
  typename Gemm::StrideOut* stride_out;
  int32_t* begin;
};

// What these entries are worked out from.
template <class Gemm>
struct Preparation {
  Experts experts;
  int N, K;
  const int8_t *a, *b;
  typename Gemm::ElementOut* out;
  int64_t lda, ldb, ldd, b_stride;
  Problems<Gemm> problems;

  __device__ void write(int expert, int begin, int end) const {
    const int8_t* own_a = a + begin * lda;
    const int8_t* own_b = b + expert * b_stride;
    problems.shapes[expert] = {Gemm::kSwapAB ? N : end - begin, Gemm::kSwapAB ? end - begin : N, K};
    problems.first[expert] = Gemm::kSwapAB ? own_b : own_a;
    problems.second[expert] = Gemm::kSwapAB ? own_a : own_b;
    problems.out[expert] = out + begin * ldd;
    problems.stride_first[expert] = {Gemm::kSwapAB ? ldb : lda, cute::_1{}, cute::_0{}};
    problems.stride_second[expert] = {Gemm::kSwapAB ? lda : ldb, cute::_1{}, cute::_0{}};
    cute::get<Gemm::kSwapAB ? 1 : 0>(problems.stride_out[expert]) = ldd;
    problems.begin[expert] = begin;
  }
};

// Every block writes the entries of all experts, for no block can wait for another. All write the same values to the same places, so
// what a block finds there is what it wrote, whoever was last.
template <class Gemm>
__global__ void __launch_bounds__(Gemm::GemmKernel::MaxThreadsPerBlock, 1)
    grouped_kernel(const __grid_constant__ Preparation<Gemm> p, const __grid_constant__ typename Gemm::GemmKernel::Params params) {
  constexpr int kPerLane = 8;
  using Window = ExpertWindow<kPerLane>;
  static_assert(Gemm::GemmKernel::MaxThreadsPerBlock / 32 >= kPerLane, "warp i writes the i-th expert of every lane");
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  int rows_before = 0;
  for (int first = 0; first < p.experts.count; first += Window::kSize) {
    Window window;
    window.load(p.experts, first, rows_before, lane);
    int begin = window.before;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = first + lane * kPerLane + i;
      if (i == warp && expert < p.experts.count) p.write(expert, begin, window.end[i]);
      begin = window.end[i];
    }
    rows_before = __shfl_sync(kWholeWarp, begin, 31);
  }
  clear_rows(p.out, p.ldd, 1, rows_before, p.experts.zeroed, p.N, int(blockDim.x));
  if (p.experts.count == 0) return;
  __syncthreads();
  extern __shared__ char shared_memory[];
  typename Gemm::GemmKernel{}(params, shared_memory);
}

template <int kTileM, int kTileN, int kTileK, int kClusterM, int kClusterN, class Schedule, int kStages, bool kSwapAB_, c3x::Raster kRaster,
          int kSwizzle, class Out>
struct C3x {
  static constexpr bool kSwapAB = kSwapAB_;
  using Tile = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;
  using ElementOut = typename c3x::CutlassType<Out>::type;
  using LayoutOut = cute::conditional_t<kSwapAB, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  static constexpr int kAlignOut = 16 / sizeof(Out);

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, int32_t, float, void,
      LayoutOut*, kAlignOut, ElementOut, LayoutOut*, kAlignOut, typename Schedule::Epilogue, EpilogueSm90<Tile, ElementOut, kSwapAB>>::CollectiveOp;

  using Stages = cute::conditional_t<kStages == 0, cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
                                     cutlass::gemm::collective::StageCount<kStages>>;

  using BaseMainloop =
      typename cutlass::gemm::collective::CollectiveBuilder<cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, cutlass::layout::RowMajor*,
                                                            16, int8_t, cutlass::layout::ColumnMajor*, 16, int32_t, Tile, Cluster, Stages,
                                                            typename Schedule::Mainloop>::CollectiveOp;
  using Mainloop = AllExperts<BaseMainloop, kSwapAB ? 1 : 0>;

  using Shape = cute::Shape<int, int, int>;
  using GemmKernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Shape>, Mainloop, Epilogue>;
  static_assert(GemmKernel::SharedStorageSize <= 227 * 1024, "the shared memory of SM90");
  using Arguments = typename GemmKernel::Arguments;
  using StrideFirst = typename GemmKernel::InternalStrideA;
  using StrideSecond = typename GemmKernel::InternalStrideB;
  using StrideOut = typename GemmKernel::InternalStrideD;

  static DeviceKernel& kernel() {
    static DeviceKernel one(&grouped_kernel<C3x>);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    return scaled_mm::prepare_kernel(kernel(), GemmKernel::SharedStorageSize, device, message, size);
  }

  // The parts of the workspace, in order, each aligned as a tensor map in memory has to be.
  static constexpr uintptr_t kAlignment = 128;
  class Layout {
  public:
    explicit Layout(void* memory) : at_(reinterpret_cast<uintptr_t>(memory)) {}
    template <class T>
    T* take(int64_t count) {
      at_ = (at_ + kAlignment - 1) / kAlignment * kAlignment;
      T* const begin = reinterpret_cast<T*>(at_);
      at_ += uintptr_t(count) * sizeof(T);
      return begin;
    }
    uintptr_t end() const { return at_; }

  private:
    uintptr_t at_;
  };

  static Problems<C3x> problems_in(Layout& layout, int64_t experts) {
    return {layout.template take<Shape>(experts),       layout.template take<const int8_t*>(experts), layout.template take<const int8_t*>(experts),
            layout.template take<ElementOut*>(experts), layout.template take<StrideFirst>(experts),   layout.template take<StrideSecond>(experts),
            layout.template take<StrideOut>(experts),   layout.template take<int32_t>(experts)};
  }

  // Of CUTLASS's own workspace: the tensor maps of each SM.
  static int64_t maps_bytes(int32_t multiprocessors) {
    Arguments arguments{};
    arguments.hw_info.sm_count = multiprocessors;
    return int64_t(GemmKernel::get_workspace_size(arguments));
  }

  static int64_t workspace_size(int64_t experts, int32_t multiprocessors) {
    Layout layout(nullptr);
    layout.template take<char>(maps_bytes(multiprocessors));
    problems_in(layout, experts);
    return int64_t(layout.end() + kAlignment); // the workspace itself is aligned to 16 bytes
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    if (l.M > INT_MAX - kTileM - kTileN || l.N > INT_MAX - kTileM - kTileN) {
      snprintf(message, size, "out: expected at most %d rows and columns and a tile, got %lld tokens, N = %lld", INT_MAX, static_cast<long long>(l.M),
               static_cast<long long>(l.N));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    CurrentDevice current(l.device); // the driver encodes tensor maps
    if (current.error()) return cuda_failure(current.error(), "cudaSetDevice", message, size);
    Layout layout(l.workspace);
    void* const maps = layout.template take<char>(maps_bytes(l.multiprocessors));
    const Problems<C3x> problems = problems_in(layout, l.groups->experts);
    // A dimension of one has no stride of its own, but a tensor map wants a legal one.
    const int64_t packed_k = (l.K + 15) / 16 * 16, packed_n = (l.N + kAlignOut - 1) / kAlignOut * kAlignOut;
    Preparation<C3x> p{experts_of(l),
                       int(l.N),
                       int(l.K),
                       static_cast<const int8_t*>(l.a),
                       static_cast<const int8_t*>(l.b),
                       static_cast<ElementOut*>(l.out),
                       l.M > 1 ? l.a_stride_m : packed_k,
                       l.N > 1 ? l.b_stride_n : packed_k,
                       l.M > 1 ? l.out_stride_m : packed_n,
                       l.groups->b_stride,
                       problems};
    const bool adjoin = p.b_stride == l.N * p.ldb && l.groups->experts * l.N <= INT_MAX;
    Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    arguments.problem_shape = {int32_t(l.groups->experts), problems.shapes, nullptr};
    arguments.mainloop = {{problems.first, problems.stride_first, problems.second, problems.stride_second},
                          problems.begin,
                          int32_t(l.M),
                          adjoin ? int32_t(l.groups->experts) : 0};
    arguments.epilogue.thread = {epilogue_operands(l), expert_strides(l), problems.begin};
    arguments.epilogue.ptr_D = problems.out;
    arguments.epilogue.dD = problems.stride_out;
    arguments.scheduler.raster_order = kRaster;
    arguments.scheduler.max_swizzle_size = kSwizzle;
    arguments.hw_info.device_id = l.device;
    arguments.hw_info.sm_count = l.multiprocessors;
    typename GemmKernel::Params params = GemmKernel::to_underlying_arguments(arguments, maps);
    if (scaledMMStatus_t status = c3x::check_encoded(params, message, size)) return status;
    LaunchShape shape;
    shape.grid = GemmKernel::get_grid_shape(params);
    shape.block = GemmKernel::get_block_shape();
    shape.cluster = dim3(kClusterM, kClusterN, 1);
    shape.shared_memory = GemmKernel::SharedStorageSize;
    void* pointers[] = {&p, &params};
    return launch_kernel(kernel(), shape, pointers, l, message, size);
  }

  static constexpr Kernel entry(const char* row) {
    return {row, DtypeOf<Out>::value, int32_t(GemmKernel::SharedStorageSize), &prepare, &launch, nullptr, &workspace_size};
  }
};

} // namespace scaled_mm::grouped
