// Staging: kernels that prepare the workspace before a product. An unpacked weight becomes tiles. Activations become 16-bit floats that the
// product's kernel can load, with a factor and an addend for each token and GGUF block.
//
//   out[m,n] = sum over blocks of  d_w * (factor * sum_k (q_w - zero) * x[k] + addend)        formats without minimum
//              sum over blocks of  d_w * factor * sum_k q_w * x[k]  +  m_w * addend           with minimum, x quantized
//              sum over blocks of  d_w * factor * sum_k (q_w - c) * x[k]  +  (m_w + c * d_w) * addend      with minimum, x not quantized;
//                                                                                                          c: the middle level
//
//   x                      factor  addend, without minimum                 with minimum
//   quantized to q8_1      d_a     zero * (d_a * sum(q_a) - s_a)           s_a              x = q_a, exact
//   16-bit floats          1       0, and no factors are stored            sum(x)           on GPUs with TF32 as two TF32 numbers
//   bfloat16 as float16    2^e     0                                       sum(x)           x / 2^e, for GPUs without bfloat16
#pragma once

#include <type_traits>

#include "gguf/block_sum.cuh"
#include "gguf/formats.cuh"
#include "gguf/make_tiles.cuh"
#include "int8/c3x/grid_dependency.cuh"
#include "int8/launch.cuh"

namespace scaled_mm::gguf {

// The oldest architecture that this file is compiled for: 90 for compute capability 9.0.
constexpr int compiled_architecture() {
  int least = 1000;
  for (const int arch : {__CUDA_ARCH_LIST__}) least = arch / 10 < least ? arch / 10 : least;
  return least;
}

enum class Values { kQuantized, kHalf, kBfloat16, kScaledHalf };

// The form in which a kernel needs the activations of a product.
inline Values values_of(const BlockOperands& o, bool has_bfloat16) {
  if (o.activation == SCALED_MM_DTYPE_Q8_1 || o.quantize) return Values::kQuantized;
  if (o.activation == SCALED_MM_DTYPE_FLOAT16) return Values::kHalf;
  return has_bfloat16 ? Values::kBfloat16 : Values::kScaledHalf;
}

// What a kernel reads besides the activations, for each token and block.
enum class Factors {
  kNone,   // nothing: the factor is 1, the addend 0
  kScaled, // (factor, addend)
  kFloats, // (factor, addend); levels are Centred
  kSums,   // the addend as two TF32 numbers (high, low), in the order of mma_m16n8k8_tf32's operand; the factor is 1; levels are Centred
  kRounded // nothing: weights are rounded to 16 bits (rounded.cuh)
};

// tf32: the kernel multiplies minima by sums on tensor cores.
template <class F>
constexpr Factors factors_of(Values form, bool tf32) {
  if (form == Values::kQuantized || (form == Values::kScaledHalf && !F::kMinimum)) return Factors::kScaled;
  return !F::kMinimum ? Factors::kNone : tf32 ? Factors::kSums : Factors::kFloats;
}

// The format that defines the zero of the levels for a kernel with these factors.
template <class F, Factors kFactors>
using Levels = std::conditional_t<kFactors == Factors::kFloats || kFactors == Factors::kSums, Centred<F>, F>;

struct StageParams {
  const uint8_t* a;
  int64_t stride_m, stride_k; // in elements; q8_1: stride_m in bytes
  int32_t dtype;              // scaledMMDtype_t
  int32_t M;
  int64_t K;
  void* values;    // [M, K] float16 or bfloat16; nullptr: the product's kernel reads a in place
  float2* factors; // [tiles of tokens][blocks of whole tiles of K][tokens of a tile], or in the order of Factors::kSums; nullptr: none
  int32_t tokens;  // of a tile
  int32_t blocks;  // K / 32, rounded up to whole tiles of the weight
  Values form;
  bool fragments; // values in the order of mma.sync's operand: [tiles of 8 tokens][blocks][lanes][8 values]
  bool minimum;   // the weight's format has minima
  bool sums;      // Factors::kSums
  bool aligned;   // see is_aligned
  float zero;
};

static_assert(kEach * kSharers == kBlock);

// Loads eight activations of a row, float16, bfloat16 or float32, as float32: exact.
__device__ inline void load_floats(const StageParams& p, int64_t at, float (&x)[kEach]) {
  const auto* words = reinterpret_cast<const uint32_t*>(p.a);
  const auto* halves = reinterpret_cast<const uint16_t*>(p.a);
  if (p.dtype == SCALED_MM_DTYPE_FLOAT32) {
    uint32_t bits[kEach];
    if (p.aligned) {
      reinterpret_cast<uint4*>(bits)[0] = *reinterpret_cast<const uint4*>(words + at);
      reinterpret_cast<uint4*>(bits)[1] = *reinterpret_cast<const uint4*>(words + at + 4);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) bits[i] = words[at + i * p.stride_k];
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = __uint_as_float(bits[i]);
  } else {
    uint16_t bits[kEach];
    if (p.aligned) {
      const uint4 all = *reinterpret_cast<const uint4*>(halves + at);
      const uint32_t pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (int i = 0; i < kEach; ++i) bits[i] = uint16_t(pairs[i / 2] >> (16 * (i % 2)));
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) bits[i] = halves[at + i * p.stride_k];
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      x[i] = p.dtype == SCALED_MM_DTYPE_FLOAT16 ? __half2float(__ushort_as_half(bits[i])) : __uint_as_float(uint32_t(bits[i]) << 16);
    }
  }
}

