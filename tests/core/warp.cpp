// The walk of grouped products (int8/grouped/walk.cuh) on a warp of 32 host threads, for machines without a GPU.
//
//     warp TOKENS TILES_N GRID OFFSETS...     prints one line a tile: number expert begin rows in_expert, then the end of the rows
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#define __device__
using std::max;
using std::min;

namespace {
thread_local struct { unsigned x; } threadIdx;
std::barrier warp(32);
int exchange[32];

// Every lane gives a value, then reads that of another; all lanes take part, as the device code has to arrange it.
int read_lane(int value, int lane) {
  exchange[threadIdx.x] = value;
  warp.arrive_and_wait();
  const int result = exchange[lane];
  warp.arrive_and_wait();
  return result;
}
int __shfl_sync(unsigned, int value, int lane) { return read_lane(value, lane % 32); }
int __shfl_up_sync(unsigned, int value, int step) {
  const int lane = int(threadIdx.x) - step;
  return read_lane(value, lane < 0 ? int(threadIdx.x) : lane);
}
unsigned __ballot_sync(unsigned, bool predicate) {
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(read_lane(predicate, lane)) << lane;
  return bits;
}
int __ffs(int bits) { return __builtin_ffs(bits); }
}  // namespace

#include "int8/grouped/walk.cuh"

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  std::vector<int32_t> offsets;
  for (int i = 4; i < argc; ++i) offsets.push_back(int32_t(strtol(argv[i], nullptr, 10)));
  const scaled_mm::grouped::Experts experts{offsets.data(), int(offsets.size()), atoi(argv[1])};
  const int tiles_n = atoi(argv[2]), grid = atoi(argv[3]);
  const auto lane = [&](unsigned index) {
    threadIdx.x = index;
    for (int block = 0; block < grid; ++block) {
      scaled_mm::grouped::TileWalk<16> walk(experts, tiles_n);
      for (int number = block; walk.find(number); number += grid) {
        if (index == 0) printf("%d %d %d %d %d\n", number, walk.expert, walk.begin, walk.rows, walk.in_expert);
      }
      const int end = walk.rows_end();
      if (index == 0) printf("end %d\n", end);
    }
  };
  std::vector<std::thread> lanes;
  for (unsigned i = 0; i < 32; ++i) lanes.emplace_back(lane, i);
  for (std::thread& thread : lanes) thread.join();
  return 0;
}
