// The host side of the GGUF quantizers: one Kernel of the registry for a dtype of x, whatever the format and the rule.
#pragma once

#include "gguf/quantize.cuh"
#include "rowwise/launch.cuh"

namespace scaled_mm::gguf {

inline int64_t blocks_to_write(const GemmLaunch& l) { return l.M * (l.N / 32); }

template <class X>
QuantizeParams quantize_params(const GemmLaunch& l) {
  QuantizeParams p = {};
  p.x = rowwise::matrix<X>(l.a, {l.a_stride_m, l.a_stride_k}, l.M, l.N);
  p.K = int(l.N);
  p.blocks = uint32_t(blocks_to_write(l));
  p.blocks_k = uint32_t(l.N / 32);
  p.out = static_cast<uint8_t*>(l.out);
  p.aligned = reinterpret_cast<uintptr_t>(l.out) % 16 == 0;
  return p;
}

template <class X, class F, bool kLargest>
struct Quantize {
  static DeviceKernel& device_kernel() {
    static DeviceKernel instance(&quantize_kernel<X, F, kLargest>);
    return instance;
  }
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) { return prepare_kernel(device_kernel(), 0, device, message, size); }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    constexpr uint32_t kEachThreadBlock = kQuantizeThreads / kSharers;
    QuantizeParams p = quantize_params<X>(l);
    LaunchShape shape;
    shape.grid = dim3((p.blocks + kEachThreadBlock - 1) / kEachThreadBlock);
    shape.block = dim3(kQuantizeThreads);
    shape.dependent = rowwise::kDependent;
    void* pointers[] = {&p};
    return launch_kernel(device_kernel(), shape, pointers, l, message, size);
  }
};

// visit(Quantize of the format and the rule). False: no such format.
template <class X, class Visit>
bool for_format(int32_t format, int32_t rule, const Visit& visit) {
  switch (format) {
#define VISIT_FORMAT(NAME, name, code, bytes, bits, zero, has_minimum)                                                                               \
  case SCALED_MM_DTYPE_##NAME: {                                                                                                                     \
    using F = Written<bits, zero, (has_minimum) != 0, SCALED_MM_DTYPE_##NAME == SCALED_MM_DTYPE_Q8_1>;                                               \
    static_assert(F::kBytes == bytes, "gguf_formats.h: the bytes of a GGUF block follow from its fields");                                           \
    if ((zero) != 0 && rule == SCALED_MM_GGUF_RULE_GGML) {                                                                                           \
      visit(Quantize<X, F, (zero) != 0>());                                                                                                          \
    } else {                                                                                                                                         \
      visit(Quantize<X, F, false>());                                                                                                                \
    }                                                                                                                                                \
    return true;                                                                                                                                     \
  }
    SCALED_MM_GGUF_FORMATS(VISIT_FORMAT)
#undef VISIT_FORMAT
  default: return false;
  }
}

template <class X>
struct QuantizeKernels {
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    scaledMMStatus_t status = SCALED_MM_STATUS_SUCCESS;
    const auto one = [&](auto quantize) {
      if (status == SCALED_MM_STATUS_SUCCESS) status = quantize.prepare(device, message, size);
    };
#define PREPARE_FORMAT(NAME, ...)                                                                                                                    \
  for (const int32_t rule : {SCALED_MM_GGUF_RULE_ABSMAX, SCALED_MM_GGUF_RULE_GGML}) for_format<X>(SCALED_MM_DTYPE_##NAME, rule, one);
    SCALED_MM_GGUF_FORMATS(PREPARE_FORMAT)
#undef PREPARE_FORMAT
    return status;
  }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    if (l.N > kMostRowElements || blocks_to_write(l) > INT32_MAX) {
      snprintf(message, size, "x: expected rows of at most %d elements and at most %d GGUF blocks, got %lld and %lld", kMostRowElements, INT32_MAX,
               static_cast<long long>(l.N), static_cast<long long>(blocks_to_write(l)));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    scaledMMStatus_t status = SCALED_MM_STATUS_INTERNAL_ERROR;
    snprintf(message, size, "out: expected a GGUF format, got dtype %d", int(l.rowwise->output));
    for_format<X>(l.rowwise->output, l.rowwise->function, [&](auto quantize) { status = quantize.launch(l, message, size); });
    return status;
  }
};

template <class X>
constexpr Kernel quantize_entry(const char* name, int32_t dtype) {
  return {name, dtype, 0, &QuantizeKernels<X>::prepare, &QuantizeKernels<X>::launch};
}

} // namespace scaled_mm::gguf
