// The fused epilogue of SM90 for grouped products: the same node, whose operands begin where the tile's expert begins.
#pragma once

#include "int8/epilogue/visitor_sm90.cuh"
#include "int8/grouped/experts.cuh"

namespace scaled_mm::grouped {

template <class CtaTile, class ElementOut, bool SwapAB>
struct EpilogueSm90 : ScaledEpilogueSm90<CtaTile, ElementOut, SwapAB> {
  using Base = ScaledEpilogueSm90<CtaTile, ElementOut, SwapAB>;
  using SharedStorage = typename Base::SharedStorage;

  struct Params {
    EpilogueOperands operands; // of expert 0, as if all tokens were its
    ExpertStrides strides;
    const int32_t* begin; // of each expert's rows; written by the blocks before they begin
  };
  using Arguments = Params;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t, cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE EpilogueSm90() {}
  CUTLASS_HOST_DEVICE EpilogueSm90(Params const& params, SharedStorage const& storage) : Base(params.operands, storage), params_(&params) {}

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    const int expert = int(cute::get<3>(args.tile_coord_mnkl));
    const EpilogueOperands own = operands_of_expert(params_->operands, params_->strides, expert, params_->begin[expert]);
    return this->template make_callbacks<ReferenceSrc, EpilogueOperands>(args, own, 0); // an expert is no batch
  }

private:
  Params const* params_ = nullptr;
};

} // namespace scaled_mm::grouped
