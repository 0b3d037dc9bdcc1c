#include "core/gemm_info.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <initializer_list>
#include <string>

#include "core/status.h"

namespace scaled_mm {
namespace {

std::string list_text(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

std::string shape_text(const scaledMMTensorDesc_t& t) { return list_text(t.shape, t.ndim); }

// The product of the sizes could overflow, so each is looked at.
bool is_one_value(const scaledMMTensorDesc_t& t) {
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] != 1) return false;
  }
  return true;
}

// Bytes from the data pointer to the end of the last element.
int64_t extent(const scaledMMTensorDesc_t& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return 0;
    last += (t.shape[i] - 1) * t.strides[i];
  }
  return (last + 1) * dtype_bytes(t.dtype);
}

using Dtypes = std::initializer_list<int32_t>;

scaledMMStatus_t check_dtype(const char* name, Dtypes expected, const scaledMMTensorDesc_t& t) {
  if (std::find(expected.begin(), expected.end(), t.dtype) != expected.end()) return SCALED_MM_STATUS_SUCCESS;
  std::string text;
  size_t left = expected.size();
  for (int32_t dtype : expected) {
    text += std::string(text.empty() ? "" : left == 1 ? " or " : ", ") + dtype_name(dtype);
    --left;
  }
  return fail(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, "%s: expected %s, got %s", name, text.c_str(), dtype_name(t.dtype));
}

// Of a tensor whose dtype was checked before.
scaledMMStatus_t check_tensor(const char* name, const scaledMMTensorDesc_t& t) {
  if (t.ndim < 0 || t.ndim > SCALED_MM_MAX_DIMS) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected at most %d dimensions, got %d", name,
                SCALED_MM_MAX_DIMS, int(t.ndim));
  }
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] < 0 || t.shape[i] > INT_MAX) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected sizes from 0 to %d, got %lld in dimension %d", name,
                  INT_MAX, static_cast<long long>(t.shape[i]), i);
    }
    if (t.strides[i] < 0) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "%s: expected strides of 0 or more, got %lld in dimension %d",
                  name, static_cast<long long>(t.strides[i]), i);
    }
    int64_t reach;
    if (t.shape[i] > 1 && (__builtin_mul_overflow(t.shape[i] - 1, t.strides[i], &reach) ||
                           __builtin_add_overflow(last, reach, &last) || last > (int64_t(1) << 60))) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "%s: shape %s with stride %lld in dimension %d reaches past 2^60",
                  name, shape_text(t).c_str(), static_cast<long long>(t.strides[i]), i);
    }
  }
  if (t.alignment < 1 || (t.alignment & (t.alignment - 1)) != 0) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected an alignment that is a power of two, got %lld", name,
                static_cast<long long>(t.alignment));
  }
  if (t.alignment < dtype_bytes(t.dtype)) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT, "%s: expected an alignment of at least %lld bytes for %s, got %lld",
                name, static_cast<long long>(dtype_bytes(t.dtype)), dtype_name(t.dtype),
                static_cast<long long>(t.alignment));
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_matrix(const char* name, const char* shape, Dtypes dtypes, const scaledMMTensorDesc_t* t) {
  if (t == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected a tensor %s, got none", name, shape);
  if (scaledMMStatus_t status = check_dtype(name, dtypes, *t)) return status;
  if (scaledMMStatus_t status = check_tensor(name, *t)) return status;
  if (t->ndim != 2) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected 2 dimensions %s, got %d: %s", name, shape, int(t->ndim),
                shape_text(*t).c_str());
  }
  return SCALED_MM_STATUS_SUCCESS;
}

