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

inline scaledMMStatus_t too_many_blocks(const char* name, const char* what, int64_t got, char* message, size_t size) {
  snprintf(message, size, "%s: expected at most %d %s, got %lld", name, INT32_MAX, what, static_cast<long long>(got));
  return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
}

inline scaledMMStatus_t launch_grid(DeviceKernel& kernel, int64_t blocks, int threads, void* params, const GemmLaunch& l, char* message,
                                    size_t size) {
  LaunchShape shape;
  shape.grid = dim3(unsigned(blocks));
  shape.block = dim3(unsigned(threads));
  shape.dependent = kDependent;
  void* pointers[] = {params};
  return launch_kernel(kernel, shape, pointers, l, message, size);
}

template <class T>
bool in_vectors(const void* data, int64_t rows, int64_t K, int64_t stride_row, int64_t stride_k) {
  constexpr int64_t kBytes = sizeof(T) * kChunk > 16 ? 16 : sizeof(T) * kChunk;
  return reinterpret_cast<uintptr_t>(data) % kBytes == 0 && (stride_k == 1 || K <= 1) && (rows <= 1 || stride_row * int64_t(sizeof(T)) % kBytes == 0);
}

template <class T>
Matrix matrix(const void* data, const RowwiseStrides& strides, int64_t rows, int64_t K) {
  const T* const first = static_cast<const T*>(data);
  const bool empty = first == nullptr || rows == 0 || K == 0;
  return {const_cast<void*>(data), strides.row, strides.k, in_vectors<T>(data, rows, K, strides.row, strides.k),
          empty ? nullptr : first + (rows - 1) * strides.row + (K - 1) * strides.k + 1};
}

inline Vector vector(const void* data, int64_t stride, int32_t dtype, int64_t K) {
  const bool vectors = dtype == SCALED_MM_DTYPE_FLOAT32 ? in_vectors<float>(data, 1, K, 0, stride) : in_vectors<__half>(data, 1, K, 0, stride);
  return {data, stride, dtype, vectors && stride == 1};
}

// Static quantization by one scale does not depend on rows. If the rows of x and of out are contiguous, they are treated as one long row,
// whose chunks are aligned even if those of the rows are not.
template <class X>
void join_rows(Rows& p) {
  const int64_t elements = p.rows * p.K;
  const auto side_by_side = [&](const Matrix& m) { return (m.stride_k == 1 || p.K == 1) && m.stride_row == p.K; };
  const bool one_scale = p.output == SCALED_MM_ROWWISE_STATIC && p.scale_stride == 0 && p.zero_point_stride == 0;
  if (p.function != SCALED_MM_QUANTIZE_INT8 || !one_scale || p.vector.data || p.out_row_sums) return;
  if (p.rows <= 1 || elements > kMostRowElements || !side_by_side(p.x) || !side_by_side(p.out)) return;
  if (elements % kChunk != 0 || !in_vectors<X>(p.x.data, 1, elements, 0, 1) || !in_vectors<int8_t>(p.out.data, 1, elements, 0, 1)) return;
  p.rows = 1;
  p.K = int(elements);
  for (Matrix* m : {&p.x, &p.out}) *m = {m->data, elements, 1, true, m->end};
}

// Where the number of the rows that belong to experts is, or nullptr.
inline const int32_t* rows_end_of(const GemmLaunch& l) {
  const auto* ends = static_cast<const int32_t*>(l.rowwise_pointers.expert_offsets);
  return ends == nullptr ? nullptr : ends + l.rowwise->num_experts - 1;
}

// The thread blocks to launch for rows of which some may belong to no expert: those that run at a time, each for several rows. With one for each row,
// starting those of absent rows would take most of the time.
inline int64_t blocks_of_rows(int64_t blocks, int threads, const int32_t* rows_end, const GemmLaunch& l) {
  const int64_t resident = int64_t(l.multiprocessors) * (2048 / threads);
  return rows_end != nullptr && blocks > resident ? resident : blocks;
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
  p.rows_end = rows_end_of(l);
  join_rows<X>(p);
  return p;
}

