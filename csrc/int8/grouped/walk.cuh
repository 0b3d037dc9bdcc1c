// Which rows belong to which expert, found out on the device from expert_offsets; what is there is not trusted.
//
//   end[e] = max(end[e-1], min(offsets[e], tokens)), begin[e] = end[e-1], end[-1] = 0
//
// A persistent block asks for tiles in growing order. Each of its warps looks at a window of experts, some to a lane, and knows how
// many tiles came before: a window costs one load of its offsets and two scans over the warp, so thousands of experts cost a
// block a few microseconds in all, and nobody writes a list of tiles to memory first.
#pragma once

#include <cstdint>

namespace scaled_mm::grouped {

struct Experts {
  const int32_t* offsets;
  int count;
  int tokens;
  int zeroed; // rows below this one become zero if they belong to no expert: all, or none
};

constexpr unsigned kWholeWarp = 0xffffffffu;

__device__ inline int inclusive_sum(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kWholeWarp, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

__device__ inline int inclusive_max(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kWholeWarp, value, step);
    if (lane >= step) value = max(value, other);
  }
  return value;
}

// A window of consecutive experts, kPerLane of them to a lane: their rows, clamped.
template <int kPerLane>
struct ExpertWindow {
  static constexpr int kSize = 32 * kPerLane;
  int before;        // row where the lane's first expert begins
  int end[kPerLane]; // row past each one's last

  // rows_before: where the window begins. All lanes of a warp take part.
  __device__ void load(const Experts& experts, int first, int rows_before, int lane) {
    int highest = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = first + lane * kPerLane + i;
      end[i] = expert < experts.count ? experts.offsets[expert] : 0;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      highest = max(highest, min(end[i], experts.tokens));
      end[i] = highest;
    }
    const int up_to_here = inclusive_max(highest, lane);
    before = __shfl_up_sync(kWholeWarp, up_to_here, 1);
    before = max(rows_before, lane == 0 ? 0 : before);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) end[i] = max(end[i], before);
  }
};

// The tiles of all experts in a row, expert by expert. Between two calls only where the window begins is kept: a main loop wants
// the registers, and the window's offsets are in L1 by then.
template <int kTileM>
class TileWalk {
public:
  int expert, begin, rows; // of the tile that was found: its expert, that one's first row and number of rows
  int in_expert;           // number of the tile among its expert's

  __device__ TileWalk(const Experts& experts, int tiles_n) : experts_(experts), tiles_n_(tiles_n) {}

  // Goes to a tile, no earlier than the one before; false when there are fewer. All lanes of a warp take part.
  __device__ bool find(int tile) {
    const int lane = int(threadIdx.x) % 32;
    Window window;
    int lane_tiles, lane_end;
    while (true) {
      window.load(experts_, first_, rows_before_, lane);
      lane_tiles = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) lane_tiles += tiles_of(window.end[i] - (i == 0 ? window.before : window.end[i - 1]));
      lane_end = inclusive_sum(lane_tiles, lane);
      const int window_tiles = __shfl_sync(kWholeWarp, lane_end, 31);
      if (tile - tiles_before_ < window_tiles) break;
      const int window_rows_end = __shfl_sync(kWholeWarp, window.end[kPerLane - 1], 31);
      if (first_ + Window::kSize >= experts_.count) {
        begin = window_rows_end;
        return false;
      }
      tiles_before_ += window_tiles;
      rows_before_ = window_rows_end;
      first_ += Window::kSize;
    }
    const int wanted = tile - tiles_before_;
    const int owner = __ffs(int(__ballot_sync(kWholeWarp, wanted < lane_end))) - 1;
    int own_expert = 0, own_begin = window.before, own_end = own_begin, own_tile = wanted - (lane_end - lane_tiles);
    bool found = false;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int from = i == 0 ? window.before : window.end[i - 1];
      const int tiles = tiles_of(window.end[i] - from);
      if (!found) {
        own_expert = i;
        own_begin = from;
        own_end = window.end[i];
        found = own_tile < tiles;
        if (!found) own_tile -= tiles;
      }
    }
    expert = first_ + owner * kPerLane + __shfl_sync(kWholeWarp, own_expert, owner);
    begin = __shfl_sync(kWholeWarp, own_begin, owner);
    rows = __shfl_sync(kWholeWarp, own_end, owner) - begin;
    in_expert = __shfl_sync(kWholeWarp, own_tile, owner);
    return true;
  }

  // After find() answered false: the row past the last expert's last.
  __device__ int rows_end() const { return begin; }

private:
  static constexpr int kPerLane = 4;
  using Window = ExpertWindow<kPerLane>;

  __device__ int tiles_of(int of_rows) const { return (of_rows + kTileM - 1) / kTileM * tiles_n_; }

  const Experts& experts_;
  int tiles_n_;
  int first_ = 0, rows_before_ = 0, tiles_before_ = 0; // of the window: its first expert, what lies before it
};

} // namespace scaled_mm::grouped
