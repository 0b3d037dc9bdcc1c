// Kernels that keep the contract of core/kernel_abi.h with plain loops over host memory, for the fake driver's device: what
// a real kernel is handed (strides, broadcasts, zero-point terms, stream) shows in the output. A row that asks for aligned
// operands fails when it gets others. Entries are appended by the tests, one macro a row and dtype.
#include <cstdio>
#include <cstring>

#include "core/kernel_abi.h"
#include "host_gguf.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void* host_kernels_last_stream = nullptr;
EXPORT bool host_kernels_last_constant_b = false;
EXPORT int host_kernels_launches = 0;               // of this library
EXPORT bool host_kernels_last_cache_filled = false; // what another launch left in the cache

namespace {

using scaled_mm::BatchStrides;
using scaled_mm::GemmLaunch;
using scaled_mm::Kernel;

float bf16_to_float(const void* p) {
  uint16_t half;
  memcpy(&half, p, 2);
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

uint16_t to_bf16(float value) { // to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

int32_t zero_point(const void* data, int64_t index, int32_t dtype) {
  if (data == nullptr) return 0;
  return dtype == SCALED_MM_DTYPE_INT8 ? static_cast<const int8_t*>(data)[index] : static_cast<const int32_t*>(data)[index];
}

int8_t a_at(const GemmLaunch& l, int64_t i, int64_t m, int64_t k) {
  return static_cast<const int8_t*>(l.a)[i * l.batch_strides.a + m * l.a_stride_m + k * l.a_stride_k];
}
int8_t b_at(const GemmLaunch& l, int64_t i, int64_t k, int64_t n) {
  return static_cast<const int8_t*>(l.b)[i * l.batch_strides.b + k * l.b_stride_k + n * l.b_stride_n];
}

// Terms that the whole batch shares are written for its first product only. Sums that are given are used, right or wrong.
scaledMMStatus_t zero_point_terms(const GemmLaunch& l, char*, size_t) {
  const BatchStrides& s = l.batch_strides;
  for (int64_t i = 0; i < (l.row_terms_batch_stride ? l.batch : 1); ++i) {
    for (int64_t m = 0; m < l.M; ++m) {
      uint32_t sum = 0;
      if (l.a_row_sums)
        sum = uint32_t(l.a_row_sums[i * s.a_row_sums + m * l.a_row_sums_stride]);
      else
        for (int64_t k = 0; k < l.K; ++k) sum += uint32_t(int32_t(a_at(l, i, m, k)));
      int32_t* terms = l.row_terms + 2 * (i * l.row_terms_batch_stride + m);
      terms[0] = zero_point(l.a_zero_point, i * s.a_zero_point + m * l.a_zero_point_stride, l.a_zero_point_dtype);
      terms[1] = int32_t(sum);
    }
  }
  for (int64_t i = 0; i < (!l.col_terms_batch_stride ? 1 : l.groups ? l.groups->experts : l.batch); ++i) {
    GemmLaunch of_b = l;
    if (l.groups) of_b.batch_strides.b = l.groups->b_stride;
    for (int64_t n = 0; n < l.N; ++n) {
      uint32_t sum = 0;
      if (l.b_column_sums)
        sum = uint32_t(l.b_column_sums[i * s.b_column_sums + n * l.b_column_sums_stride]);
      else
        for (int64_t k = 0; k < l.K; ++k) sum += uint32_t(int32_t(b_at(of_b, i, k, n)));
      const int32_t zb = zero_point(l.b_zero_point, i * s.b_zero_point + n * l.b_zero_point_stride, l.b_zero_point_dtype);
      int32_t* terms = l.col_terms + 2 * (i * l.col_terms_batch_stride + n);
      terms[0] = int32_t(sum - uint32_t(l.K) * uint32_t(zb));
      terms[1] = zb;
    }
  }
  return SCALED_MM_STATUS_SUCCESS;
}

// Which operands a row reads or writes through tensor maps: none, a and b, or out too.
enum class Maps { kNone, kInputs, kAll };

// What a tensor map asks for; nullptr when it would take these operands.
const char* tensor_map_refuses(const GemmLaunch& l, Maps maps, int64_t out_bytes) {
  auto off = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; };
  const BatchStrides& s = l.batch_strides;
  if (maps == Maps::kNone) return nullptr;
  if (maps == Maps::kAll) {
    if (off(l.out)) return "the data pointer of out is not aligned";
    if (l.M > 1 && l.out_stride_m * out_bytes % 16) return "a row stride of out";
    if (s.out * out_bytes % 16) return "a batch stride of out";
  }
  if (l.K == 0) return "K is 0";
  if (off(l.a) || off(l.b)) return "a data pointer is not aligned";
  if (l.K > 1 && (l.a_stride_k != 1 || l.b_stride_k != 1)) return "K is not contiguous";
  if (l.N > 1 && l.out_stride_n != 1) return "out is not contiguous along N";
  if (l.M > 1 && (l.a_stride_m % 16 || l.a_stride_m < l.K)) return "a row stride";
  if (l.N > 1 && (l.b_stride_n % 16 || l.b_stride_n < l.K)) return "a column stride of b";
  if (s.a % 16 || s.b % 16) return "a batch stride";
  if (l.batch > 65535) return "the batch";
  return nullptr;
}

template <int kDtype>
void store(void* out, int64_t index, int32_t acc, float value) {
  if (kDtype == SCALED_MM_DTYPE_INT32)
    static_cast<int32_t*>(out)[index] = acc;
  else if (kDtype == SCALED_MM_DTYPE_FLOAT32)
    static_cast<float*>(out)[index] = value;
  else
    static_cast<uint16_t*>(out)[index] = to_bf16(value);
}

// Element [m, n] of product i.
template <int kDtype>
void compute(const GemmLaunch& l, int64_t i, int64_t m, int64_t n) {
  const BatchStrides& s = l.batch_strides;
  uint32_t acc = 0;
  for (int64_t k = 0; k < l.K; ++k) acc += uint32_t(int32_t(a_at(l, i, m, k)) * int32_t(b_at(l, i, k, n)));
  if (l.row_terms) {
    const int32_t* row = l.row_terms + 2 * (i * l.row_terms_batch_stride + m);
    const int32_t* col = l.col_terms + 2 * (i * l.col_terms_batch_stride + n);
    acc -= uint32_t(row[0]) * uint32_t(col[0]) + uint32_t(col[1]) * uint32_t(row[1]);
  }
  float value = 0;
  if (l.a_scale) {
    value = float(int32_t(acc));
    value = value * l.b_scale[i * s.b_scale + n * l.b_scale_stride];
    value = value * l.a_scale[i * s.a_scale + m * l.a_scale_stride];
    if (l.bias) {
      const int64_t at = i * s.bias + n * l.bias_stride;
      const bool wide = l.bias_dtype == SCALED_MM_DTYPE_FLOAT32;
      value = value + (wide ? static_cast<const float*>(l.bias)[at] : bf16_to_float(static_cast<const uint16_t*>(l.bias) + at));
    }
  }
  store<kDtype>(l.out, i * s.out + m * l.out_stride_m + n * l.out_stride_n, int32_t(acc), value);
}

template <int kDtype, Maps kMaps>
scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
  host_kernels_last_stream = l.stream;
  host_kernels_last_constant_b = l.constant_b;
  const char* why = tensor_map_refuses(l, kMaps, kDtype == SCALED_MM_DTYPE_BFLOAT16 ? 2 : 4);
  if (why) {
    snprintf(message, size, "handed to a row that cannot take it: %s", why);
    return SCALED_MM_STATUS_CUDA_ERROR;
  }
  ++host_kernels_launches;
  host_kernels_last_cache_filled = l.cache && l.cache->filled;
  if (l.cache) memcpy(l.cache->bytes, &l.out, sizeof(l.out));
  for (int64_t i = 0; i < l.batch; ++i) {
    for (int64_t m = 0; m < l.M; ++m) {
      for (int64_t n = 0; n < l.N; ++n) compute<kDtype>(l, i, m, n);
    }
  }
  if (l.cache && memcmp(l.cache->bytes, &l.out, sizeof(l.out))) {
    snprintf(message, size, "another launch had the same cache at the same time");
    return SCALED_MM_STATUS_INTERNAL_ERROR;
  }
  if (l.cache) l.cache->filled = true;
  return SCALED_MM_STATUS_SUCCESS;
}

// call(one) for each expert's product, with the offsets clamped as the interface says; rows past the last are cleared.
template <int kDtype, class Call>
scaledMMStatus_t each_expert(const GemmLaunch& l, const Call& call) {
  const scaled_mm::Groups& groups = *l.groups;
  constexpr int64_t kOutBytes = kDtype == SCALED_MM_DTYPE_BFLOAT16 ? 2 : 4;
  const auto out_at = [&](int64_t m) { return static_cast<char*>(l.out) + m * l.out_stride_m * kOutBytes; };
  int64_t begin = 0;
  for (int64_t e = 0; e < groups.experts; ++e) {
    const int64_t offset = l.expert_offsets[e], end = offset > l.M ? l.M : offset;
    if (end <= begin) continue;
    GemmLaunch one = l;
    one.M = end - begin;
    one.a = static_cast<const int8_t*>(l.a) + begin * l.a_stride_m;
    one.b = static_cast<const int8_t*>(l.b) + e * groups.b_stride;
    one.out = out_at(begin);
    if (l.a_scale) one.a_scale += begin * l.a_scale_stride;
    if (l.b_scale) one.b_scale += e * groups.b_scale_stride;
    if (l.row_terms) one.row_terms += 2 * begin;
    if (l.row_terms) one.col_terms += 2 * e * l.col_terms_batch_stride;
    if (l.bias) one.bias = static_cast<const char*>(l.bias) + e * groups.bias_stride * (l.bias_dtype == SCALED_MM_DTYPE_FLOAT32 ? 4 : 2);
    if (scaledMMStatus_t status = call(one)) return status;
    begin = end;
  }
  for (; begin < l.M; ++begin) {
    for (int64_t n = 0; n < l.N; ++n) memset(out_at(begin) + n * l.out_stride_n * kOutBytes, 0, kOutBytes);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

// Expert by expert. The workspace is spoilt.
template <int kDtype, Maps kMaps>
scaledMMStatus_t grouped_launch(const GemmLaunch& l, char* message, size_t size) {
  const scaled_mm::Groups* groups = l.groups;
  if (groups == nullptr || (kMaps != Maps::kNone && (l.workspace == nullptr || groups->b_stride % 16))) {
    snprintf(message, size, "no groups, no workspace, or a stride of b that a tensor map cannot take");
    return SCALED_MM_STATUS_CUDA_ERROR;
  }
  if (kMaps != Maps::kNone) memset(l.workspace, 0xff, size_t(64 * groups->experts + l.multiprocessors));
  return each_expert<kDtype>(l, [&](const GemmLaunch& one) { return launch<kDtype, kMaps>(one, message, size); });
}

// Block by block of K, as docs/design/numerics.md says.
template <int kDtype, Maps kMaps>
scaledMMStatus_t block_scaled_launch(const GemmLaunch& l, char* message, size_t size) {
  host_kernels_last_stream = l.stream;
  host_kernels_last_constant_b = l.constant_b;
  const char* why = tensor_map_refuses(l, kMaps, kDtype == SCALED_MM_DTYPE_BFLOAT16 ? 2 : 4);
  if (why || l.batch != 1 || l.workspace) {
    snprintf(message, size, "handed what a block-scaled row cannot take: %s", why ? why : "a batch or a workspace");
    return SCALED_MM_STATUS_CUDA_ERROR;
  }
  for (int64_t m = 0; m < l.M; ++m) {
    for (int64_t n = 0; n < l.N; ++n) {
      float sum = 0;
      for (int64_t block = 0, B = l.block_size; block * B < l.K; ++block) {
        int32_t acc = 0;
        for (int64_t k = block * B; k < l.K && k < block * B + B; ++k) acc += int32_t(a_at(l, 0, m, k)) * int32_t(b_at(l, 0, k, n));
        const float scale =
            l.a_scale[m * l.a_scale_stride + block * l.a_scale_stride_k] * l.b_scale[block * l.b_scale_stride_k + n / B * l.b_scale_stride];
        const float value = float(acc) * scale;
        sum = sum + value;
      }
      if (l.bias) {
        const int64_t at = n * l.bias_stride;
        const bool wide = l.bias_dtype == SCALED_MM_DTYPE_FLOAT32;
        sum = sum + (wide ? static_cast<const float*>(l.bias)[at] : bf16_to_float(static_cast<const uint16_t*>(l.bias) + at));
      }
      store<kDtype>(l.out, m * l.out_stride_m + n * l.out_stride_n, 0, sum);
    }
  }
  return SCALED_MM_STATUS_SUCCESS;
}

template <int kDtype, Maps kMaps>
scaledMMStatus_t grouped_block_scaled_launch(const GemmLaunch& l, char* message, size_t size) {
  if (l.groups == nullptr || (kMaps != Maps::kNone && l.groups->b_stride % 16)) {
    snprintf(message, size, "no groups, or a stride of b that aligned loads cannot take");
    return SCALED_MM_STATUS_CUDA_ERROR;
  }
  return each_expert<kDtype>(l, [&](const GemmLaunch& one) { return block_scaled_launch<kDtype, kMaps>(one, message, size); });
}

int64_t grouped_workspace_size(int64_t experts, int32_t multiprocessors) { return 64 * experts + multiprocessors; }

scaledMMStatus_t prepare(int32_t, char*, size_t) { return SCALED_MM_STATUS_SUCCESS; }

scaledMMStatus_t prepare_fails(int32_t device, char* message, size_t size) {
  snprintf(message, size, "no code for device %d", int(device));
  return SCALED_MM_STATUS_CUDA_ERROR;
}

scaledMMStatus_t launch_fails(const GemmLaunch&, char* message, size_t size) {
  snprintf(message, size, "the launch was too much");
  return SCALED_MM_STATUS_CUDA_ERROR;
}

int64_t workspace_size(int64_t M, int64_t N, int64_t batch) { return 8 * M * N * batch + 4; }

// Spoils all of the workspace that it asked for, then multiplies: what else lies in the workspace must not be in it.
scaledMMStatus_t launch_with_workspace(const GemmLaunch& l, char* message, size_t size) {
  if (l.workspace == nullptr || reinterpret_cast<uintptr_t>(l.workspace) % 16 != 0) {
    snprintf(message, size, "no workspace, or one that is not aligned");
    return SCALED_MM_STATUS_CUDA_ERROR;
  }
  memset(l.workspace, 0xff, size_t(workspace_size(l.M, l.N, l.batch)));
  return launch<SCALED_MM_DTYPE_FLOAT32, Maps::kNone>(l, message, size);
}

} // namespace

#define HOST_KERNEL(symbol, row, dtype, maps)                                                                                                        \
  extern "C" const scaled_mm::Kernel symbol;                                                                                                         \
  const scaled_mm::Kernel symbol = {row, dtype, 1024, &prepare, &launch<dtype, Maps::maps>};
#define HOST_GROUPED_KERNEL(symbol, row, dtype, maps)                                                                                                \
  extern "C" const scaled_mm::Kernel symbol;                                                                                                         \
  const scaled_mm::Kernel symbol = {                                                                                                                 \
      row, dtype, 1024, &prepare, &grouped_launch<dtype, Maps::maps>, nullptr, Maps::maps != Maps::kNone ? &grouped_workspace_size : nullptr};
#define HOST_BLOCK_SCALED_KERNEL(symbol, row, dtype, maps)                                                                                           \
  extern "C" const scaled_mm::Kernel symbol;                                                                                                         \
  const scaled_mm::Kernel symbol = {row, dtype, 1024, &prepare, &block_scaled_launch<dtype, Maps::maps>};
#define HOST_GROUPED_BLOCK_SCALED_KERNEL(symbol, row, dtype, maps)                                                                                   \
  extern "C" const scaled_mm::Kernel symbol;                                                                                                         \
  const scaled_mm::Kernel symbol = {row, dtype, 1024, &prepare, &grouped_block_scaled_launch<dtype, Maps::maps>};
#define HOST_ZERO_POINT_TERMS(symbol)                                                                                                                \
  extern "C" const scaled_mm::Kernel symbol;                                                                                                         \
  const scaled_mm::Kernel symbol = {"zero_point_terms", -1, 0, &prepare, &zero_point_terms};
// Kernels that something is wrong with.
#define BROKEN_KERNEL(symbol, row, shared_memory, prepare_function, launch_function)                                                                 \
  extern "C" const scaled_mm::Kernel symbol;                                                                                                         \
  const scaled_mm::Kernel symbol = {row, SCALED_MM_DTYPE_FLOAT32, shared_memory, &prepare_function, &launch_function};
#define WORKSPACE_KERNEL(symbol, row)                                                                                                                \
  extern "C" const scaled_mm::Kernel symbol;                                                                                                         \
  const scaled_mm::Kernel symbol = {row, SCALED_MM_DTYPE_FLOAT32, 0, &prepare, &launch_with_workspace, &workspace_size};