inline bool in_chunks(const Vector& v) { return v.data == nullptr || v.vectors; }
inline bool in_chunks(const Matrix& m) { return m.data == nullptr || m.vectors; }

// Whether every operand lies in whole and aligned chunks.
inline bool in_chunks(const Rows& p) {
  return p.K % kChunk == 0 && in_chunks(p.x) && in_chunks(p.residual) && in_chunks(p.total) && in_chunks(p.out) && in_chunks(p.vector) &&
         in_chunks(p.offset);
}

// Whether elements need something of their whole row, for sources without a reduction.
inline bool needs_whole_rows(const Rows& p) {
  return p.output == SCALED_MM_ROWWISE_TOKEN || p.output == SCALED_MM_ROWWISE_TOKEN_ASYMMETRIC || p.out_row_sums != nullptr;
}

// A kernel for rows of at most kMostElements elements, by kThreads threads each; kSpan > 0: by one thread block for each span.
template <class KernelOf, int kThreads, int64_t kMostElements, int64_t kSpan = 0>
struct Variant {
  static bool serves(const Rows& p, int) { return p.K <= kMostElements; }

  static DeviceKernel& device_kernel() {
    static DeviceKernel instance(KernelOf::pointer());
    return instance;
  }
  static scaledMMStatus_t launch(Rows& p, const GemmLaunch& l, char* message, size_t size) {
    constexpr int kRows = Group<kThreads>::kRows;
    const int64_t all = (p.rows + kRows - 1) / kRows, blocks = blocks_of_rows(all, Group<kThreads>::kBlock, p.rows_end, l);
    if (all > INT32_MAX) {
      snprintf(message, size, "x: expected at most %lld rows, got %lld", static_cast<long long>(INT32_MAX) * kRows, static_cast<long long>(p.rows));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    p.spans = 1;
    if constexpr (kSpan > 0) { // no more than the grid holds
      const int64_t spans = (p.K + kSpan - 1) / kSpan, most = INT32_MAX / (blocks > 0 ? blocks : 1);
      p.spans = int(spans < 1 ? 1 : spans < most ? spans : most);
    }
    LaunchShape shape;
    shape.grid = dim3(unsigned(blocks * p.spans));
    shape.block = dim3(Group<kThreads>::kBlock);
    shape.dependent = kDependent;
    void* pointers[] = {&p};
    return launch_kernel(device_kernel(), shape, pointers, l, message, size);
  }
};

template <class Source, int kThreads, int kHeld, bool kVectors, int kBlocks = 1>
struct RowKernel {
  static auto pointer() { return &row_kernel<Source, kThreads, kHeld, kVectors, kBlocks>; }
  static constexpr int64_t kMost = kHeld > 0 ? int64_t(kThreads) * kHeld* kChunk : kMostRowElements;
  static int64_t units(const Rows&) { return 1; } // rows
  using Launch = Variant<RowKernel, kThreads, kMost>;
};

template <class Source, int kThreads, int kCount, bool kVectors, int kBlocks = 1>
struct ElementKernel {
  static auto pointer() { return &element_kernel<Source, kThreads, kCount, kVectors, kBlocks>; }
  static constexpr int64_t kSpan = int64_t(kThreads) * kCount * kChunk;
  static int64_t units(const Rows& p) { return p.K; } // elements
  using Launch = Variant<ElementKernel, kThreads, kThreads == 32 ? kSpan : kMostRowElements, kThreads == 32 ? 0 : kSpan>;
};

// Kernels by the longest row of each, in order.
template <class... Kernels>
struct ByLength {
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    scaledMMStatus_t status = SCALED_MM_STATUS_SUCCESS;
    (void)(((status = prepare_kernel(Kernels::Launch::device_kernel(), 0, device, message, size)) == SCALED_MM_STATUS_SUCCESS) && ...);
    return status;
  }
  static scaledMMStatus_t launch(Rows& p, const GemmLaunch& l, char* message, size_t size) {
    scaledMMStatus_t status = SCALED_MM_STATUS_SUCCESS;
    (void)((Kernels::Launch::serves(p, l.multiprocessors) && (status = Kernels::Launch::launch(p, l, message, size), true)) || ...);
    return status;
  }
};

