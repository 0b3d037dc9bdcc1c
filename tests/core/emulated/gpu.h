// A block of a GPU as coroutines, for device code on machines without one. Included before the sources that it runs.
//
// A warp's lanes take turns at every instruction of the whole warp. Warps do not: each runs alone up to the next __syncthreads, in
// turn first to last and last to first, so that what one needs of another without waiting for it is missing or spoilt.
// Asynchronous copies land when they are started, or not before they are waited for: whichever run() was told.
#pragma once

#include <cuda_runtime.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace gpu {

constexpr int kLanes = 32;
constexpr size_t kStack = 128 * 1024;

struct Copy {
  unsigned char* to;
  const void* from;
  int bytes;
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  std::vector<std::vector<Copy>> groups; // committed copies, oldest first
  std::vector<Copy> open;                // not committed yet
};

struct Index {
  unsigned x = 0, y = 0;
};

inline std::vector<Thread> threads;
inline ucontext_t scheduler;
inline Index thread_index, block_index, block_dim, grid_dim = {1, 1}; // grid_dim: the caller of run_block sets it, where a kernel reads it
inline std::function<void()> body;
inline bool eager;
inline int finished;
alignas(128) inline unsigned char shared_memory[256 * 1024];
inline size_t shared_size; // of it, that the block may touch

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "thread %u of block %u: %s\n", thread_index.x, block_index.x, what);
  abort();
}

inline void go(unsigned to) {
  const unsigned from = thread_index.x;
  swapcontext(&threads[from].context, &threads[to].context);
  thread_index.x = from;
}
// Every lane of the warp comes here before one goes on.
inline void meet() {
  const unsigned t = thread_index.x;
  go(t % kLanes + 1 < kLanes ? t + 1 : t - (kLanes - 1));
}

inline void land(const Copy& copy) {
  memset(copy.to, 0, 16);
  memcpy(copy.to, copy.from, size_t(copy.bytes));
}

inline void entry(int thread) {
  thread_index.x = unsigned(thread);
  body();
  if (!threads[thread_index.x].groups.empty() || !threads[thread_index.x].open.empty()) {
    for (const auto& group : threads[thread_index.x].groups) {
      if (!group.empty()) fail("ended before its copies had arrived");
    }
    if (!threads[thread_index.x].open.empty()) fail("ended with copies that were not committed");
  }
  ++finished;
}

// One block of `count` threads.
inline void run_block(int count, unsigned block, bool copies_are_eager, std::function<void()> code) {
  body = std::move(code);
  eager = copies_are_eager;
  block_index.x = block;
  block_dim.x = unsigned(count);
  finished = 0;
  memset(shared_memory, 0x5a, sizeof(shared_memory));
  threads.resize(size_t(count));
  for (int i = 0; i < count; ++i) {
    Thread& t = threads[size_t(i)];
    t.groups.clear();
    t.open.clear();
    t.stack.resize(kStack);
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.data();
    t.context.uc_stack.ss_size = t.stack.size();
    t.context.uc_link = i % kLanes + 1 < kLanes ? &threads[size_t(i) + 1].context : &scheduler; // lanes end in turn, as they began
    makecontext(&t.context, reinterpret_cast<void (*)()>(entry), 1, i);
  }
  const int warps = count / kLanes;
  for (int round = 0; finished < count; ++round) {
    const int before = finished;
    for (int i = 0; i < warps; ++i) {
      const int first = (round % 2 ? warps - 1 - i : i) * kLanes;
      thread_index.x = unsigned(first);
      swapcontext(&scheduler, &threads[size_t(first)].context);
    }
    if (finished != before && finished != count) fail("some warps ended where others wait");
  }
  for (size_t i = shared_size; i < sizeof(shared_memory); ++i) {
    if (shared_memory[i] != 0x5a) fail("wrote past the end of shared memory");
  }
}

} // namespace gpu

// The next lane runs up to its own; the last one's goes back to the scheduler.
inline void __syncthreads() {
  const unsigned t = gpu::thread_index.x;
  if (t % gpu::kLanes + 1 < gpu::kLanes) return gpu::go(t + 1);
  swapcontext(&gpu::threads[t].context, &gpu::scheduler);
  gpu::thread_index.x = t;
}

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __int2float_rn(int x) { return float(x); }
inline float __int_as_float(int x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, unsigned shift) { return uint32_t(((uint64_t(high) << 32) | low) >> (shift % 32)); }

#define threadIdx gpu::thread_index
#define blockIdx gpu::block_index
#define blockDim gpu::block_dim
#define gridDim gpu::grid_dim
#ifndef __grid_constant__
#define __grid_constant__
#endif
#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