// A vector along M or N: one value, [length], or [length, 1] / [1, length]. The stride is 0 for one value.
scaledMMStatus_t check_vector(const char* name, const char* dim, int64_t length, bool is_column, bool one_value,
                              const scaledMMTensorDesc_t& t, int64_t* stride) {
  if (scaledMMStatus_t status = check_tensor(name, t)) return status;
  if (t.ndim == 1 && t.shape[0] == length) {
    *stride = length == 1 ? 0 : t.strides[0];
    return SCALED_MM_STATUS_SUCCESS;
  }
  const int along = is_column ? 0 : 1;
  if (t.ndim == 2 && t.shape[along] == length && t.shape[1 - along] == 1) {
    *stride = length == 1 ? 0 : t.strides[along];
    return SCALED_MM_STATUS_SUCCESS;
  }
  if (one_value && is_one_value(t)) {
    *stride = 0;
    return SCALED_MM_STATUS_SUCCESS;
  }
  const long long n = length;
  char two_dimensional[64];
  snprintf(two_dimensional, sizeof(two_dimensional), is_column ? "[%lld, 1]" : "[1, %lld]", n);
  return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s[%lld] or %s (%s = %lld), got %s", name,
              one_value ? "one value, " : "", n, two_dimensional, dim, n, shape_text(t).c_str());
}

scaledMMStatus_t check_scale(const char* name, const char* dim, int64_t length, bool is_column,
                             const scaledMMTensorDesc_t* t, int64_t* stride) {
  if (t == nullptr) {
    return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected float32 scales (only an int32 out goes without), got none",
                name);
  }
  if (scaledMMStatus_t status = check_dtype(name, {SCALED_MM_DTYPE_FLOAT32}, *t)) return status;
  return check_vector(name, dim, length, is_column, true, *t, stride);
}

scaledMMStatus_t check_zero_point(const char* name, const char* dim, int64_t length, bool is_column,
                                  const scaledMMTensorDesc_t& t, int64_t* stride, int32_t* dtype) {
  if (scaledMMStatus_t status = check_dtype(name, {SCALED_MM_DTYPE_INT32, SCALED_MM_DTYPE_INT8}, t)) return status;
  *dtype = t.dtype;
  return check_vector(name, dim, length, is_column, true, t, stride);
}

}  // namespace

scaledMMStatus_t check_same(const char* name, const scaledMMTensorDesc_t* expected, const scaledMMTensorDesc_t* got) {
  if ((expected == nullptr) != (got == nullptr)) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected %s as the descriptor was created, got %s", name,
                expected ? "a tensor" : "none", got ? "a tensor" : "none");
  }
  if (expected == nullptr) return SCALED_MM_STATUS_SUCCESS;
  if (got->dtype != expected->dtype) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, "%s: expected %s as the descriptor was created, got %s", name,
                dtype_name(expected->dtype), dtype_name(got->dtype));
  }
  bool same_shape = got->ndim == expected->ndim, same_strides = true;
  for (int i = 0; same_shape && i < expected->ndim; ++i) {
    same_shape = got->shape[i] == expected->shape[i];
    same_strides = same_strides && (expected->shape[i] <= 1 || got->strides[i] == expected->strides[i]);
  }
  if (!same_shape) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s as the descriptor was created, got %s", name,
                shape_text(*expected).c_str(),
                got->ndim <= SCALED_MM_MAX_DIMS ? shape_text(*got).c_str() : "more dimensions");
  }
  if (!same_strides) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "%s: expected strides %s as the descriptor was created, got %s", name,
                list_text(expected->strides, expected->ndim).c_str(), list_text(got->strides, got->ndim).c_str());
  }
  return SCALED_MM_STATUS_SUCCESS;
}

size_t GemmInfo::workspace_size() const {
  // Two int32 a row and a column; the column terms start on 16 bytes.
  return has_zero_point() ? size_t(8) * ((M + 1) / 2 * 2 + N) : 0;
}

