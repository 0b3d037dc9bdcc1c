// The host side of groupwise quantization to int8.
#pragma once

#include "rowwise/int8_block.cuh"
#include "rowwise/launch.cuh"

namespace scaled_mm::rowwise {

inline int64_t int8_blocks_along(int64_t size, int block) { return (size + block - 1) / block; }

inline bool int8_block_of_weight(const GemmLaunch& l) { return (l.rowwise->function & SCALED_MM_INT8_BLOCK_WEIGHT) != 0; }

inline bool int8_block_is_small(const GemmLaunch& l) { return (l.rowwise->function & SCALED_MM_INT8_BLOCK_SMALL) != 0; }

inline int int8_block_size(const GemmLaunch& l) { return int8_block_is_small(l) ? kSmallInt8Block : kInt8Block; }

inline int64_t int8_blocks(const GemmLaunch& l) {
  const int64_t along_n = int8_block_of_weight(l) ? int8_blocks_along(l.M, int8_block_size(l)) : l.M;
  return l.batch * along_n * int8_blocks_along(l.N, int8_block_size(l));
}

template <class X>
Int8Blocks int8_blocks_of(const GemmLaunch& l) {
  const BatchStrides& s = l.batch_strides;
  Int8Blocks p = {};
  p.blocks = uint32_t(int8_blocks(l));
  p.blocks_k = uint32_t(int8_blocks_along(l.N, int8_block_size(l)));
  p.blocks_n = uint32_t(int8_blocks_along(l.M, int8_block_size(l)));
  p.N = l.M;
  p.K = int(l.N);
  p.truncates = (l.rowwise->function & SCALED_MM_INT8_BLOCK_TRUNCATE) != 0;
  p.x = matrix<X>(l.a, {l.a_stride_m, l.a_stride_k}, l.M, l.N);
  p.out = matrix<int8_t>(l.out, {l.out_stride_m, l.out_stride_n}, l.M, l.N);
  p.x.vectors = p.x.vectors && in_vectors<X>(l.a, l.batch, l.N, s.a, l.a_stride_k);
  p.out.vectors = p.out.vectors && in_vectors<int8_t>(l.out, l.batch, l.N, s.out, l.out_stride_n);
  p.x_stride_batch = s.a;
  p.out_stride_batch = s.out;
  p.scale = static_cast<float*>(const_cast<void*>(l.rowwise_pointers.out_scale));
  p.scale_stride_batch = s.a_scale;
  p.scale_stride_n = l.a_scale_stride;
  p.scale_stride_k = l.a_scale_stride_k;
  p.rows_end = rows_end_of(l);
  return p;
}

template <class X, int kBlock>
struct Int8BlockKernel {
  static DeviceKernel& token() {
    static DeviceKernel instance(&int8_block_token_kernel<X, kBlock>);
    return instance;
  }
  static DeviceKernel& weight() {
    static DeviceKernel instance(&int8_block_weight_kernel<X, kBlock>);
    return instance;
  }
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    if (scaledMMStatus_t s = prepare_kernel(token(), 0, device, message, size)) return s;
    return prepare_kernel(weight(), 0, device, message, size);
  }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    Int8Blocks p = int8_blocks_of<X>(l);
    const bool is_weight = int8_block_of_weight(l);
    const uint32_t each = is_weight ? 1 : TokenBlock<X, kBlock>::kEach; // blocks of a thread block
    LaunchShape shape;
    shape.grid = dim3(unsigned(blocks_of_rows((int64_t(p.blocks) + each - 1) / each, kInt8BlockThreads, p.rows_end, l)));
    shape.block = dim3(kInt8BlockThreads);
    shape.dependent = kDependent;
    void* pointers[] = {&p};
    return launch_kernel(is_weight ? weight() : token(), shape, pointers, l, message, size);
  }
};

template <class X>
struct Int8BlockKernels {
  using Usual = Int8BlockKernel<X, kInt8Block>;
  using Small = Int8BlockKernel<X, kSmallInt8Block>;
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    if (scaledMMStatus_t s = Usual::prepare(device, message, size)) return s;
    return Small::prepare(device, message, size);
  }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    if (l.N > kMostRowElements || int8_blocks(l) > INT32_MAX) {
      snprintf(message, size, "x: expected rows of at most %d elements and at most %d blocks, got %lld and %lld", kMostRowElements, INT32_MAX,
               static_cast<long long>(l.N), static_cast<long long>(int8_blocks(l)));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    return int8_block_is_small(l) ? Small::launch(l, message, size) : Usual::launch(l, message, size);
  }
};

template <class X>
constexpr Kernel int8_block_entry(const char* name, int32_t dtype) {
  return {name, dtype, 0, &Int8BlockKernels<X>::prepare, &Int8BlockKernels<X>::launch};
}

} // namespace scaled_mm::rowwise