// Loads eight levels of q8_1.
__device__ inline void load_levels(const uint8_t* from, bool aligned, float (&x)[kEach]) {
  uint32_t words[2] = {};
  if (aligned) {
    words[0] = reinterpret_cast<const uint32_t*>(from)[0], words[1] = reinterpret_cast<const uint32_t*>(from)[1];
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) words[i / 4] |= uint32_t(from[i]) << (8 * (i % 4));
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = float(int8_t(words[i / 4] >> (8 * (i % 4)) & 0xff));
}

// The largest magnitude of a block, in all its threads. NaNs are ignored.
__device__ inline float block_largest(const float (&x)[kEach]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, fabsf(x[i]));
  for (int apart = kSharers / 2; apart > 0; apart /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
  return largest;
}

// (high, low) of Factors::kSums. Both are rounded: if high were truncated, low would have the sign of high, and the omitted products low * low
// would bias the result. kAnySize: v may be so large that rounding would overflow. The low part of a non-finite v is 0.
template <bool kAnySize = true>
__device__ inline float2 two_tf32(float v) {
  if (!(fabsf(v) < INFINITY)) return {v, 0.0f};
  const auto cut = [](float v, uint32_t up) { return __uint_as_float((__float_as_uint(v) + up) & 0xffffe000u); };
  const float high = cut(v, kAnySize && fabsf(v) > 3e38f ? 0u : 0x1000u);
  return {high, cut(v - high, 0x1000u)};
}

// Rounded to float16 as the quantizer stores it: all NaNs have one bit pattern (docs/design/gguf-formats.md).
__device__ inline float through_half(float v) { return __half2float(__float2half_rn(v)); }

// Replaces x by its q8_1 levels; returns the factor and the addend of the block. All threads of a warp must call it, because it shuffles.
__device__ inline float2 quantize(const StageParams& p, float (&x)[kEach]) { // as scaled_mm/gguf/quantize.py
  const float sum = through_half(block_sum(x));
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kEach; ++i) finite = finite && fabsf(x[i]) < INFINITY;
  const uint32_t spoilt = __ballot_sync(~0u, !finite) >> (threadIdx.x % 32 / kSharers * kSharers) & ((1u << kSharers) - 1);
  const float largest = block_largest(x), d = spoilt == 0 ? largest / 127.0f : NAN, inverse = d != 0.0f ? 1.0f / d : 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float level = roundf(x[i] * inverse);
    x[i] = fabsf(level) <= 127.0f ? level : 0.0f;
  }
  const float kept = through_half(d);
  return {kept, p.minimum ? sum : p.zero != 0.0f ? p.zero * (kept * block_sum(x) - sum) : 0.0f};
}

// The same without quantizing: kScaledHalf divides x by 2^e, other forms leave it.
__device__ inline float2 scale(const StageParams& p, float (&x)[kEach]) {
  const float sum = p.minimum ? block_sum(x) : 0.0f;
  if (p.sums) return two_tf32(sum);
  if (p.form != Values::kScaledHalf) return {1.0f, sum};
  const float largest = block_largest(x);
  int exponent = 0;
  if (largest > 0.0f && largest < INFINITY) frexpf(largest, &exponent);
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = ldexpf(x[i], 15 - exponent); // below 2^15; what underflows is below 2^-25 of the largest
  return {ldexpf(1.0f, exponent - 15), sum};
}

