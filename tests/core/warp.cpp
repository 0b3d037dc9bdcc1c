// The walk of grouped products (int8/grouped/walk.cuh) on a warp of 32 coroutines that take turns, for machines without a GPU.
//
//     warp TOKENS TILES_N GRID OFFSETS...     prints one line a tile: number expert begin rows in_expert, then the end of the rows
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define __device__
using std::max;
using std::min;

namespace {
constexpr int kLanes = 32;
struct {
  unsigned x;
} threadIdx;
ucontext_t lanes[kLanes], after;
std::vector<char> stacks[kLanes];
int exchange[kLanes];

void next_lane() {
  const unsigned lane = threadIdx.x;
  swapcontext(&lanes[lane], &lanes[(lane + 1) % kLanes]);
  threadIdx.x = lane;
}

// Every lane gives a value, then reads that of another; all lanes take part, as the device code has to arrange it.
int read_lane(int value, int lane) {
  exchange[threadIdx.x] = value;
  next_lane();
  const int result = exchange[lane];
  next_lane();
  return result;
}
int __shfl_sync(unsigned, int value, int lane) { return read_lane(value, lane % kLanes); }
int __shfl_up_sync(unsigned, int value, int step) {
  const int lane = int(threadIdx.x) - step;
  return read_lane(value, lane < 0 ? int(threadIdx.x) : lane);
}
unsigned __ballot_sync(unsigned, bool predicate) {
  exchange[threadIdx.x] = predicate;
  next_lane();
  unsigned bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= unsigned(exchange[lane]) << lane;
  next_lane();
  return bits;
}
int __ffs(int bits) { return __builtin_ffs(bits); }
} // namespace

#include "int8/grouped/walk.cuh"

namespace {
scaled_mm::grouped::Experts experts;
int tiles_n, grid;

void walk_all(int lane) {
  threadIdx.x = unsigned(lane);
  for (int block = 0; block < grid; ++block) {
    scaled_mm::grouped::TileWalk<16> walk(experts, tiles_n);
    for (int number = block; walk.find(number); number += grid) {
      if (lane == 0) printf("%d %d %d %d %d\n", number, walk.expert, walk.begin, walk.rows, walk.in_expert);
    }
    if (lane == 0) printf("end %d\n", walk.rows_end());
  }
}
} // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  std::vector<int32_t> offsets;
  for (int i = 4; i < argc; ++i) offsets.push_back(int32_t(strtol(argv[i], nullptr, 10)));
  experts = {offsets.data(), int(offsets.size()), atoi(argv[1])};
  tiles_n = atoi(argv[2]);
  grid = atoi(argv[3]);
  for (int i = 0; i < kLanes; ++i) {
    stacks[i].resize(64 * 1024);
    getcontext(&lanes[i]);
    lanes[i].uc_stack.ss_sp = stacks[i].data();
    lanes[i].uc_stack.ss_size = stacks[i].size();
    lanes[i].uc_link = i + 1 < kLanes ? &lanes[i + 1] : &after; // they end in turn, as they began
    makecontext(&lanes[i], reinterpret_cast<void (*)()>(walk_all), 1, i);
  }
  swapcontext(&after, &lanes[0]);
  return 0;
}
