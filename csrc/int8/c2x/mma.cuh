// The instructions under CUTLASS's warp-level MMA. CUTLASS has INT8 only with saturation (OpMultiplyAddSaturate), which
// changes sums that pass 2^31 on their way; these are the specialisations for OpMultiplyAdd.
#pragma once

#include "cutlass/arch/mma.h"
#include "cutlass/array.h"
#include "cutlass/layout/matrix.h"

#include "int8/mma.cuh"

namespace scaled_mm::c2x {

template <class Shape_, class Arch, int kWordsA, int kWordsB, int kSums>
struct MmaS8 {
  using Shape = Shape_;
  using ElementA = int8_t;
  using LayoutA = cutlass::layout::RowMajor;
  using FragmentA = cutlass::Array<int8_t, 4 * kWordsA>;
  using ElementB = int8_t;
  using LayoutB = cutlass::layout::ColumnMajor;
  using FragmentB = cutlass::Array<int8_t, 4 * kWordsB>;
  using ElementC = int;
  using LayoutC = cutlass::layout::RowMajor;
  using FragmentC = cutlass::Array<int, kSums>;
  using Operator = cutlass::arch::OpMultiplyAdd;
  using ArchTag = Arch;

  CUTLASS_DEVICE void operator()(FragmentC& d, FragmentA const& a, FragmentB const& b, FragmentC const& c) const {
    const auto* words_a = reinterpret_cast<const uint32_t*>(&a);
    const auto* words_b = reinterpret_cast<const uint32_t*>(&b);
    if constexpr (kSums == 2) {
      int sums[2] = {c[0], c[1]};
      mma_m8n8k16(sums[0], sums[1], words_a[0], words_b[0]);
      d[0] = sums[0];
      d[1] = sums[1];
    } else {
      int sums[4] = {c[0], c[1], c[2], c[3]};
      mma_m16n8k32(sums, {words_a[0], words_a[1], words_a[2], words_a[3]}, {words_b[0], words_b[1]});
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) d[i] = sums[i];
    }
  }
};

} // namespace scaled_mm::c2x

namespace cutlass::arch {

template <>
struct Mma<gemm::GemmShape<8, 8, 16>, 32, int8_t, layout::RowMajor, int8_t, layout::ColumnMajor, int, layout::RowMajor, OpMultiplyAdd>
    : scaled_mm::c2x::MmaS8<gemm::GemmShape<8, 8, 16>, Sm75, 1, 1, 2> {};

template <>
struct Mma<gemm::GemmShape<16, 8, 32>, 32, int8_t, layout::RowMajor, int8_t, layout::ColumnMajor, int, layout::RowMajor, OpMultiplyAdd>
    : scaled_mm::c2x::MmaS8<gemm::GemmShape<16, 8, 32>, Sm80, 4, 2, 4> {};

} // namespace cutlass::arch
