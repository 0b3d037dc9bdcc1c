// Loads only the rows of a tile that exist.
//
// TMA fills rows past the end of a tensor with zeros at about 12 bytes a clock, but loads at 64: one row of a tile of 256 took 1.7 times as
// long as 256 (docs/decisions/0021). The last tile is therefore loaded in boxes of 8 to 32 rows, as many as its rows need. The other rows
// keep what was in shared memory; they belong to elements of out that are not stored.
#pragma once

#include "cutlass/arch/barrier.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace scaled_mm::c3x {

// Base: one of CUTLASS's TMA main loops. kOperand: which of the MMA's operands, 0 or 1.
template <class Base, int kOperand>
struct PartialTile {
  using Cluster = typename Base::DispatchPolicy::ClusterShape;
  static constexpr int kRows = cute::size<kOperand>(typename Base::TileShape{});
  static constexpr int kTileK = cute::size<2>(typename Base::TileShape{});
  static constexpr int kParts = cute::size<1 - kOperand>(Cluster{}); // blocks of the cluster that need the tile; each loads a part for all
  static constexpr int kPart = kRows / kParts;
  static constexpr int kBox = kPart % 32 == 0 && kPart > 64 ? 32 : kPart % 16 == 0 && kPart > 32 ? 16 : 8; // rows
  using Atom = cute::conditional_t<kOperand == 0, typename Base::SmemLayoutAtomA, typename Base::SmemLayoutAtomB>;
  static constexpr int kBoxK = cute::size<1>(Atom{}); // bytes: the width of the swizzle, 128 where the tile's K is a multiple of it
  static_assert(kPart % kBox == 0 && kTileK % kBoxK == 0, "whole boxes fill a tile");

  using Stride = cute::conditional_t<kOperand == 0, typename Base::StrideA, typename Base::StrideB>;
  using Box = decltype(cute::tile_to_shape(Atom{}, cute::Shape<cute::Int<kBox>, cute::Int<kBoxK>>{}));
  static_assert(cute::cosize_v<Box> == kBox * kBoxK, "rows one after the other");

  // data: [rows, K, batch].
  static auto map_of(const int8_t* data, int rows, int K, int batch, Stride stride) {
    using namespace cute;
    const auto tensor = make_tensor(reinterpret_cast<const uint8_t*>(data), make_layout(make_shape(rows, K, batch), stride));
    return make_tma_copy(SM90_TMA_LOAD{}, tensor, Box{}, Shape<Int<kBox>, Int<kBoxK>>{}, Int<1>{});
  }
  using Map = decltype(map_of(nullptr, 0, 0, 0, Stride{}));

  struct Params {
    Map map; // encoded only if it is needed
    int rows;

    // Whether the operand ends within a tile.
    CUTLASS_HOST_DEVICE bool is_needed() const { return rows % kRows != 0; }
  };
  static Params params_of(const int8_t* data, int rows, int K, int batch, Stride stride) {
    Params params{{}, rows};
    if (params.is_needed()) params.map = map_of(data, rows, K, batch, stride);
    return params;
  }

  // Rows from the beginning of a tile to the operand's end.
  CUTLASS_DEVICE static int rows_left(Params const& params, int tile) { return params.rows - tile * kRows; }

  // Loads this block's part of a partial tile; nothing if no rows are left. to: the stage. receivers: the blocks that need the tile. The
  // barrier has been told to expect a whole tile.
  CUTLASS_DEVICE static void load(Params const& params, uint64_t* barrier, int8_t* to, int tile, int k_tile, int batch, int part,
                                  uint16_t receivers) {
    using namespace cute;
    const int left = rows_left(params, tile);
    const int own_end = cute::min(left, (part + 1) * kPart);
    const void* const map = params.map.get_tma_descriptor();
    constexpr auto kHint = uint64_t(TMA::CacheHintSm90::EVICT_NORMAL);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int row = part * kPart; row < own_end; row += kBox) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kTileK; k += kBoxK) {
        int8_t* const box = to + k * kRows + row * kBoxK;
        if constexpr (kParts > 1) {
          SM90_TMA_LOAD_MULTICAST_3D::copy(map, barrier, receivers, kHint, box, k_tile * kTileK + k, tile * kRows + row, batch);
        } else {
          SM90_TMA_LOAD_3D::copy(map, barrier, kHint, box, k_tile * kTileK + k, tile * kRows + row, batch);
        }
      }
    }
    const int loaded = (cute::max(left, 0) + kBox - 1) / kBox * kBox; // by all blocks
    cutlass::arch::ClusterTransactionBarrier::complete_transaction(barrier, cute::block_rank_in_cluster(), (kRows - loaded) * kTileK);
  }
};

} // namespace scaled_mm::c3x
