// A tile whose weights are rounded to 16 bits, by wgmma: the sums of all blocks stay in the accumulators of the tensor cores. While these multiply a
// pair of blocks, the next pair is decoded.
#pragma once

#include <utility>

#include "gguf/rounded.cuh"
#include "gguf/wgmma_shape.cuh"

namespace scaled_mm::gguf {

// Adds `left` steps of a tile, at least one, to a warp's sums, which are then multiplied by the inverse powers of their rows. The last step has
// `pairs` pairs of blocks, the others all. keeps(): true if the caller releases the last two stages. ending(): called while the last pair is being
// multiplied.
template <class F, class T, class S, class Keeps, class Ending>
__device__ __forceinline__ void multiply_rounded(typename S::Storage& s, int left, int pairs, Stages<S::kStages>& tiles,
                                                 Stages<S::kValueStages>& values, float (&sums)[S::kTokens / 8][4], Keeps&& keeps, Ending&& ending) {
  constexpr int kTokens = S::kTokens, kPairs = kTileBlocks / 2;
  const int group = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  RoundedPair<F, T> next;
  Fragments fragments[2][2]; // of a pair that is multiplied, and of the one after it
  uint32_t powers = 0;
  const uint8_t* band = nullptr;

  const auto open = [&] { // the next tile of the weight
    wait(s.tiles_full[tiles.stage], tiles.phase);
    const uint8_t* const tile = s.tiles[tiles.stage][group];
    band = tile + warp * F::kBandBytes;
    powers = next.as_pair(*reinterpret_cast<const uint32_t*>(tile + F::kBandsBytes + warp * F::kBandPowers + lane / 4 * 4));
  };
  const auto close = [&] {
    release_stage(s.tiles_empty[tiles.stage], lane, S::kArrivals);
    tiles.advance();
  };
  const auto load = [&](int pair) { next.load(band, pair, lane); };
  const auto decode = [&](int pair) {
    Fragments(&of)[2] = fragments[pair % 2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      of[b] = next.fragments(b, powers);
#pragma unroll
      for (int i = 0; i < 8; ++i) cute::warpgroup_fence_operand(of[b].a[i / 4][i % 4]);
    }
  };
  float* const flat = &sums[0][0];
  const auto fence = [&] {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) cute::warpgroup_fence_operand(flat[i]);
  };

  // Whether a step's stages of activations are consecutive, and then how far a pair's is from values.stage.
  constexpr bool kTogether = S::kValueStages % kPairs == 0;
  const auto stage_of = [&](int pair) { return values.stage + (kTogether ? pair : 0); };
  const auto advance = [&](int pair) { // after a pair
    if (!kTogether) values.advance();
    if (kTogether && pair + 1 == kPairs && (values.stage += kPairs) == S::kValueStages) values.stage = 0, values.phase ^= 1;
  };

  const uint64_t first = descriptor_of(s.values[0][0]);
  int done = -1; // the stage of activations of the pair before
  const auto release = [&](int stage) { release_stage(s.values_empty[stage], lane, S::template kValueArrivals<Factors::kRounded>); };
  const auto multiply_pair = [&](int pair, bool releases) { // releases: the pair before
    const int stage = stage_of(pair);
    wait(s.values_full[stage], values.phase);
    const uint64_t x = descriptor_of(first, uint32_t(stage) * sizeof(s.values[0]));
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      multiply<T>(flat, fragments[pair % 2][i / 2].a[i % 2], x + 2 * i, true, std::make_index_sequence<kTokens / 2>{});
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>(); // the pair before is done: its fragments and its activations are free
    if ((pair > 0 || done >= 0) && releases) release(kTogether && pair > 0 ? stage - 1 : done);
    done = stage;
  };

  open();
  load(0);
  decode(0);
  fence();
  for (; left > 1; --left) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (pair + 1 < kPairs) load(pair + 1);
      multiply_pair(pair, true);
      if (pair + 1 == kPairs) {
        close();
        open();
        load(0);
      }
      decode((pair + 1) % kPairs);
      advance(pair);
    }
  }
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) { // the last step
    if (pair == 0 || pair < pairs) {
      const bool more = pair + 1 < kPairs;
      if (more) load(pair + 1);
      multiply_pair(pair, pair + 1 < kPairs || !keeps());
      if (more) decode(pair + 1);
    } else {
      wait(s.values_full[stage_of(pair)], values.phase);
      if (pair + 2 < kPairs || !keeps()) release(stage_of(pair));
    }
    advance(pair);
  }
  close();
  ending();
  cute::warpgroup_wait<0>();
  fence();
  if (!keeps() || pairs + 1 < kPairs) release(done); // of 1 or 2 pairs the last one is not in the last two stages
  const float2 scale = next.inverse_powers(powers);
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) flat[i] *= i % 4 / 2 ? scale.y : scale.x;
}

} // namespace scaled_mm::gguf
