// A tensor map whose copy loads the last rows of an operand, as many as there are.
//
// TMA fills rows past the end of a tensor with zeros at about 12 bytes a cycle, but loads 64: a tile of 256 rows of which one exists took 1.7 times
// as long as a full one (docs/decisions/0021). The thread block that loads the operand's last rows therefore has a map for just these. The other
// rows of the tile keep what was in shared memory; they belong to elements of out that are not stored.
#pragma once

#include <cuda.h>

#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/cuda_host_adapter.hpp"

namespace scaled_mm::c3x {

// An operand's rows, cut into pieces of kSize: tiles, or the parts of tiles that thread blocks load.
//
// Not clamp(rows - piece * kSize, 0, kSize): ptxas 13.0 evaluates `clamp(x, 0, c) == c` as true for every x >= 0 (VIMNMX.RELU with a predicate).
template <int kSize>
struct Pieces {
  int whole; // pieces with kSize rows
  int last;  // rows of the piece after them

  static Pieces of(int rows) { return {rows / kSize, rows % kSize}; }
  CUTLASS_HOST_DEVICE bool is_whole(int piece) const { return piece < whole; }
  // 0 past the end.
  CUTLASS_HOST_DEVICE int rows_of(int piece) const { return is_whole(piece) ? kSize : piece == whole ? last : 0; }
};

// A tensor map of an operand [batch, rows, K], K contiguous, whose copy loads some rows of a tile, kWidth bytes each: the width of the swizzle.
template <int kWidth>
struct RowsMap {
  static_assert(kWidth == 128 || kWidth == 64 || kWidth == 32, "a swizzle of TMA");
  static constexpr CUtensorMapSwizzle kSwizzle = kWidth == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                                 : kWidth == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                                : CU_TENSOR_MAP_SWIZZLE_32B;
  cute::TmaDescriptor map;

  // Strides in bytes. The map stays zero if the driver refuses it (tensor_map.cuh looks).
  static RowsMap encode(const void* data, int rows, int K, int batch, int64_t row_stride, int64_t batch_stride, int rows_of_copy) {
    RowsMap made{};
    const cuuint64_t shape[] = {cuuint64_t(K), cuuint64_t(rows), cuuint64_t(batch)};
    const cuuint64_t strides[] = {cuuint64_t(row_stride), cuuint64_t(batch_stride)};
    const cuuint32_t box[] = {kWidth, cuuint32_t(rows_of_copy), 1}, every[] = {1, 1, 1};
    const CUresult result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &made.map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), shape, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) made.map = {};
    return made;
  }

  CUTLASS_HOST_DEVICE const cute::TmaDescriptor* get_tma_descriptor() const { return &map; }

  // to: where the rows go, on a multiple of 8 rows of the tile. receivers: the thread blocks of the cluster that get them, where kMulticast.
  template <bool kMulticast>
  CUTLASS_DEVICE void copy(uint64_t* barrier, int8_t* to, int k, int first_row, int batch, uint16_t receivers) const {
    constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    if constexpr (kMulticast) {
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, barrier, receivers, kHint, to, k, first_row, batch);
    } else {
      cute::SM90_TMA_LOAD_3D::copy(&map, barrier, kHint, to, k, first_row, batch);
    }
  }
};

// The map of an operand's last rows, where it ends within a part of a tile. kPart: rows that a thread block loads of a whole tile.
template <int kPart, int kWidth>
struct PartialMap : RowsMap<kWidth> {
  static_assert(kPart % 8 == 0 && kPart <= 256, "a part starts where the swizzle does, and a copy is no higher");
  Pieces<kPart> parts;

  // Whether the operand ends within a part. The map is encoded only then.
  CUTLASS_HOST_DEVICE bool is_needed() const { return parts.last > 0; }

  static PartialMap encode(const void* data, int rows, int K, int batch, int64_t row_stride, int64_t batch_stride) {
    PartialMap partial{{}, Pieces<kPart>::of(rows)};
    if (partial.is_needed()) {
      static_cast<RowsMap<kWidth>&>(partial) = RowsMap<kWidth>::encode(data, rows, K, batch, row_stride, batch_stride, partial.parts.last);
    }
    return partial;
  }
};

} // namespace scaled_mm::c3x
