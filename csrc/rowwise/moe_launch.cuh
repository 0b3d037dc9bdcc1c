// The host side of what surrounds the products of a mixture of experts.
#pragma once

#include "rowwise/int8_block_launch.cuh"
#include "rowwise/moe.cuh"

namespace scaled_mm::rowwise {

// ---- tokens quantized to the rows of their experts ----------------------------------------------------------------------------------

inline ExpertRows expert_rows_of(const GemmLaunch& l) { return {static_cast<const int32_t*>(l.moe_pointers.rows), int(l.moe->choices)}; }

template <class X>
MoeRows moe_rows_of(const GemmLaunch& l) {
  const MoeOperands& o = *l.moe;
  MoeRows p = {};
  p.of.rows = l.M;
  p.of.K = int(l.N);
  p.of.x = matrix<X>(l.a, o.x, l.M, l.N);
  p.of.out = matrix<int8_t>(l.out, o.out, o.rows, l.N);
  p.to = expert_rows_of(l);
  p.scale = static_cast<float*>(const_cast<void*>(l.moe_pointers.out_scale));
  p.scale_stride = o.out_scale.row;
  return p;
}

template <class X>
MoeBlocks moe_blocks_of(const GemmLaunch& l) {
  const MoeOperands& o = *l.moe;
  MoeBlocks p = {};
  p.of.blocks_k = uint32_t(int8_blocks_along(l.N, kInt8Block));
  p.of.blocks = uint32_t(l.M) * p.of.blocks_k;
  p.of.N = l.M;
  p.of.K = int(l.N);
  p.of.x = matrix<X>(l.a, o.x, l.M, l.N);
  p.of.out = matrix<int8_t>(l.out, o.out, o.rows, l.N);
  p.of.scale = static_cast<float*>(const_cast<void*>(l.moe_pointers.out_scale));
  p.of.scale_stride_n = o.out_scale.row;
  p.of.scale_stride_k = o.out_scale.k;
  p.to = expert_rows_of(l);
  return p;
}

template <class X>
struct MoeQuantizeKernels {
  // kThreads: of a token. kHeld: chunks of eight elements that a thread keeps in registers (0: x is read twice). kVectors: chunks are whole and
  // aligned.
  template <int kThreads, int kHeld, bool kVectors>
  struct ByToken {
    static constexpr int64_t kMost = kHeld > 0 ? int64_t(kThreads) * kHeld* kChunk : kMostRowElements;
    static DeviceKernel& device_kernel() {
      static DeviceKernel instance(&moe_quantize_kernel<X, kThreads, kHeld, kVectors>);
      return instance;
    }
  };
  template <class... Kernels>
  struct ByLength {
    static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
      scaledMMStatus_t status = SCALED_MM_STATUS_SUCCESS;
      (void)(((status = prepare_kernel(Kernels::device_kernel(), 0, device, message, size)) == SCALED_MM_STATUS_SUCCESS) && ...);
      return status;
    }
    // Calls `call` with the first kernel whose longest row is long enough.
    template <class Call>
    static void choose(int64_t K, const Call& call) {
      (void)((K <= Kernels::kMost && (call(Kernels()), true)) || ...);
    }
  };
  using Aligned = ByLength<ByToken<32, 4, true>, ByToken<128, 2, true>, ByToken<128, 4, true>, ByToken<256, 4, true>, ByToken<256, 8, true>,
                           ByToken<256, 0, true>>;
  using Any = ByLength<ByToken<32, 4, false>, ByToken<256, 4, false>, ByToken<256, 0, false>>;