// A kernel for rows of at most kMostElements elements, although it could serve longer ones.
template <int64_t kMostElements, class KernelOf>
struct UpTo {
  struct Launch : KernelOf::Launch {
    static bool serves(const Rows& p, int) { return p.K <= kMostElements; }
  };
};

// A kernel for rows whose length is a multiple of what one of its thread blocks has.
template <class KernelOf>
struct WholeSpans {
  struct Launch : KernelOf::Launch {
    static bool serves(const Rows& p, int multiprocessors) { return p.K % KernelOf::kSpan == 0 && KernelOf::Launch::serves(p, multiprocessors); }
  };
};

// A kernel that is faster only while the rows are too few to keep all SMs busy.
template <class KernelOf, int kMostPerMultiprocessor>
struct Few {
  struct Launch : KernelOf::Launch {
    static bool serves(const Rows& p, int multiprocessors) {
      return KernelOf::Launch::serves(p, multiprocessors) && p.rows * KernelOf::units(p) <= int64_t(kMostPerMultiprocessor) * multiprocessors;
    }
  };
};

// The kernels of a source. The first that serves is launched. Most choices were measured on an H200 (docs/decisions/0018-row-wise-arithmetic.md).
// kFew: of what models rarely run, to save the time of compiling: float32 rows, a vector of factors, chunks that are not whole or not aligned.
template <class Source, bool kVectors, bool kFew>
struct KernelsOf {
  static constexpr int kThreads = Source::kReduces ? 256 : 128;
  using Rowwise =
      ByLength<RowKernel<Source, 32, 4, kVectors>, RowKernel<Source, kThreads, 512 / kThreads, kVectors>, RowKernel<Source, 256, 0, kVectors>>;
  using Elementwise = ByLength<ElementKernel<Source, 32, 4, kVectors>, ElementKernel<Source, 256, 2, kVectors>>;
};

template <class X>
struct KernelsOf<PlainElements<X>, true, false> {
  using Source = PlainElements<X>;
  using Rowwise = ByLength<RowKernel<Source, 32, 4, true, 8>, RowKernel<Source, 128, 2, true, 12>, RowKernel<Source, 128, 3, true, 10>,
                           Few<RowKernel<Source, 256, 2, true, 6>, 8>, RowKernel<Source, 128, 4, true, 10>, RowKernel<Source, 128, 5, true, 8>,
                           RowKernel<Source, 256, 4, true, 5>, RowKernel<Source, 256, 6, true, 4>, RowKernel<Source, 256, 8, true, 3>,
                           RowKernel<Source, 256, 0, true, 4>>;
  using Elementwise = ByLength<ElementKernel<Source, 32, 4, true>, ElementKernel<Source, 128, 2, true, std::is_same_v<X, __half> ? 10 : 12>>;
};

template <class X>
struct KernelsOf<Norm<X>, true, false> {
  using Source = Norm<X>;
  using Rowwise = ByLength<RowKernel<Source, 32, 4, true, 6>, RowKernel<Source, 128, 2, true, 10>, RowKernel<Source, 256, 2, true, 5>,
                           Few<RowKernel<Source, 512, 2, true, 2>, 2>, RowKernel<Source, 256, 3, true, 4>, RowKernel<Source, 256, 4, true, 3>,
                           Few<RowKernel<Source, 512, 4, true>, 1>, RowKernel<Source, 512, 3, true, 2>, Few<RowKernel<Source, 512, 4, true>, 6>,
                           RowKernel<Source, 256, 8, true, kDependent ? 2 : 1>, RowKernel<Source, 256, 0, true>>;
};

