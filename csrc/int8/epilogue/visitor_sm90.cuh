// The fused epilogue as a node of CUTLASS 3.x's epilogue visitor tree.
//
// The two dimensions of the MMA are called first and second here: first is out's M and second its N, or the other way
// round when the operands are swapped. What varies along the first is read into registers once a tile. What varies along
// the second is read into shared memory once a tile, and from there into registers once a column of epilogue subtiles: a
// load from shared memory per element showed as 5-15% of the run time of tiles with a scale and a bias on this side.
#pragma once

#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/numeric_conversion.h"

#include "int8/c3x/grid_dependency.cuh"
#include "int8/epilogue/formula.cuh"

namespace scaled_mm {

template <class CtaTile, class ElementOut, bool SwapAB>
struct ScaledEpilogueSm90 : cutlass::epilogue::fusion::detail::Sm90VisitorImpl<> {
  static constexpr bool kScaled = !cute::is_same_v<ElementOut, int32_t>;
  static constexpr int kSecond = cute::size<1>(CtaTile{});

  using Arguments = EpilogueOperands;
  using Params = EpilogueOperands;

  struct SharedStorage {
    alignas(16) float scale[kScaled ? kSecond : 1];
    alignas(16) float bias[kScaled && !SwapAB ? kSecond : 1];
    alignas(16) int2 terms[kSecond];
  };

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

  CUTLASS_HOST_DEVICE ScaledEpilogueSm90() {}
  CUTLASS_HOST_DEVICE ScaledEpilogueSm90(Params const& params, SharedStorage const& storage)
      : params_(&params), storage_(const_cast<SharedStorage*>(&storage)) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }

  // Operands: EpilogueOperands, or a reference to some that outlive the tile.
  template <class Operands, class RegFirst, class SharedSecond, class RegSecond, class Coords, class Residue>
  struct ConsumerStoreCallbacks : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
    RegFirst r_scale, r_bias;     // (CPY,CPY_M,CPY_N,EPI_M,EPI_N), constant along the second dimension
    SharedSecond s_scale, s_bias; // (CPY,CPY_M,CPY_N,EPI_M,EPI_N), constant along the first dimension
    RegSecond c_scale, c_bias;    // (CPY,CPY_M,CPY_N) of the subtiles at hand
    Coords coords;                // relative to the thread's first element
    Residue residue;              // from there to the end of the problem
    int first, second;            // the thread's first element in the problem
    int first_term;               // among the batch's terms along the first dimension; one register, where a pointer makes the widest tile spill
    int tile_second;              // the tile's first element along the second dimension
    int batch;
    int second_left; // elements from there to the end of the problem
    int thread, threads;
    Operands e;
    SharedStorage& shared;

    CUTLASS_DEVICE ConsumerStoreCallbacks(RegFirst rs, RegFirst rb, SharedSecond ss, SharedSecond sb, RegSecond cs, RegSecond cb, Coords c, Residue r,
                                          int first_, int second_, int tile_second_, int batch_, int second_left_, int thread_, int threads_,
                                          Operands e_, SharedStorage& shared_)
        : r_scale(rs), r_bias(rb), s_scale(ss), s_bias(sb), c_scale(cs), c_bias(cb), coords(c), residue(r), first(first_), second(second_),
          first_term(batch_ * (SwapAB ? e_.col_terms_batch : e_.row_terms_batch) + first_), tile_second(tile_second_), batch(batch_),
          second_left(second_left_), thread(thread_), threads(threads_), e(e_), shared(shared_) {}

