// A block product by mma.sync, for few tokens on every GPU since Turing: as fast as the weight comes.
//
// A warp has a band, 16 rows of the weight, and kTokens tokens. Bands are dealt to thread blocks so that all multiprocessors have the same
// number within one; warps that are left share K with the others, and the parts are added in order. Each warp keeps a ring of stages
// of its own full, and waits for nobody else. Activations lie in memory in the order of the instruction's operand.
#pragma once

#include <climits>

#include "block/instructions.cuh"
#include "block/levels.cuh"
#include "block/output.cuh"
#include "block/stage.cuh"

namespace scaled_mm::block {

// Warps of a thread block. More tokens need more registers.
constexpr int mma_warps(int tokens) { return tokens > 16 ? 8 : 16; }

struct MmaParams {
  const uint8_t* tiles;
  const uint4* values;    // [tiles of 8 tokens][blocks][lanes]
  const float2* factors;  // [tiles of kTokens][blocks][kTokens]
  Output output;
  int32_t tiles_k, bands;   // of the weight
  int32_t width, parts;     // bands of a thread block, warps that share the K of one
  int32_t groups;           // thread blocks that have all bands
  bool early_weights;
};

// 16 bytes a lane, from memory to shared memory, without waiting where the GPU can.
__device__ inline void copy_async(void* to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
#else
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}
__device__ inline void end_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All but the latest kLeft groups of copies have arrived, for the whole warp.
template <int kLeft>
__device__ inline void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
  __syncwarp();
}

template <class F, class T, int kTokens, int kStages, bool kFactors>
__global__ void __launch_bounds__(32 * mma_warps(kTokens), 1) mma_kernel(const __grid_constant__ MmaParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  let_next_kernel_start();
#endif
  constexpr int kTiles = kTokens / 8;
  extern __shared__ __align__(128) uint8_t memory[];
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int group = int(blockIdx.x) % p.groups, token_tile = int(blockIdx.x) / p.groups;
  const int place = warp % p.width, part = warp / p.width, band = group * p.width + place;
  uint8_t* const stages = memory + warp * kStages * F::kBandBytes;
  const bool works = part < p.parts && band < p.bands;
  float sums[kTiles][4] = {};
  const int begin = p.tiles_k * part / p.parts, count = works ? p.tiles_k * (part + 1) / p.parts - begin : 0;  // K is an int: no overflow
  const uint8_t* const bands = p.tiles + (int64_t(band / 4) * p.tiles_k + begin) * F::kTileBytes + band % 4 * F::kBandBytes;
  const auto load = [&](int step) {
    if (kStages > 1 && step < count) {
      const uint8_t* from = bands + int64_t(step) * F::kTileBytes;
      uint8_t* to = stages + step % kStages * F::kBandBytes;
#pragma unroll
      for (int i = 0; i < (F::kBandBytes + 511) / 512; ++i) {
        const int at = i * 512 + lane * 16;
        if ((i + 1) * 512 <= F::kBandBytes || at < F::kBandBytes) copy_async(to + at, from + at);
      }
    }
    end_copies();
  };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (!p.early_weights) wait_for_preceding_kernel();
#endif
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load(i);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  wait_for_preceding_kernel();
#endif
  const int64_t blocks = int64_t(p.tiles_k) * kTileBlocks;
  const uint4* values = p.values + (int64_t(token_tile) * kTiles * blocks + int64_t(begin) * kTileBlocks) * 32 + lane;
  const float2* factors = kFactors ? p.factors + (int64_t(token_tile) * blocks + int64_t(begin) * kTileBlocks) * kTokens + 2 * t : nullptr;
  for (int step = 0; step < count; ++step) {
    if constexpr (kStages > 1) {
      wait_for_copies<kStages - 2>();
      load(step + kStages - 1);  // into the stage that the step before has left
    }
    const uint8_t* const from = kStages > 1 ? stages + step % kStages * F::kBandBytes : bands + int64_t(step) * F::kTileBytes;
#pragma unroll kTokens > 16 ? 1 : kTokens > 8 ? 2 : 4
    for (int pair = 0; pair < kTileBlocks / 2; ++pair) {
      PairLevels<F> levels;
      PairScales scales, minima{};
      levels.load(from, pair, lane);
      scales.load(from + F::kBandScales, pair, g);
      if constexpr (F::kMinimum) minima.load(from + F::kBandMinima, pair, g);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const Fragments f = levels.template fragments<T>(b);
        const int block = step * kTileBlocks + pair * 2 + b;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint4 x = values[(tile * blocks + block) * 32];
          float sum[4] = {};
          mma_m16n8k16<T>(sum, f.a[0], x.x, x.y);
          mma_m16n8k16<T>(sum, f.a[1], x.z, x.w);
          float4 factor{};
          if constexpr (kFactors) factor = *reinterpret_cast<const float4*>(factors + int64_t(block) * kTokens + tile * 8);
          add_block<F::kMinimum, kFactors>(sums[tile], sum, scales.of(b), F::kMinimum ? minima.of(b) : float2{}, factor);
        }
      }
    }
  }
  // Sums meet in the memory that the stages have left.
  wait_for_copies<0>();
  __syncthreads();
  auto* const partial = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[(warp * kTokens + tile * 8 + 2 * t + i % 2) * kBandRows + g + 8 * (i / 2)] = sums[tile][i];
  }
  __syncthreads();
  const int first_row = group * p.width * kBandRows, first_token = token_tile * kTokens;
  for (int i = int(threadIdx.x); i < p.width * kBandRows * kTokens; i += int(blockDim.x)) {
    const int row = i % kBandRows, token = i / kBandRows % kTokens, of = i / kBandRows / kTokens;
    float sum = 0.0f;
    for (int other = 0; other < p.parts; ++other) sum += partial[((other * p.width + of) * kTokens + token) * kBandRows + row];
    const int n = first_row + of * kBandRows + row;
    if (p.output.bias != nullptr) sum += p.output.bias_of(n);
    p.output.store(first_token + token, n, sum);
  }
}

