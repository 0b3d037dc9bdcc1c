// The host side of the router of experts.
#pragma once

#include "rowwise/launch.cuh"
#include "rowwise/topk_softmax.cuh"

namespace scaled_mm::rowwise {

inline TopkSoftmax topk_softmax_of(const GemmLaunch& l) {
  const MoeOperands& o = *l.moe;
  TopkSoftmax p = {};
  p.logits = l.a;
  p.stride_row = o.x.row;
  p.stride_k = o.x.k;
  p.rows = l.M;
  p.experts = int(o.experts);
  p.choices = int(o.choices);
  p.renormalize = o.renormalize;
  p.weights = static_cast<float*>(l.out);
  p.weights_stride_row = o.out.row;
  p.weights_stride_k = o.out.k;
  p.ids = static_cast<int32_t*>(const_cast<void*>(l.moe_pointers.ids));
  p.ids_stride_row = o.ids.row;
  p.ids_stride_k = o.ids.k;
  return p;
}

inline int64_t topk_softmax_blocks(const TopkSoftmax& p) { return (p.rows + Group<32>::kRows - 1) / Group<32>::kRows; }

template <class X>
struct TopkSoftmaxKernels {
  template <int kHeld>
  struct Held {
    static constexpr int kCount = kHeld;
    static auto pointer() { return &topk_softmax_kernel<X, kHeld>; }
    static DeviceKernel& device_kernel() {
      static DeviceKernel instance(pointer());
      return instance;
    }
  };
  // call(Held<>()) of the logits that a lane has of a row.
  template <class Call>
  static scaledMMStatus_t choose(int experts, const Call& call) {
    if (experts <= 64) return call(Held<2>());
    if (experts <= 128) return call(Held<4>());
    if (experts <= 256) return call(Held<8>());
    if (experts <= 512) return call(Held<16>());
    return call(Held<32>());
  }
  static_assert(kMostExperts == 32 * 32, "a lane has at most 32 logits");

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    for (const int experts : {64, 128, 256, 512, 1024}) {
      const auto prepare_one = [&](auto held) { return prepare_kernel(held.device_kernel(), 0, device, message, size); };
      if (scaledMMStatus_t s = choose(experts, prepare_one)) return s;
    }
    return SCALED_MM_STATUS_SUCCESS;
  }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    TopkSoftmax p = topk_softmax_of(l);
    const int64_t blocks = topk_softmax_blocks(p);
    if (blocks > INT32_MAX) return too_many_blocks("logits", "thread blocks of four rows", blocks, message, size);
    return choose(p.experts, [&](auto held) { return launch_grid(held.device_kernel(), blocks, kTopkThreads, &p, l, message, size); });
  }
};

template <class X>
constexpr Kernel topk_softmax_entry(const char* name, int32_t dtype) {
  return {name, dtype, 0, &TopkSoftmaxKernels<X>::prepare, &TopkSoftmaxKernels<X>::launch};
}

} // namespace scaled_mm::rowwise