// One thread block per 8 tokens and tile of K, one warp per token, 4 threads per GGUF block.
static __global__ void __launch_bounds__(256) stage_activations(const __grid_constant__ StageParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  let_next_kernel_start();
  wait_for_preceding_kernel();
#endif
  const unsigned tiles_k = unsigned(p.blocks) / kTileBlocks, eight = blockIdx.x / tiles_k, tile_k = blockIdx.x % tiles_k;
  const int g = int(threadIdx.x) / 32, part = int(threadIdx.x) % kSharers, in_tile = int(threadIdx.x) % 32 / kSharers;
  const int block = int(tile_k) * kTileBlocks + in_tile;
  const int64_t m = int64_t(eight) * 8 + g, k = int64_t(block) * kBlock + part * kEach;
  const bool there = m < p.M && k < p.K;
  float x[kEach] = {};
  float2 factor = {0.0f, 0.0f};
  if (p.dtype == SCALED_MM_DTYPE_Q8_1) {
    const uint8_t* q = p.a + m * p.stride_m + int64_t(block) * kActivationBytes;
    if (there) load_levels(q + kActivationLevels + part * kEach, p.aligned, x);
    const float sum = p.zero != 0.0f ? block_sum(x) : 0.0f; // of integers: exact
    if (there) {
      const float d = load_half(q), s = load_half(q + kActivationSum);
      factor = {d, p.minimum ? s : p.zero != 0.0f ? p.zero * (d * sum - s) : 0.0f};
    }
  } else {
    if (there) load_floats(p, m * p.stride_m + k * p.stride_k, x);
    factor = p.form == Values::kQuantized ? quantize(p, x) : scale(p, x);
    if (!there) factor = {0.0f, 0.0f};
  }
  if (p.values != nullptr) {
    uint32_t pairs[kEach / 2];
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
      if (p.form == Values::kBfloat16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        pairs[i] = reinterpret_cast<const uint32_t&>(pair);
      } else {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        pairs[i] = reinterpret_cast<const uint32_t&>(pair);
      }
    }
    if (p.fragments) { // element k of token g belongs to lane 4 g + k / 2 % 4; zeros past M and K
      auto* to = static_cast<uint32_t*>(p.values) + ((int64_t(eight) * p.blocks + block) * 32 + g * 4) * 4 + part;
#pragma unroll
      for (int i = 0; i < kEach / 2; ++i) to[i * 4] = pairs[i];
    } else if (there) {
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.values) + m * p.K + k) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
  if (p.factors != nullptr && part == 0) {
    const unsigned tile_m = eight * 8 / unsigned(p.tokens), token = eight * 8 % unsigned(p.tokens) + g;
    const int64_t blocks_before = int64_t(tile_m) * p.blocks;
    int64_t at = (blocks_before + block) * p.tokens + token;
    if (p.sums) { // [tiles of tokens][tiles of blocks][tiles of 8 tokens][lanes][blocks t and t + 4]
      const int64_t tile = (blocks_before / kTileBlocks + tile_k) * (p.tokens / 8) + token / 8;
      at = (tile * 32 + g * 4 + in_tile % 4) * 2 + in_tile / 4;
    }
    p.factors[at] = factor;
  }
}

// The parts of a workspace. Values always have a part, because whether a kernel can read the activations in place depends on their address, which
// is unknown when the workspace is sized.
struct StageLayout {
  int64_t tiles = 0, values = 0, factors = 0, end = 0; // byte offsets, multiples of 1024
};

template <class F>
StageLayout stage_layout(int64_t M, int64_t N, int64_t K, const BlockOperands& o, int tokens, bool ampere) {
  const auto aligned = [](int64_t bytes) { return tiles_of(bytes, 1024) * 1024; };
  const int64_t tiles_k = tiles_of(K, kTileK);
  StageLayout s;
  s.tiles = 0;
  s.values = s.tiles + (o.packed ? 0 : aligned(tiles_of(N, kTileRows) * tiles_k * F::kTileBytes));
  s.factors = s.values + aligned(tiles_of(M, tokens) * tokens * tiles_k * kTileK * 2);
  const bool factors = factors_of<F>(values_of(o, ampere), ampere) != Factors::kNone;
  s.end = s.factors + (factors ? aligned(tiles_of(M, tokens) * tokens * tiles_k * kTileBlocks * int64_t(sizeof(float2))) : 0);
  return s;
}

// The operands as the product's kernel reads them.
struct Staged {
  const uint8_t* tiles;
  const void* values;    // [M, K] float16 or bfloat16, or these in the order of mma.sync's operand
  int64_t stride;        // of values [M, K], from row to row, in elements
  const float2* factors; // nullptr: none
  Factors kind;
  Values form;
};