    CUTLASS_DEVICE void begin() {
      using namespace cute;
      // Ordinary loads below: they too must not pass the end of the preceding kernel.
      wait_for_preceding_kernel();

      const int2* second_terms = !e.row_terms ? nullptr : SwapAB ? row_terms_of(e, batch) : col_terms_of(e, batch);
      for (int i = thread; i < kSecond; i += threads) {
        const bool inside = i < second_left;
        const int64_t index = tile_second + i;
        if constexpr (kScaled) {
          if constexpr (SwapAB) {
            shared.scale[i] = inside ? load_a_scale(e, batch, index) : 0.0f;
          } else {
            shared.scale[i] = inside ? load_b_scale(e, batch, index) : 0.0f;
            shared.bias[i] = inside ? load_bias(e, batch, index) : 0.0f;
          }
        }
        if (second_terms) shared.terms[i] = inside ? second_terms[index] : make_int2(0, 0);
      }

      auto scale = filter_zeros(r_scale);
      auto bias = filter_zeros(r_bias);
      auto where = filter_zeros(coords, r_scale.stride());
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(scale); ++i) {
        const bool inside = get<0>(where(i)) < get<0>(residue);
        const int64_t index = first + int(get<0>(where(i)));
        if constexpr (kScaled) {
          if constexpr (SwapAB) {
            scale(i) = inside ? load_b_scale(e, batch, index) : 0.0f;
            bias(i) = inside ? load_bias(e, batch, index) : 0.0f;
          } else {
            scale(i) = inside ? load_a_scale(e, batch, index) : 0.0f;
          }
        }
      }
    }

    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }

    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      using namespace cute;
      if constexpr (kScaled) {
        if (epi_m == 0) { // the collective walks the subtiles of a column before it goes to the next
          copy_aligned(filter_zeros(s_scale(_, _, _, epi_m, epi_n)), filter_zeros(c_scale));
          if constexpr (!SwapAB) copy_aligned(filter_zeros(s_bias(_, _, _, epi_m, epi_n)), filter_zeros(c_bias));
        }
      }
    }

    template <typename ElementAccumulator, int FragmentSize>
    CUTLASS_DEVICE cutlass::Array<ElementOut, FragmentSize> visit(cutlass::Array<ElementAccumulator, FragmentSize> const& acc, int epi_v, int epi_m,
                                                                  int epi_n) {
      using namespace cute;
      auto where = coords(_, _, _, epi_m, epi_n);
      auto scale = r_scale(_, _, _, epi_m, epi_n);
      auto bias = r_bias(_, _, _, epi_m, epi_n);
      const int in_tile = second - tile_second;

      cutlass::Array<int32_t, FragmentSize> exact = acc;
      if (e.row_terms) { // read again for every fragment: kept in registers, they make the widest tile spill
        const int2* first_terms = SwapAB ? e.col_terms : e.row_terms;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < FragmentSize; ++i) {
          const int at = epi_v * FragmentSize + i;
          const int from_first = int(get<0>(where(at)));
          const int2 of_first = from_first < get<0>(residue) ? first_terms[first_term + from_first] : make_int2(0, 0);
          const int2 of_second = shared.terms[in_tile + int(get<1>(where(at)))];
          exact[i] = SwapAB ? subtract_zero_points(acc[i], of_second, of_first) : subtract_zero_points(acc[i], of_first, of_second);
        }
      }
      if constexpr (!kScaled) {
        return exact;
      } else {
        cutlass::Array<float, FragmentSize> result;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < FragmentSize; ++i) {
          const int at = epi_v * FragmentSize + i;
          result[i] =
              SwapAB ? scale_and_bias(exact[i], c_scale(at), scale(at), bias(at)) : scale_and_bias(exact[i], scale(at), c_scale(at), c_bias(at));
        }
        return cutlass::NumericArrayConverter<ElementOut, float, FragmentSize>{}(result);
      }
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    return make_callbacks<ReferenceSrc, Params const&>(args, *params_, int(cute::get<3>(args.tile_coord_mnkl)));
  }

protected:
  template <bool ReferenceSrc, class Operands, class... Args>
  CUTLASS_DEVICE auto make_callbacks(cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args, Operands e, int batch) {
    using namespace cute;
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    // A layout that is constant along the second dimension gives register tensors with one value a row of the tile.
    auto rows_only = make_tensor(make_gmem_ptr(static_cast<float const*>(nullptr)), make_layout(make_shape(M, N, L), make_stride(_1{}, _0{}, _0{})));
    auto partition = cutlass::epilogue::fusion::sm90_partition_for_epilogue<ReferenceSrc>(rows_only, args.tile_shape_mnk, args.tile_coord_mnkl,
                                                                                          args.epi_tile, args.tiled_copy, args.thread_idx);
    auto r_first = make_tensor_like<float>(partition);
    // And one that is constant along the first dimension: a row of the tile in shared memory.
    auto shared_row = [&](float* row) {
      auto tile = make_tensor(make_smem_ptr(row), make_shape(size<0>(CtaTile{}), size<1>(CtaTile{})), make_stride(_0{}, _1{}));
      return cutlass::epilogue::fusion::sm90_partition_for_epilogue<ReferenceSrc>(tile, args.epi_tile, args.tiled_copy, args.thread_idx);
    };
    auto s_scale = shared_row(storage_->scale);
    auto s_bias = shared_row(storage_->bias);
    auto c_second = make_tensor_like<float>(take<0, 3>(s_scale));
    const int tile_second = int(n) * kSecond;
    return ConsumerStoreCallbacks<Operands, decltype(r_first), decltype(s_scale), decltype(c_second), decltype(args.tCcD),
                                  decltype(args.residue_tCcD)>(
        r_first, r_first, s_scale, s_bias, c_second, c_second, args.tCcD, args.residue_tCcD, int(M) - int(get<0>(args.residue_tCcD)),
        int(N) - int(get<1>(args.residue_tCcD)), tile_second, batch, int(N) - tile_second, args.thread_idx, int(size(args.tiled_copy)), e, *storage_);
  }

private:
  Params const* params_ = nullptr;
  SharedStorage* storage_ = nullptr;
};

} // namespace scaled_mm