scaledMMStatus_t make_gemm_info(const GemmTensors& t, GemmInfo* info) {
  constexpr int32_t kInt8 = SCALED_MM_DTYPE_INT8;
  if (scaledMMStatus_t s = check_matrix("out", "[M, N]", {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16,
                                        SCALED_MM_DTYPE_FLOAT32, SCALED_MM_DTYPE_INT32}, t.out)) return s;
  if (scaledMMStatus_t s = check_matrix("a", "[M, K]", {kInt8}, t.a)) return s;
  if (scaledMMStatus_t s = check_matrix("b", "[K, N]", {kInt8}, t.b)) return s;
  *info = GemmInfo{};

  info->M = t.a->shape[0];
  info->K = t.a->shape[1];
  info->N = t.b->shape[1];
  info->out_dtype = t.out->dtype;
  const long long M = info->M, N = info->N, K = info->K;
  if (t.b->shape[0] != info->K) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "b: expected [K, N] with K = %lld as in a [M, K], got %s", K,
                shape_text(*t.b).c_str());
  }
  if (t.out->shape[0] != info->M || t.out->shape[1] != info->N) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out: expected [M, N] = [%lld, %lld], got %s", M, N,
                shape_text(*t.out).c_str());
  }

  info->a_stride_m = t.a->strides[0];
  info->a_stride_k = t.a->strides[1];
  info->b_stride_k = t.b->strides[0];
  info->b_stride_n = t.b->strides[1];
  info->out_stride_m = t.out->strides[0];
  info->out_stride_n = t.out->strides[1];
  const bool rows_apart = M <= 1 || info->out_stride_m >= (N - 1) * info->out_stride_n + 1;
  const bool columns_apart = N <= 1 || info->out_stride_n >= (M - 1) * info->out_stride_m + 1;
  const bool steps = (M <= 1 || info->out_stride_m > 0) && (N <= 1 || info->out_stride_n > 0);
  if (!(steps && (rows_apart || columns_apart))) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES,
                "out: expected strides under which no two elements overlap, got [%lld, %lld] for shape [%lld, %lld]",
                static_cast<long long>(info->out_stride_m), static_cast<long long>(info->out_stride_n), M, N);
  }

  if (info->out_dtype == SCALED_MM_DTYPE_INT32) {
    const char* extra = t.a_scale ? "a_scale" : t.b_scale ? "b_scale" : t.bias ? "bias" : nullptr;
    if (extra) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected none with an int32 out (raw accumulators), got a tensor", extra);
    }
  } else {
    info->has_scales = true;
    if (scaledMMStatus_t s = check_scale("a_scale", "M", M, true, t.a_scale, &info->a_scale_stride)) return s;
    if (scaledMMStatus_t s = check_scale("b_scale", "N", N, false, t.b_scale, &info->b_scale_stride)) return s;
    if (t.bias) {
      if (t.bias->dtype != info->out_dtype && t.bias->dtype != SCALED_MM_DTYPE_FLOAT32) {
        return fail(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, "bias: expected out's dtype %s or float32, got %s",
                    dtype_name(info->out_dtype), dtype_name(t.bias->dtype));
      }
      info->has_bias = true;
      info->bias_dtype = t.bias->dtype;
      if (scaledMMStatus_t s = check_vector("bias", "N", N, false, false, *t.bias, &info->bias_stride)) return s;
    }
  }
  if (t.a_zero_point) {
    info->has_a_zero_point = true;
    if (scaledMMStatus_t s = check_zero_point("a_zero_point", "M", M, true, *t.a_zero_point, &info->a_zero_point_stride,
                                              &info->a_zero_point_dtype)) return s;
  }
  if (t.b_zero_point) {
    info->has_b_zero_point = true;
    if (scaledMMStatus_t s = check_zero_point("b_zero_point", "N", N, false, *t.b_zero_point, &info->b_zero_point_stride,
                                              &info->b_zero_point_dtype)) return s;
  }

  // |a - za| <= 255 with a zero point in -128..127 and 128 without one; the sum of K products must stay below 2^31.
  const int64_t largest = (info->has_a_zero_point ? 255 : 128) * (info->has_b_zero_point ? 255 : 128);
  const int64_t bound = (int64_t(1) << 31) - 1;
  if (info->K > bound / largest) {
    return fail(SCALED_MM_STATUS_OVERFLOW,
                "a: expected K <= %lld, beyond which a 32-bit accumulator is not exact %s, got K = %lld",
                static_cast<long long>(bound / largest),
                info->has_zero_point() ? "with the zero points given" : "without zero points", K);
  }

  info->a_alignment = t.a->alignment;
  info->b_alignment = t.b->alignment;
  info->out_alignment = t.out->alignment;
  info->bytes.out = extent(*t.out);
  info->bytes.a = extent(*t.a);
  info->bytes.b = extent(*t.b);
  if (t.a_scale) info->bytes.a_scale = extent(*t.a_scale);
  if (t.b_scale) info->bytes.b_scale = extent(*t.b_scale);
  if (t.bias) info->bytes.bias = extent(*t.bias);
  if (t.a_zero_point) info->bytes.a_zero_point = extent(*t.a_zero_point);
  if (t.b_zero_point) info->bytes.b_zero_point = extent(*t.b_zero_point);
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_operand(const char* name, const char* shape, Dtypes dtypes, int32_t ndim, const scaledMMTensorDesc_t* t) {
  if (t == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected a tensor %s, got none", name, shape);
  if (scaledMMStatus_t status = check_dtype(name, dtypes, *t)) return status;
  if (scaledMMStatus_t status = check_tensor(name, *t)) return status;
  if (ndim >= 0 && t->ndim != ndim) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %d dimension%s %s, got %d: %s", name, int(ndim), ndim == 1 ? "" : "s",
                shape, int(t->ndim), shape_text(*t).c_str());
  }
  return SCALED_MM_STATUS_SUCCESS;
}