template <class X>
struct KernelsOf<Gated<X>, true, false> {
  using Source = Gated<X>;
  using Rowwise = ByLength<RowKernel<Source, 32, 4, true, 5>, RowKernel<Source, 128, 2, true, 8>, RowKernel<Source, 128, 4, true, 4>,
                           RowKernel<Source, 256, 3, true, 3>, RowKernel<Source, 256, 4, true, 2>, Few<RowKernel<Source, 512, 4, true>, 1>,
                           RowKernel<Source, 256, 7, true, 2>, RowKernel<Source, 512, 4, true>, RowKernel<Source, 256, 0, true>>;
  using Elementwise = ByLength<ElementKernel<Source, 32, 4, true>, Few<ElementKernel<Source, 128, 1, true, 12>, 16384>,
                               WholeSpans<ElementKernel<Source, 160, 2, true, 8>>, UpTo<3072, ElementKernel<Source, 128, 3, true, 8>>,
                               ElementKernel<Source, 128, 2, true, std::is_same_v<X, __half> ? 8 : 10>>;
};

template <class Source>
struct Kernels {
  using X = typename Source::Element;
  static constexpr bool kIsRare = Source::kIsRare || std::is_same_v<X, float>;
  using Aligned = KernelsOf<Source, true, kIsRare>;
  using Any = KernelsOf<Source, false, true>;

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    scaledMMStatus_t status = prepare_as<Aligned>(device, message, size);
    return status == SCALED_MM_STATUS_SUCCESS ? prepare_as<Any>(device, message, size) : status;
  }
  static scaledMMStatus_t launch(Rows& p, const GemmLaunch& l, char* message, size_t size) {
    return in_chunks(p) ? launch_as<Aligned>(p, l, message, size) : launch_as<Any>(p, l, message, size);
  }

private:
  template <class Of>
  static scaledMMStatus_t prepare_as(int32_t device, char* message, size_t size) {
    scaledMMStatus_t status = Of::Rowwise::prepare(device, message, size);
    if constexpr (!Source::kReduces) {
      if (status == SCALED_MM_STATUS_SUCCESS) status = Of::Elementwise::prepare(device, message, size);
    }
    return status;
  }
  template <class Of>
  static scaledMMStatus_t launch_as(Rows& p, const GemmLaunch& l, char* message, size_t size) {
    if constexpr (!Source::kReduces) {
      if (!needs_whole_rows(p)) return Of::Elementwise::launch(p, l, message, size);
    }
    return Of::Rowwise::launch(p, l, message, size);
  }
};

// Kernels of one or two sources, the second for calls with a vector.
template <class Source, class WithVector = Source>
struct Operator {
  static constexpr bool kTwo = !std::is_same_v<Source, WithVector>;

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    scaledMMStatus_t status = Kernels<Source>::prepare(device, message, size);
    if (kTwo && status == SCALED_MM_STATUS_SUCCESS) status = Kernels<WithVector>::prepare(device, message, size);
    return status;
  }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    if (l.N > kMostRowElements) {
      snprintf(message, size, "x: expected rows of at most %d elements, got %lld", kMostRowElements, static_cast<long long>(l.N));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    Rows p = rows_of<typename Source::Element>(l);
    return kTwo && p.vector.data != nullptr ? Kernels<WithVector>::launch(p, l, message, size) : Kernels<Source>::launch(p, l, message, size);
  }
};

template <class... Sources>
constexpr Kernel entry(const char* name, int32_t dtype) {
  return {name, dtype, 0, &Operator<Sources...>::prepare, &Operator<Sources...>::launch};
}

} // namespace scaled_mm::rowwise
