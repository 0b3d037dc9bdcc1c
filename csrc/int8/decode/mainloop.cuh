// Loading a tile's operands and multiplying them: the producer's and the consumers' side of the pipeline.
#pragma once

#include "int8/decode/storage.cuh"

namespace scaled_mm::decode {

using namespace cute;

// Loads tiles of weights and activations, one thread for a block. It issues the steps one after the other, so nothing is computed here
// that could be computed once a tile.
template <int kColumns, int kRows, int kSplit, int kShare, class S>
class Loader {
public:
  __device__ Loader(const Params<kColumns, kRows, kShare>& p, S& shared, int part, int share) : p_(p), shared_(shared), part_(part), share_(share) {}

  // The stage's barrier expects the bytes of both operands: the rows that exist.
  __device__ void weights(const Place& place, int step, int stage) {
    const int tile = place.group * kShare + share_;
    const int columns = p_.last_weights.parts.rows_of(tile);
    shared_.full[stage].arrive_and_expect_tx((columns + p_.row_tiles.rows_of(place.row_tile)) * kStepK);
    load<kColumns>(p_.weights.with(barrier(stage)), p_.weights, p_.last_weights, p_.N, tile, columns, place.batch, step, stage,
                   &shared_.weights[stage][0]);
  }

  // Asks L2 for them.
  __device__ void prefetch_weights(const Place& place, int step) {
    cute::prefetch(p_.weights, source<kColumns>(p_.weights, p_.N, place.group * kShare + share_, place.batch, step));
  }

  // This block's part of the rows, for all blocks that need them.
  __device__ void activations(const Place& place, int step, int stage) {
    constexpr int kPart = kRows / kShare;
    const int tile = place.row_tile * kShare + share_;
    const int rows = p_.last_activations.parts.rows_of(tile);
    int8_t* const to = &shared_.activations[stage][share_ * kPart * kStepK];
    const auto start = [&](auto... receivers) {
      load<kPart>(p_.activations.with(barrier(stage), receivers...), p_.activations, p_.last_activations, p_.M, tile, rows, place.batch, step, stage,
                  to, receivers...);
    };
    if constexpr (kShare > 1) {
      uint16_t blocks = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kShare; ++i) blocks |= uint16_t(1u << (part_ + i * kSplit));
      start(blocks);
    } else {
      start();
    }
  }

private:
  __device__ uint64_t& barrier(int stage) { return reinterpret_cast<uint64_t&>(shared_.full[stage]); }

  // receivers: the blocks that get a part of the activations, none for weights.
  template <int kTile, class Whole, class WholeMap, class LastMap, class... Receivers>
  __device__ void load(Whole whole, const WholeMap& map, const LastMap& last, int rows, int tile, int count, int batch, int step, int stage,
                       int8_t* to, Receivers... receivers) {
    if (count == kTile) {
      copy(whole, source<kTile>(map, rows, tile, batch, step), target<kTile>(map, to));
    } else if (count > 0) {
      constexpr bool kMulticast = sizeof...(receivers) > 0;
      last.template copy<kMulticast>(&barrier(stage), to, step * kStepK, tile * kTile, batch, (uint16_t(0) | ... | receivers));
    }
  }
  template <int kTile, class M>
  __device__ auto source(const M& map, int rows, int tile, int batch, int step) {
    const auto all = map.get_tma_tensor(make_shape(rows, p_.K, p_.batch));
    return map.get_slice(Int<0>{}).partition_S(local_tile(all(_, _, batch), Shape<Int<kTile>, Int<kStepK>>{}, make_coord(tile, step)));
  }
  template <int kTile, class M>
  __device__ auto target(const M& map, int8_t* to) {
    return map.get_slice(Int<0>{}).partition_D(make_tensor(make_smem_ptr(to), Step<kTile>{}));
  }

  const Params<kColumns, kRows, kShare>& p_;
  S& shared_;
  const int part_, share_;
};

// Tells the loaders of all blocks that load for this one that a stage is free. Only where it will be filled again: nothing arrives at a
// block that has ended.
template <int kSplit, int kShare, class S>
class Releases {
public:
  __device__ Releases(S& shared, int64_t count, int part) : shared_(shared), left_(count), part_(part) {}

  __device__ void release(int stage) {
    if (left_ <= 0) return;
    --left_;
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (kShare > 1) {
      shared_.empty[stage].arrive(part_ + lane * kSplit, lane < kShare);
    } else {
      if (lane == 0) shared_.empty[stage].arrive();
    }
  }

private:
  S& shared_;
  int64_t left_;
  const int part_;
};

// The block's part of a tile's sums.
template <int kColumns, int kRows, int kStages, class Mma, class S, class R, class Accumulators>
__device__ void multiply(const Mma& mma, S& shared, int steps, Ring<kStages>& ring, R& releases, Accumulators& sums) {
  Mma tiled = mma;
  const auto thread = tiled.get_thread_slice(int(threadIdx.x));
  const auto weights = thread.make_fragment_A(thread.partition_A(make_tensor(make_smem_ptr(&shared.weights[0][0]), Steps<kColumns, kStages>{})));
  const auto activations = thread.make_fragment_B(thread.partition_B(make_tensor(make_smem_ptr(&shared.activations[0][0]), Steps<kRows, kStages>{})));
  tiled.accumulate_ = GMMA::ScaleOut::Zero;
  int done = ring.stage;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    shared.full[ring.stage].wait(ring.phase);
    warpgroup_fence_operand(sums);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < size<2>(weights); ++k) {
      cute::gemm(tiled, weights(_, _, k, ring.stage), activations(_, _, k, ring.stage), sums);
      tiled.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    warpgroup_wait<1>(); // this step is in flight; the one before it has ended, and its stage is free
    if (step > 0) releases.release(done);
    done = ring.stage;
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(sums);
  if (steps > 0) {
    releases.release(done);
  } else {
    clear(sums);
  }
}

} // namespace scaled_mm::decode
