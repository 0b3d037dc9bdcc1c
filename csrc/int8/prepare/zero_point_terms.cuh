// Sums over K that the epilogue needs to take zero points out of an accumulator. Runs before the product, on its stream.
#pragma once

#include "int8/launch.cuh"

namespace scaled_mm::zero_point_terms {

struct Side {
  const int8_t* data; // rows of K: a's are m, b's are n
  int64_t rows, stride_row, stride_k, stride_batch;
  const void* zero_point; // of this side, or nullptr
  int64_t zero_point_stride, zero_point_stride_batch;
  const int32_t* sums; // of the rows, where the caller knows them, or nullptr
  int64_t sums_stride, sums_stride_batch;
  int32_t zero_point_dtype;
  bool sum_wanted; // the other side has zero points
  bool is_b;
  int2* terms; // of all products, one after the other
};

struct Problem {
  Side a, b;
  int64_t K;
  int blocks_a, blocks_per_a, blocks_per_b; // all for a, then for one product of each side
};

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = 32;

__device__ inline int32_t zero_point_at(const Side& s, int batch, int64_t row) {
  if (s.zero_point == nullptr) return 0;
  const int64_t i = batch * s.zero_point_stride_batch + row * s.zero_point_stride;
  return s.zero_point_dtype == SCALED_MM_DTYPE_INT8 ? static_cast<const int8_t*>(s.zero_point)[i] : static_cast<const int32_t*>(s.zero_point)[i];
}

__device__ inline void write_terms(const Side& s, int batch, int64_t row, uint32_t sum, int64_t K) {
  const int32_t zero_point = zero_point_at(s, batch, row);
  // a: {za, rowsum}; b: {colsum - K*zb, zb}. Modulo 2^32, as the epilogue's arithmetic.
  s.terms[batch * s.rows + row] =
      s.is_b ? make_int2(int32_t(sum - uint32_t(K) * uint32_t(zero_point)), zero_point) : make_int2(zero_point, int32_t(sum));
}

__global__ void __launch_bounds__(kThreads) kernel(const __grid_constant__ Problem p) {
  const bool is_b = int(blockIdx.x) >= p.blocks_a;
  const Side& s = is_b ? p.b : p.a;
  const int block = int(blockIdx.x) - (is_b ? p.blocks_a : 0), blocks = is_b ? p.blocks_per_b : p.blocks_per_a;
  const int batch = block / blocks;
  const int64_t first = int64_t(block % blocks) * kRowsPerBlock;
  constexpr int kWarps = kThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (!s.sum_wanted || s.sums != nullptr || p.K == 0) {
    const int64_t row = first + lane;
    if (warp != 0 || row >= s.rows) return;
    const bool known = s.sum_wanted && s.sums != nullptr && p.K > 0;
    write_terms(s, batch, row, known ? uint32_t(s.sums[batch * s.sums_stride_batch + row * s.sums_stride]) : 0, p.K);
    return;
  }
  const int8_t* const rows = s.data + batch * s.stride_batch;
  if (s.stride_k == 1) { // a warp a row: its lanes read along K
    for (int64_t row = first + warp; row < s.rows && row < first + kRowsPerBlock; row += kWarps) {
      const int8_t* data = rows + row * s.stride_row;
      int32_t sum = 0;
      const int64_t vectors = reinterpret_cast<uintptr_t>(data) % 16 == 0 ? p.K / 16 : 0;
      for (int64_t v = lane; v < vectors; v += 32) {
        const int4 x = reinterpret_cast<const int4*>(data)[v];
        sum = __dp4a(x.x, 0x01010101, sum);
        sum = __dp4a(x.y, 0x01010101, sum);
        sum = __dp4a(x.z, 0x01010101, sum);
        sum = __dp4a(x.w, 0x01010101, sum);
      }
      for (int64_t k = vectors * 16 + lane; k < p.K; k += 32) sum += data[k];
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
      if (lane == 0) write_terms(s, batch, row, uint32_t(sum), p.K);
    }
    return;
  }
  // A lane a row: neighbouring lanes read neighbouring rows, the warps share K.
  __shared__ int32_t partial[kWarps][32];
  const int64_t row = first + lane;
  int32_t sum = 0;
  if (row < s.rows) {
    const int8_t* data = rows + row * s.stride_row;
    for (int64_t k = warp; k < p.K; k += kWarps) sum += data[k * s.stride_k];
  }
  partial[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && row < s.rows) {
    for (int w = 1; w < kWarps; ++w) sum += partial[w][lane];
    write_terms(s, batch, row, uint32_t(sum), p.K);
  }
}

inline DeviceKernel& device_kernel() {
  static DeviceKernel one(&kernel);
  return one;
}

inline scaledMMStatus_t prepare(int32_t device, char* message, size_t size) { return prepare_kernel(device_kernel(), 0, device, message, size); }

inline scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
  const BatchStrides& batch = l.batch_strides;
  const int64_t weights = l.groups ? l.groups->experts : l.batch; // of b
  Problem p;
  p.a = {static_cast<const int8_t*>(l.a),
         l.M,
         l.a_stride_m,
         l.a_stride_k,
         batch.a,
         l.a_zero_point,
         l.a_zero_point_stride,
         batch.a_zero_point,
         l.a_row_sums,
         l.a_row_sums_stride,
         batch.a_row_sums,
         l.a_zero_point_dtype,
         l.b_zero_point != nullptr,
         false,
         reinterpret_cast<int2*>(l.row_terms)};
  p.b = {static_cast<const int8_t*>(l.b),
         l.N,
         l.b_stride_n,
         l.b_stride_k,
         l.groups ? l.groups->b_stride : batch.b,
         l.b_zero_point,
         l.b_zero_point_stride,
         batch.b_zero_point,
         l.b_column_sums,
         l.b_column_sums_stride,
         batch.b_column_sums,
         l.b_zero_point_dtype,
         l.a_zero_point != nullptr,
         true,
         reinterpret_cast<int2*>(l.col_terms)};
  p.K = l.K;
  p.blocks_per_a = int((l.M + kRowsPerBlock - 1) / kRowsPerBlock);
  p.blocks_per_b = int((l.N + kRowsPerBlock - 1) / kRowsPerBlock);
  // Terms that all products share are written once.
  const int64_t blocks_a = p.blocks_per_a * (l.row_terms_batch_stride ? l.batch : 1);
  const int64_t blocks = blocks_a + p.blocks_per_b * (l.col_terms_batch_stride ? weights : 1);
  if (blocks > INT32_MAX) {
    snprintf(message, size, "a, b: expected at most %lld rows and columns with zero points in all products, got M = %lld, N = %lld, %lld %s",
             static_cast<long long>(INT32_MAX) * kRowsPerBlock, static_cast<long long>(l.M), static_cast<long long>(l.N),
             static_cast<long long>(weights), l.groups ? "experts" : "products");
    return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
  }
  p.blocks_a = int(blocks_a);
  LaunchShape shape;
  shape.grid = dim3(unsigned(blocks));
  shape.block = dim3(kThreads);
  void* pointers[] = {&p};
  return launch_kernel(device_kernel(), shape, pointers, l, message, size);
}

constexpr Kernel entry() { return {kZeroPointTermsRow, -1, 0, &prepare, &launch}; }

} // namespace scaled_mm::zero_point_terms
