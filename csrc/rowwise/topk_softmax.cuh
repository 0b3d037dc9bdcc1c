// The router of a mixture of experts: the softmax of a row of logits, and the largest of them. A warp has a row.
#pragma once

#include "rowwise/kernel.cuh"

namespace scaled_mm::rowwise {

struct TopkSoftmax {
  const void* logits; // [rows, experts]
  int64_t stride_row, stride_k, rows;
  int experts, choices;
  bool renormalize;
  float* weights; // [rows, choices]
  int64_t weights_stride_row, weights_stride_k;
  int32_t* ids; // [rows, choices]
  int64_t ids_stride_row, ids_stride_k;
};

// A logit as an integer above 0 that grows with it. NaN has the largest; -0 has that of 0.
__device__ inline uint32_t ordered(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f), key = bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
  return logit == logit ? key : ~0u;
}
__device__ inline float in_order(uint32_t key) { return __uint_as_float(key ^ (uint32_t(int32_t(~key) >> 31) | 0x80000000u)); }

// A logit, and the expert that it belongs to.
struct Choice {
  float logit;
  int expert;
};

// The logits of a lane, those of experts lane + 32 * i, as keys. A key of 0: there is no such expert.
// 16 bits: the 10 lowest bits of `ordered` are the same for all logits of a sign, so the expert takes their place. No two keys are equal.
template <class X, int kHeld>
struct Candidates {
  static constexpr uint32_t kExpert = kMostExperts - 1;
  uint32_t keys[kHeld];

  __device__ explicit Candidates(int) {}
  __device__ static uint32_t key_of(float logit, int expert) { return (ordered(logit) & ~kExpert) | (kExpert - uint32_t(expert)); }
  __device__ static float logit_of(uint32_t key) { return __uint_as_float(__float_as_uint(in_order(key)) & ~kExpert); }
  __device__ Choice largest() { return next(0); }
  // The next choice: its key is the largest below `last`. Modulo 2^32 the differences of keys below `last` are larger than those of the others.
  __device__ Choice next(uint32_t before) {
    uint32_t largest[2] = {}; // differences. Two of them, for two short chains of operations
#pragma unroll
    for (int i = 0; i < kHeld; ++i) largest[i % 2] = keys[i] - before > largest[i % 2] ? keys[i] - before : largest[i % 2];
    last = before + Group<32>::largest_of_warp(largest[0] > largest[1] ? largest[0] : largest[1]);
    return {logit_of(last), int(kExpert - (last & kExpert))};
  }
  __device__ Choice next() { return next(last); }

private:
  uint32_t last;
};

// float32: the largest logit first, then the lowest expert that has it.
template <int kHeld>
struct Candidates<float, kHeld> {
  uint32_t keys[kHeld];

  __device__ explicit Candidates(int lane) : lane(lane) {}
  __device__ static uint32_t key_of(float logit, int) { return ordered(logit); }
  __device__ static float logit_of(uint32_t key) { return in_order(key); }
  __device__ Choice largest() {
    uint32_t key = 0;
    int held = kHeld; // the first that this lane has of it
#pragma unroll
    for (int i = 0; i < kHeld; ++i) key = keys[i] > key ? keys[i] : key;
    key = Group<32>::largest_of_warp(key);
#pragma unroll
    for (int i = kHeld - 1; i >= 0; --i) held = keys[i] == key ? i : held;
    last = kMostExperts - int(Group<32>::largest_of_warp(held < kHeld ? uint32_t(kMostExperts - lane - 32 * held) : 0));
    return {in_order(key), last};
  }
  __device__ Choice next() {
    const int used = last - lane;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) keys[i] = used == 32 * i ? 0 : keys[i];
    return largest();
  }

private:
  int lane, last;
};

constexpr int kTopkThreads = Group<32>::kBlock;
constexpr int topk_blocks(int held) { return held > 16 ? 4 : 8; } // on an SM: 64 registers a thread, of which 32 logits need more

template <class X, int kHeld>
__global__ void __launch_bounds__(kTopkThreads, topk_blocks(kHeld)) topk_softmax_kernel(const __grid_constant__ TopkSoftmax p) {
  wait_for_preceding_kernel();
  const Group<32> group;
  if (group.row >= p.rows) return; // the whole warp
  const int lane = group.thread;
  const X* const row = static_cast<const X*>(p.logits) + group.row * p.stride_row;
  X logits[kHeld]; // read without a branch, so that all loads are under way at once
#pragma unroll
  for (int i = 0; i < kHeld; ++i) logits[i] = row[(lane + 32 * i < p.experts ? lane + 32 * i : 0) * p.stride_k];
  Candidates<X, kHeld> candidates(lane);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int expert = lane + 32 * i;
    candidates.keys[i] = candidates.key_of(to_float(logits[i]), expert) & -uint32_t(expert < p.experts);
  }
  Choice choice = candidates.largest(), own = choice; // own: the one that this lane writes
  const float largest = choice.logit;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const uint32_t key = candidates.keys[i];
    const float e = exp_of(candidates.logit_of(key) - largest);
    sum = sum + (key != 0 ? e : 0.0f);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum = sum + __shfl_xor_sync(~0u, sum, step); // the same tree in every lane
#pragma unroll 1
  for (int j = 1; j < p.choices; ++j) {
    choice = candidates.next();
    if (j == lane) own = choice;
  }
  float weight = exp_of(own.logit - largest) / sum;
  if (p.renormalize) {
    float total = 0;
    for (int j = 0; j < p.choices; ++j) total = total + __shfl_sync(~0u, weight, j);
    weight = weight / total;
  }
  if (lane >= p.choices) return;
  p.weights[group.row * p.weights_stride_row + lane * p.weights_stride_k] = weight;
  p.ids[group.row * p.ids_stride_row + lane * p.ids_stride_k] = own.expert;
}

} // namespace scaled_mm::rowwise