// Whether a kernel can read the activations in place: contiguous along K, rows and the data pointer aligned to 16 bytes.
inline bool in_place(const GemmLaunch& l, Values form) {
  if (form != Values::kHalf && form != Values::kBfloat16) return false;
  return l.a_stride_k == 1 && reinterpret_cast<uintptr_t>(l.a) % 16 == 0 && (l.M == 1 || (l.a_stride_m % 8 == 0 && l.a_stride_m >= l.K));
}

// Whether stage_activations can use vector loads: 16 bytes of floats that are contiguous along K, 4 bytes of q8_1.
inline bool is_aligned(const GemmLaunch& l) {
  const bool blocks = l.blocks->activation == SCALED_MM_DTYPE_Q8_1;
  const int64_t at_once = blocks ? 4 : 16, size = blocks ? 1 : l.blocks->activation == SCALED_MM_DTYPE_FLOAT32 ? 4 : 2;
  return (blocks || l.a_stride_k == 1) && reinterpret_cast<uintptr_t>(l.a) % at_once == 0 && (l.M == 1 || l.a_stride_m * size % at_once == 0);
}

// How a kernel needs its operands. tokens: per tile. fragments: values in the order of mma.sync's operand. ampere: it multiplies bfloat16 and
// TF32, so bfloat16 is not converted to scaled float16. dependent: it is compiled for an architecture with programmatic dependent launch.
// factors: false if it computes the factors itself.
struct Wanted {
  int tokens;
  bool fragments, ampere, dependent;
  bool factors = true;
};

template <class F>
scaledMMStatus_t stage(const GemmLaunch& l, const Wanted& wanted, Staged* staged, char* message, size_t size) {
  const int tokens = wanted.tokens;
  const bool fragments = wanted.fragments;
  const BlockOperands& o = *l.blocks;
  const StageLayout layout = stage_layout<F>(l.M, l.N, l.K, o, tokens, wanted.ampere);
  auto* workspace = static_cast<uint8_t*>(l.workspace);
  const int64_t tiles_k = tiles_of(l.K, kTileK);
  *staged = {};
  staged->tiles = static_cast<const uint8_t*>(l.b);
  staged->form = values_of(o, wanted.ampere);
  staged->kind = factors_of<F>(staged->form, wanted.ampere);
  LaunchShape shape;
  shape.dependent = wanted.dependent;
  if (!o.packed && l.K > 0) {
    static DeviceKernel kernel(&make_tiles<F>);
    uint8_t* to = workspace + layout.tiles;
    const uint8_t* from = static_cast<const uint8_t*>(l.b);
    int64_t stride = l.b_stride_n, rows = l.N, blocks = l.K / kBlock;
    int count = int(tiles_k);
    shape.grid = dim3(unsigned(tiles_of(l.N, kTileRows) * tiles_k));
    shape.block = dim3(128);
    void* params[] = {&from, &stride, &rows, &blocks, &count, &to};
    if (scaledMMStatus_t status = launch_kernel(kernel, shape, params, l, message, size)) return status;
    staged->tiles = to;
  }
  const bool direct = !fragments && in_place(l, staged->form);
  const bool factors = wanted.factors && staged->kind != Factors::kNone;
  staged->values = direct ? l.a : workspace + layout.values;
  staged->stride = !direct ? l.K : l.M > 1 ? l.a_stride_m : l.K;
  staged->factors = factors ? reinterpret_cast<const float2*>(workspace + layout.factors) : nullptr;
  if (l.K == 0 || (direct && !factors)) return SCALED_MM_STATUS_SUCCESS;
  static DeviceKernel kernel(&stage_activations);
  StageParams p = {static_cast<const uint8_t*>(l.a),
                   l.a_stride_m,
                   l.a_stride_k,
                   o.activation,
                   int32_t(l.M),
                   l.K,
                   direct ? nullptr : workspace + layout.values,
                   factors ? reinterpret_cast<float2*>(workspace + layout.factors) : nullptr,
                   tokens,
                   int32_t(tiles_k * kTileBlocks),
                   staged->form,
                   fragments,
                   F::kMinimum,
                   staged->kind == Factors::kSums,
                   is_aligned(l),
                   float(F::kZero)};
  shape.grid = dim3(unsigned(tiles_of(l.M, tokens) * (tokens / 8) * tiles_k));
  shape.block = dim3(256);
  void* params[] = {&p};
  return launch_kernel(kernel, shape, params, l, message, size);
}

} // namespace scaled_mm::gguf
