// The host side of the row-wise kernels: one Kernel of the registry for a source and a dtype of x, whatever the length of a row.
#pragma once

#include "int8/launch.cuh"
#include "rowwise/kernel.cuh"
#include "rowwise/sources.cuh"

namespace scaled_mm::rowwise {

// Whether the kernels wait for the preceding one themselves: their machine code is for compute capability 9.0 or newer.
#if defined(__CUDA_ARCH_LIST__) && __CUDA_ARCH_LIST__ >= 900
constexpr bool kDependent = true;
#else
constexpr bool kDependent = false;
#endif

static_assert(8 * kLanes * kChunk <= INT32_MAX - kMostRowElements, "an index past the end of a row would overflow");

template <class T>
bool in_vectors(const void* data, int64_t rows, int64_t K, int64_t stride_row, int64_t stride_k) {
  constexpr int64_t kBytes = sizeof(T) * kChunk > 16 ? 16 : sizeof(T) * kChunk;
  return reinterpret_cast<uintptr_t>(data) % kBytes == 0 && (stride_k == 1 || K <= 1) && (rows <= 1 || stride_row * int64_t(sizeof(T)) % kBytes == 0);
}

template <class T>
Matrix matrix(const void* data, const RowwiseStrides& strides, int64_t rows, int64_t K) {
  return {const_cast<void*>(data), strides.row, strides.k, in_vectors<T>(data, rows, K, strides.row, strides.k)};
}

inline Vector vector(const void* data, int64_t stride, int32_t dtype, int64_t K) {
  const bool vectors = dtype == SCALED_MM_DTYPE_FLOAT32 ? in_vectors<float>(data, 1, K, 0, stride) : in_vectors<__half>(data, 1, K, 0, stride);
  return {data, stride, dtype, vectors && stride == 1};
}

template <class X>
Rows rows_of(const GemmLaunch& l) {
  const RowwiseOperands& o = *l.rowwise;
  const RowwisePointers& at = l.rowwise_pointers;
  const bool gated = o.function >= SCALED_MM_SILU_AND_MUL;
  Rows p = {};
  p.rows = l.M;
  p.K = int(l.N);
  p.x = matrix<X>(l.a, o.x, l.M, l.N);
  const void* second = gated ? static_cast<const char*>(l.a) + l.N * o.x.k * int64_t(sizeof(X)) : at.residual;
  p.residual = matrix<X>(second, gated ? o.x : o.residual, l.M, l.N);
  p.total = matrix<X>(at.total, o.total, l.M, l.N);
  p.out = o.output == SCALED_MM_ROWWISE_CAST ? matrix<X>(l.out, o.out, l.M, l.N) : matrix<int8_t>(l.out, o.out, l.M, l.N);
  p.vector = vector(at.vector, o.vector_stride, o.vector_dtype, l.N);
  p.offset = vector(at.offset, o.offset_stride, o.vector_dtype, l.N);
  p.epsilon = o.epsilon;
  p.function = o.function;
  p.output = o.output;
  p.scale = static_cast<const float*>(at.scale);
  p.scale_stride = o.scale_stride;
  p.zero_point = at.zero_point;
  p.zero_point_stride = o.zero_point_stride;
  p.zero_point_dtype = o.zero_point_dtype;
  p.out_scale = static_cast<float*>(const_cast<void*>(at.out_scale));
  p.out_zero_point = static_cast<int32_t*>(const_cast<void*>(at.out_zero_point));
  p.out_row_sums = static_cast<int32_t*>(const_cast<void*>(at.out_row_sums));
  return p;
}

// The kernels of a source and a dtype of x, by the length of a row.
template <class X, template <class> class Source, int kThreads, int kHeld>
struct Length {
  static constexpr int64_t kMost = kHeld > 0 ? int64_t(kThreads) * kHeld* kChunk : kMostRowElements; // elements of a row

  static DeviceKernel& device_kernel() {
    static DeviceKernel instance(&kernel<X, Source<X>, kThreads, kHeld>);
    return instance;
  }
  static scaledMMStatus_t launch(Rows& p, const GemmLaunch& l, char* message, size_t size) {
    constexpr int kRows = Group<kThreads>::kRows;
    const int64_t blocks = (p.rows + kRows - 1) / kRows;
    if (blocks > INT32_MAX) {
      snprintf(message, size, "x: expected at most %lld rows, got %lld", static_cast<long long>(INT32_MAX) * kRows, static_cast<long long>(p.rows));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    LaunchShape shape;
    shape.grid = dim3(unsigned(blocks));
    shape.block = dim3(Group<kThreads>::kBlock);
    shape.dependent = kDependent;
    void* pointers[] = {&p};
    return launch_kernel(device_kernel(), shape, pointers, l, message, size);
  }
};

template <class X, template <class> class Source, class... Lengths>
struct Lengthwise {
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    scaledMMStatus_t status = SCALED_MM_STATUS_SUCCESS;
    (void)(((status = prepare_kernel(Lengths::device_kernel(), 0, device, message, size)) == SCALED_MM_STATUS_SUCCESS) && ...);
    return status;
  }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    if (l.N > kMostRowElements) {
      snprintf(message, size, "x: expected rows of at most %d elements, got %lld", kMostRowElements, static_cast<long long>(l.N));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    Rows p = rows_of<X>(l);
    scaledMMStatus_t status = SCALED_MM_STATUS_SUCCESS;
    (void)((p.K <= Lengths::kMost && (status = Lengths::launch(p, l, message, size), true)) || ...); // the first that is long enough
    return status;
  }
};

template <class X, template <class> class Source>
using Kernels = Lengthwise<X, Source, Length<X, Source, 32, 4>, Length<X, Source, 128, 4>, Length<X, Source, 256, 4>, Length<X, Source, 256, 8>,
                           Length<X, Source, 256, 0>>;

template <class X, template <class> class Source>
constexpr Kernel entry(const char* name, int32_t dtype) {
  return {name, dtype, 0, &Kernels<X, Source>::prepare, &Kernels<X, Source>::launch};
}

} // namespace scaled_mm::rowwise
