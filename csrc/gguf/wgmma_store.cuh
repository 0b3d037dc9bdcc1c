// Stores a tile of outputs by bulk copies, which run while the next tile is multiplied. The 16-bit outputs of a warpgroup, 64 rows of the weight by
// kTokens tokens, have the size of a stage of activations: each warpgroup puts them into one of the tile's last two stages. A warp beside the
// producer, one for each warpgroup, starts the copies and gives the stage back to the producer when they have read it. Outputs of 32 bits take
// two turns.
#pragma once

#include "gguf/wgmma_shape.cuh"

namespace scaled_mm::gguf {

template <class S>
struct BoxStore {
  static constexpr int kTokens = S::kTokens, kStages = S::kValueStages;
  // The producer's warpgroup has warps to spare (S::kReconfigure). Smaller tiles do not become faster. In clusters each thread
  // block stores its own tokens.
  static constexpr bool kPossible = !S::kClusters && S::kGroups == 2 && kTokens > 64 && kTokens % 16 == 0;

  static_assert(!kPossible || S::template kValueArrivals<Factors::kRounded> == 1, "one arrival of a warp gives its stage back");

  const WgmmaParams& p;
  typename S::Storage& s;
  int group, lane;

  // What a warp of a multiplying warpgroup does at the end of a tile, whose last two stages have not been released. next: the stage after them.
  // bias: of the thread's two rows, -0 if there is none.
  __device__ void write(int next, int warp, OutputTiles::Place at, const float (&bias)[2], const float (&sums)[kTokens / 8][4]) const {
    sync_threads(kEveryone, S::kConsumers); // both warpgroups have read both stages
    const int own = before(next, 2 - group);
    if (lane == 0) arrive(s.values_empty[before(next, 1 + group)]);
    __syncwarp();
    const int token = at.token_tile * kTokens + 2 * (lane % 4);
    const uint32_t to = cute::cast_smem_ptr_to_uint(s.values[own][0]);
    if (p.output.dtype == SCALED_MM_DTYPE_FLOAT32) {
      if (warp < 2) write_as<float>(to, warp, token, bias, sums);
      hand_over();
      meet(); // the first turn has been read
      if (warp >= 2) write_as<float>(to, warp, token, bias, sums);
    } else if (p.output.dtype == SCALED_MM_DTYPE_FLOAT16) {
      write_as<__half>(to, warp, token, bias, sums);
    } else {
      write_as<__nv_bfloat16>(to, warp, token, bias, sums);
    }
    hand_over();
  }

  // What the copying warp does: all whole tiles of the thread block.
  __device__ void copy(int tiles_k) const {
    const int turns = p.output.dtype == SCALED_MM_DTYPE_FLOAT32 ? 2 : 1;
    unsigned next = 0; // stages that were loaded for this tile and those before it
    for (Work work = Work::begin(p.shares, int(blockIdx.x)); work.whole(); work.advance(p.shares, int(blockIdx.x), int(gridDim.x))) {
      next += unsigned(tiles_k * S::kPerTile);
      const int own = int((next - unsigned(2 - group)) % kStages);
      const OutputTiles::Place at = p.output_tiles.place_of(work.at);
      const int first_token = at.token_tile * kTokens;
      for (int turn = 0; turn < turns; ++turn) {
        if (turn > 0) meet();
        meet();
        const int column = at.row_tile * S::kRows + group * kTileRows + turn * (kTileRows / 2);
        if (lane == 0) {
          for (int token = 0; column < p.output.N && token < kTokens && first_token + token < p.output.M; token += S::kBoxTokens) {
            store_box(&p.outputs, s.values[own][0] + token * 128, column, first_token + token);
          }
          commit_stores();
          wait_until_stores_have_read();
        }
        __syncwarp();
      }
      if (lane < 4) arrive(s.values_empty[own]); // for the four warps of the warpgroup
    }
  }

private:
  static constexpr int kEveryone = 1; // the named barrier of both multiplying warpgroups
  static constexpr int kOneGroup = 2; // kOneGroup + group: of one of them and its copying warp

  __device__ static int before(int next, int by) { return next >= by ? next - by : next - by + kStages; }
  __device__ void meet() const { sync_threads(kOneGroup + group, 128 + 32); } // a warpgroup and its copying warp
  __device__ void hand_over() const {
    show_to_bulk_copies();
    meet();
  }

  template <class Out>
  __device__ void write_as(uint32_t to, int warp, int token, const float (&bias)[2], const float (&sums)[kTokens / 8][4]) const {
    p.output.token_scales ? write_rows<Out, true>(to, warp, token, bias, sums) : write_rows<Out, false>(to, warp, token, bias, sums);
  }

  // Rows of 128 bytes, one a token, in the 128-byte swizzle.
  template <class Out, bool kScales>
  __device__ void write_rows(uint32_t to, int warp, int token, const float (&bias)[2], const float (&sums)[kTokens / 8][4]) const {
    const auto scales_of = [&](int fragment) { return kScales ? p.output.scales_of(token + 8 * fragment) : float2{1.0f, 1.0f}; };
    // As Output::value_of: adding -0 changes nothing.
    const auto value = [&](int fragment, int i, float2 scales) { return sums[fragment][i] * (i % 2 ? scales.y : scales.x) + bias[i / 2]; };
    if constexpr (sizeof(Out) == 2) {
      const int eight = lane % 8;
      to += (lane / 16 * 8 + eight) * 128 + (((warp * 2 + lane / 8 % 2) ^ eight) * 16);
#pragma unroll
      for (int i = 0; i < kTokens / 8; i += 2) {
        uint32_t words[4];
#pragma unroll
        for (int of = 0; of < 2; ++of) {
          const float2 scales = scales_of(i + of);
          words[2 * of] = pair_of<Out>(value(i + of, 0, scales), value(i + of, 1, scales));
          words[2 * of + 1] = pair_of<Out>(value(i + of, 2, scales), value(i + of, 3, scales));
        }
        store_transposed(to + i * (8 * 128), words);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
        const float2 scales = scales_of(i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int in_eight = 2 * (lane % 4) + j % 2, row = warp % 2 * 16 + lane / 4 + j / 2 * 8;
          store_shared(to + (i * 8 + in_eight) * 128 + (((row / 4) ^ in_eight) * 16) + row % 4 * 4, value(i, j, scales));
        }
      }
    }
  }
};

} // namespace scaled_mm::gguf
