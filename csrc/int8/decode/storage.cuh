// What a decode kernel is given and what a block keeps: the steps of K in shared memory, their tensor maps, its parameters, its shared memory.
#pragma once

#include <type_traits>

#include "cute/tensor.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/copy_traits_sm90_tma.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"

#include "int8/c3x/partial_map.cuh"
#include "int8/decode/pipeline.cuh"
#include "int8/epilogue/formula.cuh"

namespace scaled_mm::decode {

using namespace cute;

constexpr int kStepK = 128;                                  // of a stage: the width of the swizzle
constexpr int consumers(int columns) { return columns * 2; } // threads: a warpgroup for 64 columns

using SwizzledRows = GMMA::Layout_K_SW128_Atom<int8_t>;
template <int kRows>
using Step = decltype(tile_to_shape(SwizzledRows{}, Shape<Int<kRows>, Int<kStepK>>{}));
template <int kRows, int kStages>
using Steps = decltype(tile_to_shape(SwizzledRows{}, Shape<Int<kRows>, Int<kStepK>, Int<kStages>>{}));

// [rows, K, batch] in device memory, K contiguous.
inline auto operand(const void* data, int64_t rows, int64_t K, int64_t batch, int64_t row_stride, int64_t batch_stride) {
  return make_tensor(make_gmem_ptr(static_cast<const int8_t*>(data)), make_shape(int(rows), int(K), int(batch)),
                     make_stride(row_stride, Int<1>{}, batch_stride));
}
template <int kRows, class Load>
auto map_of(decltype(operand(nullptr, 0, 0, 0, 0, 0)) const& tensor) {
  return make_tma_copy(Load{}, tensor, Step<kRows>{}, Shape<Int<kRows>, Int<kStepK>>{}, Int<1>{});
}
template <int kRows, class Load>
using Map = decltype(map_of<kRows, Load>(operand(nullptr, 0, 0, 0, 0, 0)));
template <int kShare>
using ActivationLoad = std::conditional_t<(kShare > 1), SM90_TMA_LOAD_MULTICAST, SM90_TMA_LOAD>;

template <int kColumns, int kRows, int kShare>
struct Params {
  Map<kColumns, SM90_TMA_LOAD> weights;
  Map<kRows / kShare, ActivationLoad<kShare>> activations;
  c3x::PartialMap<kColumns, kStepK> last_weights; // of a tile that reaches past the operand's end
  c3x::PartialMap<kRows / kShare, kStepK> last_activations;
  c3x::Pieces<kRows> row_tiles;
  int M, N, K, batch;
  int tiles_m, groups_n, clusters;   // tiles along M, groups of kShare tiles along N; clusters in the grid
  bool early_weights, whole_vectors; // whole_vectors: out takes stores of 16 bytes
  void* out;
  int64_t out_stride_m, out_stride_n, out_batch;
  EpilogueOperands epilogue;
};

// Blocks of a cluster that own rows: as many as divide the tile into whole fragments of 8 rows.
constexpr int owners(int rows, int split) { return split > 1 && rows / 8 % split != 0 ? owners(rows, split / 2) : split; }

// The sums of the cluster's other blocks, in the order of the threads' accumulators by fours: two tiles' where a block computes several.
template <int kSums, int kOthers, int kBuffers>
struct Exchange {
  int4 sums[kBuffers][kOthers][kSums / 4];
  FullBarrier summed[kBuffers];   // all others' are there
  EmptyBarrier drained[kBuffers]; // all owners have taken theirs
};
struct NoExchange {};

template <int kColumns, int kRows, int kSplit, int kStages, bool kPersistent, class Out>
struct alignas(1024) Shared {
  static constexpr int kOwners = owners(kRows, kSplit), kSlice = kRows / kOwners; // rows that a block owns
  static constexpr int kBuffers = kPersistent ? 2 : 1;
  static constexpr int kPitch = kColumns + 16 / int(sizeof(Out)); // four rows of a fragment fall into different banks
  int8_t weights[kStages][kColumns * kStepK];
  int8_t activations[kStages][kRows * kStepK];
  Out out[kSlice][kPitch];
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
  std::conditional_t<(kSplit > 1), Exchange<kColumns * kSlice, kSplit - 1, kBuffers>, NoExchange> exchange;
  float b_scale[kColumns], bias[kColumns], a_scale[kSlice];
  int2 col_terms[kColumns], row_terms[kSlice];
};

} // namespace scaled_mm::decode