int64_t tensor_extent(const scaledMMTensorDesc_t& t) { return extent(t); }

std::string tensor_shape(const scaledMMTensorDesc_t& t) { return shape_text(t); }

const char* misfit(const GemmInfo& info, int32_t align_a, int32_t align_b, int32_t align_out) {
  if (align_a <= 1 && align_b <= 1 && align_out <= 1) return nullptr;
  // A dimension of one element has no stride to obey.
  const int64_t out_bytes = dtype_bytes(info.out_dtype);
  if (info.K == 0) return "K is 0";
  if (info.K > 1 && info.a_stride_k != 1) return "a is not contiguous along K";
  if (info.M > 1 && info.a_stride_m % align_a != 0) return "the row stride of a is not a multiple of the row's alignment";
  if (info.M > 1 && info.a_stride_m < info.K) return "the rows of a overlap";
  // A tensor map holds strides below 2^40 bytes; encoding a larger one would fail without a word.
  constexpr int64_t kStrideLimit = int64_t(1) << 40;
  if ((info.M > 1 && (info.a_stride_m >= kStrideLimit || info.out_stride_m >= kStrideLimit / out_bytes)) ||
      (info.N > 1 && info.b_stride_n >= kStrideLimit)) {
    return "a row stride is 2^40 bytes or more";
  }
  if (info.a_alignment < align_a) return "the data pointer of a is not aligned";
  if (info.K > 1 && info.b_stride_k != 1) return "b is not contiguous along K";
  if (info.N > 1 && info.b_stride_n % align_b != 0) return "the column stride of b is not a multiple of the row's alignment";
  if (info.N > 1 && info.b_stride_n < info.K) return "the columns of b overlap";
  if (info.b_alignment < align_b) return "the data pointer of b is not aligned";
  if (info.N > 1 && info.out_stride_n != 1) return "out is not contiguous along N";
  if (info.M > 1 && info.out_stride_m * out_bytes % align_out != 0) {
    return "the row stride of out is not a multiple of the row's alignment";
  }
  if (info.out_alignment < align_out) return "the data pointer of out is not aligned";
  return nullptr;
}

}  // namespace scaled_mm
