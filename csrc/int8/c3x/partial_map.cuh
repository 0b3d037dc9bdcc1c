// A tensor map whose copy loads the last rows of an operand, as many as there are.
//
// TMA fills rows past the end of a tensor with zeros at about 12 bytes a clock, but loads at 64: one row of a tile of 256 took 1.7 times as
// long as 256 (docs/decisions/0021). The thread block that loads the operand's last rows therefore has a map for just these. The other rows of
// the tile keep what was in shared memory; they belong to elements of out that are not stored.
#pragma once

#include <cuda.h>

#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/cuda_host_adapter.hpp"

namespace scaled_mm::c3x {

// How many rows of a tile or a part of one exist. left: rows from its first to the operand's end, may be negative.
CUTLASS_HOST_DEVICE int existing_rows(int left, int whole) { return left < 0 ? 0 : left < whole ? left : whole; }

// kPart: rows that a thread block loads of a whole tile. kWidth: bytes of K that a copy loads: the width of the swizzle.
template <int kPart, int kWidth>
struct PartialMap {
  static_assert(kPart % 8 == 0 && kPart <= 256, "a part starts where the swizzle does, and a copy is no higher");
  static_assert(kWidth == 128 || kWidth == 64 || kWidth == 32, "a swizzle of TMA");
  static constexpr CUtensorMapSwizzle kSwizzle = kWidth == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                                 : kWidth == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                                : CU_TENSOR_MAP_SWIZZLE_32B;

  cute::TmaDescriptor map; // encoded only if it is needed
  int rows;                // of the operand

  // Whether the operand ends within a part.
  CUTLASS_HOST_DEVICE bool is_needed() const { return rows % kPart != 0; }

  // data: [batch, rows, K], K contiguous; strides in bytes. The map stays zero if the driver refuses it (tensor_map.cuh looks).
  static PartialMap encode(const void* data, int rows, int K, int batch, int64_t row_stride, int64_t batch_stride) {
    PartialMap partial{{}, rows};
    if (!partial.is_needed()) return partial;
    const cuuint64_t shape[] = {cuuint64_t(K), cuuint64_t(rows), cuuint64_t(batch)};
    const cuuint64_t strides[] = {cuuint64_t(row_stride), cuuint64_t(batch_stride)};
    const cuuint32_t box[] = {kWidth, cuuint32_t(rows % kPart), 1}, every[] = {1, 1, 1};
    const CUresult result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &partial.map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), shape, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) partial.map = {};
    return partial;
  }

  CUTLASS_HOST_DEVICE const cute::TmaDescriptor* get_tma_descriptor() const { return &map; }

  // Copies the operand's last rows % kPart rows, kWidth bytes each. to: where the part starts. receivers: the thread blocks of the cluster
  // that get them, 0 for this one alone.
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

} // namespace scaled_mm::c3x
