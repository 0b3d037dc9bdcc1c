// Loads partial tiles in a CUTLASS main loop: only the rows that exist (partial_map.cuh).
#pragma once

#include "cutlass/arch/barrier.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "int8/c3x/partial_map.cuh"

namespace scaled_mm::c3x {

// Base: one of CUTLASS's TMA main loops. kOperand: which of the MMA's operands, 0 or 1.
template <class Base, int kOperand>
struct PartialTile {
  using Cluster = typename Base::DispatchPolicy::ClusterShape;
  static constexpr int kRows = cute::size<kOperand>(typename Base::TileShape{});
  static constexpr int kTileK = cute::size<2>(typename Base::TileShape{});
  static constexpr int kParts = cute::size<1 - kOperand>(Cluster{}); // blocks of the cluster that need the tile; each loads a part for all
  static constexpr int kPart = kRows / kParts;
  using Atom = cute::conditional_t<kOperand == 0, typename Base::SmemLayoutAtomA, typename Base::SmemLayoutAtomB>;
  static constexpr int kWidth = cute::size<1>(Atom{}); // bytes: the width of the swizzle, 128 where the tile's K is a multiple of it
  static_assert(kRows % kParts == 0 && kTileK % kWidth == 0 && cute::size<0>(Atom{}) == 8);
  using Stride = cute::conditional_t<kOperand == 0, typename Base::StrideA, typename Base::StrideB>;

  struct Params {
    PartialMap<kPart, kWidth> last;
    Pieces<kRows> tiles;
  };

  // data: [batch, rows, K].
  static Params params_of(const int8_t* data, int rows, int K, int batch, Stride stride) {
    return {PartialMap<kPart, kWidth>::encode(data, rows, K, batch, cute::get<0>(stride), cute::get<2>(stride)), Pieces<kRows>::of(rows)};
  }

  // A thread block's part of one tile.
  class Part {
  public:
    CUTLASS_DEVICE Part(Params const& params, int tile, int part, int batch)
        : map_(params.last), first_row_(tile * kRows + part * kPart), batch_(batch), rows_(params.last.parts.rows_of(tile * kParts + part)),
          missing_(kRows - params.tiles.rows_of(tile)), offset_(part * kPart * kWidth) {}

    CUTLASS_DEVICE bool is_whole() const { return rows_ == kPart; }

    // Loads a part that is not whole; nothing if it has no rows. to: the stage.
    template <bool kMulticast>
    CUTLASS_DEVICE void load(uint64_t* barrier, int8_t* to, int k_tile, uint16_t receivers) const {
      if (rows_ == 0) return;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kTileK; k += kWidth) {
        map_.template copy<kMulticast>(barrier, to + k * kRows + offset_, k_tile * kTileK + k, first_row_, batch_, receivers);
      }
    }

    // The barrier has been told to expect a whole tile: subtracts the rows that no thread block of the cluster loads.
    CUTLASS_DEVICE void expect_no_more(uint64_t* barrier) const {
      if (missing_ > 0) cutlass::arch::ClusterTransactionBarrier::complete_transaction(barrier, cute::block_rank_in_cluster(), missing_ * kTileK);
    }

  private:
    PartialMap<kPart, kWidth> const& map_;
    int first_row_, batch_, rows_, missing_, offset_;
  };
};

} // namespace scaled_mm::c3x