  static DeviceKernel& by_block() {
    static DeviceKernel instance(&moe_quantize_block_kernel<X>);
    return instance;
  }
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    if (scaledMMStatus_t s = Aligned::prepare(device, message, size)) return s;
    if (scaledMMStatus_t s = Any::prepare(device, message, size)) return s;
    return prepare_kernel(by_block(), 0, device, message, size);
  }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    if (l.N > kMostRowElements) return too_many_blocks("x", "elements of a row", l.N, message, size);
    if (l.moe->block_scales) {
      const int64_t blocks = l.M * int8_blocks_along(l.N, kInt8Block);
      if (blocks > INT32_MAX) return too_many_blocks("x", "blocks of 128 elements", blocks, message, size);
      MoeBlocks p = moe_blocks_of<X>(l);
      constexpr int64_t kEach = kInt8BlockThreads / TokenBlock<X>::kAcross;
      return launch_grid(by_block(), (blocks + kEach - 1) / kEach, kInt8BlockThreads, &p, l, message, size);
    }
    MoeRows p = moe_rows_of<X>(l);
    scaledMMStatus_t status = SCALED_MM_STATUS_SUCCESS;
    const auto launch_one = [&](auto kernel) { status = launch_by_token(kernel, p, l, message, size); };
    if (p.of.K % kChunk == 0 && p.of.x.vectors && p.of.out.vectors) {
      Aligned::choose(l.N, launch_one);
    } else {
      Any::choose(l.N, launch_one);
    }
    return status;
  }

private:
  template <int kThreads, int kHeld, bool kVectors>
  static scaledMMStatus_t launch_by_token(ByToken<kThreads, kHeld, kVectors> kernel, MoeRows& p, const GemmLaunch& l, char* message, size_t size) {
    constexpr int64_t kRows = Group<kThreads>::kRows;
    const int64_t blocks = (l.M + kRows - 1) / kRows;
    if (blocks > INT32_MAX) return too_many_blocks("x", "thread blocks of tokens", blocks, message, size);
    return launch_grid(kernel.device_kernel(), blocks, Group<kThreads>::kBlock, &p, l, message, size);
  }
};

template <class X>
constexpr Kernel moe_quantize_entry(const char* name, int32_t dtype) {
  return {name, dtype, 0, &MoeQuantizeKernels<X>::prepare, &MoeQuantizeKernels<X>::launch};
}

// ---- the weighted sum -----------------------------------------------------------------------------------------------------------------

template <class X>
MoeCombine moe_combine_of(const GemmLaunch& l) {
  const MoeOperands& o = *l.moe;
  MoeCombine p = {};
  p.tokens = l.M;
  p.K = int(l.N);
  p.spans = int((l.N + kCombineThreads * kChunk - 1) / (kCombineThreads * kChunk));
  p.y = matrix<X>(l.a, o.y, o.rows, l.N);
  p.out = matrix<X>(l.out, o.out, l.M, l.N);
  p.weights = l.moe_pointers.weights;
  p.weights_stride_token = o.weights.row;
  p.weights_stride_choice = o.weights.k;
  p.weights_dtype = o.weights_dtype;
  p.of = expert_rows_of(l);
  return p;
}

template <class X>
struct MoeCombineKernel {
  template <bool kVectors>
  static DeviceKernel& device_kernel() {
    static DeviceKernel instance(&moe_combine_kernel<X, kVectors>);
    return instance;
  }
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    if (scaledMMStatus_t s = prepare_kernel(device_kernel<true>(), 0, device, message, size)) return s;
    return prepare_kernel(device_kernel<false>(), 0, device, message, size);
  }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    if (l.N > kMostRowElements) return too_many_blocks("y", "elements of a row", l.N, message, size);
    MoeCombine p = moe_combine_of<X>(l);
    const int64_t blocks = p.tokens * p.spans;
    if (blocks > INT32_MAX) return too_many_blocks("out", "parts of 1024 elements", blocks, message, size);
    const bool vectors = p.K % kChunk == 0 && p.y.vectors && p.out.vectors;
    return launch_grid(vectors ? device_kernel<true>() : device_kernel<false>(), blocks, kCombineThreads, &p, l, message, size);
  }
};

template <class X>
constexpr Kernel moe_combine_entry(const char* name, int32_t dtype) {
  return {name, dtype, 0, &MoeCombineKernel<X>::prepare, &MoeCombineKernel<X>::launch};
}

} // namespace scaled_mm::rowwise