// One row of a table's block section and one format of weights. kStages: of each warp's ring; 1: none, weights go from memory to registers.
template <class F, int kTokens, int kStages, int kArch = compiled_architecture()>
struct Mma {
  static_assert(kTokens % 8 == 0 && kTokens <= 32 && kStages >= 1, "the rules of the table");
  static constexpr bool kDependent = kArch >= 90, kBfloat16 = kArch >= 80;  // programmatic dependent launch; mma.sync of bfloat16
  static constexpr int kWarps = mma_warps(kTokens);
  static constexpr int kRing = kStages > 1 ? kWarps * kStages * F::kBandBytes : 0, kPartial = kWarps * kBandRows * kTokens * 4;
  static constexpr int kSharedMemory = kRing > kPartial ? kRing : kPartial;

  template <class T, bool kFactors>
  static DeviceKernel& device_kernel() {
    static DeviceKernel one(&mma_kernel<F, T, kTokens, kStages, kFactors>);
    return one;
  }

  // f(kernel) of the one for these activations, or of all of them.
  template <class Function>
  static scaledMMStatus_t for_kernel(Values form, Function&& f) {
    if constexpr (kBfloat16) {
      if (form == Values::kBfloat16) return f(device_kernel<__nv_bfloat16, F::kMinimum>());
    }
    return form == Values::kHalf ? f(device_kernel<__half, F::kMinimum>()) : f(device_kernel<__half, true>());
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    for (const Values form : {Values::kHalf, Values::kQuantized, Values::kBfloat16}) {
      const auto prepare_one = [&](DeviceKernel& kernel) { return prepare_kernel(kernel, kSharedMemory, device, message, size); };
      if (scaledMMStatus_t status = for_kernel(form, prepare_one)) return status;
    }
    return SCALED_MM_STATUS_SUCCESS;
  }

  static int64_t workspace_size(int64_t M, int64_t N, int64_t K, const BlockOperands& o) { return stage_layout<F>(M, N, K, o, kTokens).end; }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    const int64_t token_tiles = tiles_of(l.M, kTokens), bands = tiles_of(l.N, kBandRows);
    // As many bands to a thread block as leave no multiprocessor with more than its share.
    const int64_t all = l.multiprocessors > 0 ? l.multiprocessors : 1, rounds = tiles_of(bands, all * kWarps);
    const int width = int(tiles_of(bands, all * rounds));
    const int64_t groups = tiles_of(bands, width);
    if (bands > INT_MAX / kBandRows || groups > INT_MAX / token_tiles) {
      snprintf(message, size, "out: expected at most %d tiles of %d tokens and %d rows for this kernel, got %lld tokens and %lld rows",
               INT_MAX, kTokens, width * kBandRows, static_cast<long long>(l.M), static_cast<long long>(l.N));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    Staged staged;
    if (scaledMMStatus_t status = stage<F>(l, {kTokens, true, kBfloat16, kDependent}, &staged, message, size)) return status;
    MmaParams p = {staged.tiles, static_cast<const uint4*>(staged.values), staged.factors, output_of(l), int32_t(tiles_of(l.K, kTileK)),
                   int32_t(bands), width, kWarps / width, int32_t(groups), l.constant_b && l.blocks->packed};
    LaunchShape shape;
    shape.grid = dim3(unsigned(groups * token_tiles));
    shape.block = dim3(32 * kWarps);
    shape.shared_memory = kSharedMemory;
    shape.dependent = kDependent;
    void* params[] = {&p};
    return for_kernel(staged.form, [&](DeviceKernel& kernel) { return launch_kernel(kernel, shape, params, l, message, size); });
  }

  static Kernel entry(const char* row) {
    Kernel kernel = {row, F::kDtype, kSharedMemory, &prepare, &launch};
    kernel.block_workspace_size = &workspace_size;
    return kernel;
  }
};

}  // namespace scaled_mm::block
