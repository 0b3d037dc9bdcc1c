#include "core/gemm_info.h"

#include <algorithm>
#include <climits>
#include <cstring>
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

struct AllowedFlags {
  int64_t flags;
  const char* text;
};

AllowedFlags allowed_flags(const char* name) {
  if (strcmp(name, "b") == 0) return {SCALED_MM_TENSOR_CONSTANT, "0 or SCALED_MM_TENSOR_CONSTANT"};
  if (strcmp(name, "weight") == 0) {
    return {SCALED_MM_TENSOR_CONSTANT | SCALED_MM_TENSOR_PACKED, "of SCALED_MM_TENSOR_CONSTANT and SCALED_MM_TENSOR_PACKED"};
  }
  return {0, "0"};
}

// Of a tensor whose dtype was checked before.
scaledMMStatus_t check_tensor(const char* name, const scaledMMTensorDesc_t& t) {
  if (t.ndim < 0 || t.ndim > SCALED_MM_MAX_DIMS) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected 0 to %d dimensions, got %d", name,
                SCALED_MM_MAX_DIMS, int(t.ndim));
  }
  const AllowedFlags allowed = allowed_flags(name);
  if ((t.flags & ~allowed.flags) != 0) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected flags %s, got %lld", name, allowed.text, static_cast<long long>(t.flags));
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

// A matrix, or a batch of them, as [batch, rows, columns].
struct Matrix {
  int64_t batch, rows, columns;
  int64_t stride_batch, stride_row, stride_column;
};

scaledMMStatus_t check_matrix(const char* name, const char* shape, Dtypes dtypes, const scaledMMTensorDesc_t* t, Matrix* m) {
  if (t == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected a tensor [%s], got none", name, shape);
  if (scaledMMStatus_t status = check_dtype(name, dtypes, *t)) return status;
  if (scaledMMStatus_t status = check_tensor(name, *t)) return status;
  if (t->ndim != 2 && t->ndim != 3) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected 2 dimensions [%s] or 3 [B, %s], got %d: %s", name, shape, shape,
                int(t->ndim), shape_text(*t).c_str());
  }
  const int row = t->ndim - 2;
  const bool batched = row == 1 && t->shape[0] != 1;
  *m = {row == 1 ? t->shape[0] : 1, t->shape[row], t->shape[row + 1], batched ? t->strides[0] : 0, t->strides[row], t->strides[row + 1]};
  return SCALED_MM_STATUS_SUCCESS;
}

// A vector along M (is_column) or N, of a plain product (batch -1) or one for each of a batch.
struct VectorRule {
  const char* dim;
  int64_t length;
  bool is_column, one_value;  // one_value: a single value for the whole vector will do
  int64_t batch;
  bool either_way = false;  // along N also as a column [N, 1], which is how checkpoints store scales of output channels
};

// What to do about a vector that holds a value for every row of a batch, or every row that a batch was flattened to.
std::string vector_hint(const VectorRule& rule, const scaledMMTensorDesc_t& t) {
  int64_t values = 1, wanted = rule.length;
  for (int i = 0; i < t.ndim; ++i) {
    if (__builtin_mul_overflow(values, t.shape[i], &values)) return "";
  }
  if (rule.batch > 0 && __builtin_mul_overflow(wanted, rule.batch, &wanted)) return "";
  if (!rule.is_column || values != wanted || values < 2) return "";
  const std::string length = std::to_string(rule.length);
  if (rule.batch < 0) return "; a is flat, so reshape it to [" + length + ", 1]";
  return "; this is a batch, so reshape it to [" + std::to_string(rule.batch) + ", " + length + ", 1]";
}

scaledMMStatus_t fail_vector(const char* name, const VectorRule& rule, const scaledMMTensorDesc_t& t) {
  const std::string n = std::to_string(rule.length), batch = std::to_string(rule.batch);
  std::string forms = std::string(rule.one_value ? "one value, " : "") + "[" + n + "]";
  if (rule.batch < 0) {
    forms += rule.is_column ? " or [" + n + ", 1]" : rule.either_way ? ", [1, " + n + "] or [" + n + ", 1]" : " or [1, " + n + "]";
  } else {
    forms += rule.is_column ? ", [" + n + ", 1]" : ", [1, " + n + "]";
    if (rule.either_way) forms += ", [" + n + ", 1], [" + batch + ", " + n + ", 1]";
    forms += " or [" + batch + (rule.is_column ? ", " + n + ", 1]" : ", 1, " + n + "]") + (rule.one_value ? " with 1 in any place" : " with 1 for B");
  }
  const std::string sizes = (rule.batch < 0 ? "" : "B = " + batch + ", ") + rule.dim + " = " + n;
  return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s (%s), got %s%s", name, forms.c_str(), sizes.c_str(), shape_text(t).c_str(),
              vector_hint(rule, t).c_str());
}

// One value, [length], [length, 1] / [1, length], in a batch also [B, length, 1] / [B, 1, length], where B and, if one value
// will do, the length may be 1. The stride is 0 for one value, the batch stride where the batch shares the vector.
scaledMMStatus_t check_vector(const char* name, const VectorRule& rule, const scaledMMTensorDesc_t& t, int64_t* stride,
                              int64_t* batch_stride) {
  if (scaledMMStatus_t status = check_tensor(name, t)) return status;
  *batch_stride = 0;
  if (t.ndim == 1 && t.shape[0] == rule.length) {
    *stride = rule.length == 1 ? 0 : t.strides[0];
    return SCALED_MM_STATUS_SUCCESS;
  }
  if (rule.one_value && is_one_value(t)) {
    *stride = 0;
    return SCALED_MM_STATUS_SUCCESS;
  }
  if (t.ndim < 2 || (t.ndim == 3 && rule.batch < 0)) return fail_vector(name, rule, t);
  const bool is_column = rule.is_column || (rule.either_way && t.shape[t.ndim - 1] == 1 && t.shape[t.ndim - 2] == rule.length);
  const int along = t.ndim - (is_column ? 2 : 1), across = t.ndim - (is_column ? 1 : 2);
  const bool one_for_all = t.ndim == 3 && rule.one_value && t.shape[along] == 1;
  const bool fits_batch = t.ndim == 2 || t.shape[0] == rule.batch || t.shape[0] == 1;
  if (t.shape[across] != 1 || !fits_batch || (t.shape[along] != rule.length && !one_for_all)) return fail_vector(name, rule, t);
  *stride = t.shape[along] == 1 ? 0 : t.strides[along];
  if (t.ndim == 3 && t.shape[0] != 1) *batch_stride = t.strides[0];
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_scale(const char* name, const VectorRule& rule, const scaledMMTensorDesc_t* t, int64_t* stride,
                             int64_t* batch_stride) {
  if (t == nullptr) {
    return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected float32 scales (only an int32 out goes without), got none",
                name);
  }
  if (scaledMMStatus_t status = check_dtype(name, {SCALED_MM_DTYPE_FLOAT32}, *t)) return status;
  return check_vector(name, rule, *t, stride, batch_stride);
}

// Sums, whose rule has no one_value, and zero points.
scaledMMStatus_t check_integers(const char* name, const VectorRule& rule, Dtypes dtypes, const scaledMMTensorDesc_t& t,
                                int64_t* stride, int64_t* batch_stride) {
  if (scaledMMStatus_t status = check_dtype(name, dtypes, t)) return status;
  return check_vector(name, rule, t, stride, batch_stride);
}

// Whether the rows of a whole batch lie evenly, as those of one matrix of batch * M rows; then the stride between them.
bool rows_fold(int64_t M, int64_t batch_stride, int64_t* stride) {
  if (M == 1) *stride = batch_stride;
  return M == 1 || batch_stride == M * *stride;
}

// A batch that shares b and all that goes with its columns is one product of batch * M rows: fewer, fuller tiles, and b and
// its sums are read once. Nothing changes where the rows do not lie evenly.
void fold_batch(GemmInfo* info) {
  const BatchStrides& s = info->batch_strides;
  if (s.b || s.b_scale || s.bias || s.b_zero_point || s.b_column_sums || !s.a || info->batch * info->M > INT_MAX) return;
  GemmInfo folded = *info;
  const bool even = rows_fold(info->M, s.a, &folded.a_stride_m) && rows_fold(info->M, s.out, &folded.out_stride_m) &&
                    rows_fold(info->M, s.a_scale, &folded.a_scale_stride) &&
                    rows_fold(info->M, s.a_zero_point, &folded.a_zero_point_stride) &&
                    rows_fold(info->M, s.a_row_sums, &folded.a_row_sums_stride);
  if (!even) return;
  folded.M = info->batch * info->M;
  folded.batch = 1;
  folded.batch_strides = {};
  *info = folded;
}

}  // namespace

// Every dimension must step over all that the ones with smaller strides reach, if there are elements at all.
scaledMMStatus_t check_no_overlap(const char* name, const scaledMMTensorDesc_t& t) {
  int order[SCALED_MM_MAX_DIMS], count = 0;  // by stride: three at most, so inserted
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return SCALED_MM_STATUS_SUCCESS;
    if (t.shape[i] == 1) continue;
    int at = count++;
    for (; at > 0 && t.strides[order[at - 1]] > t.strides[i]; --at) order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t reach = 0;
  for (int i = 0; i < count; ++i) {
    if (t.strides[order[i]] <= reach) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "%s: expected strides under which no two elements overlap, each larger than all that the smaller ones reach, got %s for shape %s",
                  name, list_text(t.strides, t.ndim).c_str(), shape_text(t).c_str());
    }
    reach += (t.shape[order[i]] - 1) * t.strides[order[i]];
  }
  return SCALED_MM_STATUS_SUCCESS;
}

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
  return has_zero_point() ? size_t(4) * column_terms_offset() + size_t(8) * column_term_batches() * N : 0;
}

scaledMMStatus_t make_gemm_info(const GemmTensors& t, GemmInfo* info, bool one_sum) {
  constexpr int32_t kInt8 = SCALED_MM_DTYPE_INT8;
  Matrix out, a, b;
  if (scaledMMStatus_t s = check_matrix("out", "M, N", {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16,
                                        SCALED_MM_DTYPE_FLOAT32, SCALED_MM_DTYPE_INT32}, t.out, &out)) return s;
  if (scaledMMStatus_t s = check_matrix("a", "M, K", {kInt8}, t.a, &a)) return s;
  if (scaledMMStatus_t s = check_matrix("b", "K, N", {kInt8}, t.b, &b)) return s;
  *info = GemmInfo{};

  const bool batched = t.a->ndim == 3 || t.b->ndim == 3;
  info->M = a.rows;
  info->K = a.columns;
  info->N = b.columns;
  info->batch = a.batch == 1 ? b.batch : a.batch;
  info->out_dtype = t.out->dtype;
  const long long M = info->M, N = info->N, K = info->K, B = info->batch;
  if (b.rows != info->K) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "b: expected [K, N] with K = %lld as in a [M, K], got %s", K,
                shape_text(*t.b).c_str());
  }
  if (b.batch != info->batch && b.batch != 1) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "b: expected [B, K, N] with B = %lld as in a [B, M, K], or 1, got %s", B,
                shape_text(*t.b).c_str());
  }
  if (t.out->ndim != (batched ? 3 : 2) || out.batch != info->batch || out.rows != info->M || out.columns != info->N) {
    if (!batched) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out: expected [M, N] = [%lld, %lld], got %s", M, N,
                  shape_text(*t.out).c_str());
    }
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out: expected [B, M, N] = [%lld, %lld, %lld], got %s", B, M, N,
                shape_text(*t.out).c_str());
  }

  info->a_stride_m = a.stride_row;
  info->a_stride_k = a.stride_column;
  info->b_stride_k = b.stride_row;
  info->b_stride_n = b.stride_column;
  info->out_stride_m = out.stride_row;
  info->out_stride_n = out.stride_column;
  BatchStrides& strides = info->batch_strides;
  strides.a = a.stride_batch;
  strides.b = b.stride_batch;
  strides.out = out.stride_batch;
  if (scaledMMStatus_t s = check_no_overlap("out", *t.out)) return s;
  const VectorRule rows{"M", M, true, true, batched ? B : -1}, columns{"N", N, false, true, batched ? B : -1};
  VectorRule every_row = rows, every_column = columns;
  every_row.one_value = every_column.one_value = false;
  VectorRule channels = columns;
  channels.either_way = true;

  if (info->out_dtype == SCALED_MM_DTYPE_INT32) {
    const char* extra = t.a_scale ? "a_scale" : t.b_scale ? "b_scale" : t.bias ? "bias" : nullptr;
    if (extra) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected none with an int32 out (raw accumulators), got a tensor", extra);
    }
  } else {
    info->has_scales = true;
    if (scaledMMStatus_t s = check_scale("a_scale", rows, t.a_scale, &info->a_scale_stride, &strides.a_scale)) return s;
    if (scaledMMStatus_t s = check_scale("b_scale", channels, t.b_scale, &info->b_scale_stride, &strides.b_scale)) return s;
    if (t.bias) {
      if (t.bias->dtype != info->out_dtype && t.bias->dtype != SCALED_MM_DTYPE_FLOAT32) {
        return fail(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, "bias: expected out's dtype %s or float32, got %s",
                    dtype_name(info->out_dtype), dtype_name(t.bias->dtype));
      }
      info->has_bias = true;
      info->bias_dtype = t.bias->dtype;
      if (scaledMMStatus_t s = check_vector("bias", every_column, *t.bias, &info->bias_stride, &strides.bias)) return s;
    }
  }
  if (t.a_zero_point) {
    info->has_a_zero_point = true;
    info->a_zero_point_dtype = t.a_zero_point->dtype;
    if (scaledMMStatus_t s = check_integers("a_zero_point", rows, {SCALED_MM_DTYPE_INT32, kInt8}, *t.a_zero_point,
                                            &info->a_zero_point_stride, &strides.a_zero_point)) return s;
  }
  if (t.b_zero_point) {
    info->has_b_zero_point = true;
    info->b_zero_point_dtype = t.b_zero_point->dtype;
    if (scaledMMStatus_t s = check_integers("b_zero_point", columns, {SCALED_MM_DTYPE_INT32, kInt8}, *t.b_zero_point,
                                            &info->b_zero_point_stride, &strides.b_zero_point)) return s;
  }
  if (t.a_row_sums) {
    info->has_a_row_sums = true;
    if (scaledMMStatus_t s = check_integers("a_row_sums", every_row, {SCALED_MM_DTYPE_INT32}, *t.a_row_sums,
                                            &info->a_row_sums_stride, &strides.a_row_sums)) return s;
  }
  if (t.b_column_sums) {
    info->has_b_column_sums = true;
    if (scaledMMStatus_t s = check_integers("b_column_sums", every_column, {SCALED_MM_DTYPE_INT32}, *t.b_column_sums,
                                            &info->b_column_sums_stride, &strides.b_column_sums)) return s;
  }

  // |a - za| <= 255 with a zero point in -128..127 and 128 without one; the sum of K products must stay below 2^31.
  const int64_t largest = (info->has_a_zero_point ? 255 : 128) * (info->has_b_zero_point ? 255 : 128);
  const int64_t bound = (int64_t(1) << 31) - 1;
  if (one_sum && info->K > bound / largest) {
    return fail(SCALED_MM_STATUS_OVERFLOW,
                "a: expected K <= %lld, beyond which a 32-bit accumulator is not exact %s, got K = %lld",
                static_cast<long long>(bound / largest),
                info->has_zero_point() ? "with the zero points given" : "without zero points", K);
  }

  info->a_alignment = t.a->alignment;
  info->b_alignment = t.b->alignment;
  info->out_alignment = t.out->alignment;
  info->constant_b = (t.b->flags & SCALED_MM_TENSOR_CONSTANT) != 0;
  info->bytes.out = extent(*t.out);
  info->bytes.a = extent(*t.a);
  info->bytes.b = extent(*t.b);
  if (t.a_scale) info->bytes.a_scale = extent(*t.a_scale);
  if (t.b_scale) info->bytes.b_scale = extent(*t.b_scale);
  if (t.bias) info->bytes.bias = extent(*t.bias);
  if (t.a_zero_point) info->bytes.a_zero_point = extent(*t.a_zero_point);
  if (t.b_zero_point) info->bytes.b_zero_point = extent(*t.b_zero_point);
  if (t.a_row_sums) info->bytes.a_row_sums = extent(*t.a_row_sums);
  if (t.b_column_sums) info->bytes.b_column_sums = extent(*t.b_column_sums);
  if (info->batch <= 1) {
    strides = {};  // an empty batch has none either
  } else if (!info->empty()) {
    fold_batch(info);
  }
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

scaledMMStatus_t check_workspace_room(const char* row, std::initializer_list<int64_t> sizes) {
  int64_t elements = 1;
  bool fits = true;
  for (int64_t size : sizes) fits = fits && !__builtin_mul_overflow(elements, size, &elements);
  if (fits && elements <= int64_t(1) << 48) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "kernel: row %s has a workspace for at most 2^48 elements, got sizes %s", row,
              list_text(sizes.begin(), int(sizes.size())).c_str());
}

int64_t tensor_extent(const scaledMMTensorDesc_t& t) { return extent(t); }

std::string tensor_shape(const scaledMMTensorDesc_t& t) { return shape_text(t); }

namespace {

// A tensor map holds strides below 2^40 bytes; encoding a larger one would fail without a word.
constexpr int64_t kStrideLimit = int64_t(1) << 40;
// Blocks of a launch along the grid's third dimension, which some rows give to the batch.
constexpr int64_t kBatchLimit = 65535;

const char* batch_misfit(const GemmInfo& info, const RowNeeds& needs) {
  const BatchStrides& s = info.batch_strides;
  const int64_t out_bytes = dtype_bytes(info.out_dtype);
  if (info.batch > kBatchLimit) return "the batch has more than 65535 products";
  // Kernels count the rows and columns of a batch in 32 bits where they look for their zero-point terms.
  if (info.has_zero_point() && info.batch * std::max(info.M, info.N) > INT_MAX) return "the batch has 2^31 rows or columns or more";
  if (s.a % needs.align_a != 0) return "the batch stride of a is not a multiple of the row's alignment";
  if (s.b % needs.align_b != 0) return "the batch stride of b is not a multiple of the row's alignment";
  if (s.out * out_bytes % needs.align_out != 0) return "the batch stride of out is not a multiple of the row's alignment";
  if (s.a >= kStrideLimit || s.b >= kStrideLimit || s.out >= kStrideLimit / out_bytes) return "a batch stride is 2^40 bytes or more";
  return nullptr;
}

}  // namespace

const char* misfit(const GemmInfo& info, const RowNeeds& needs) {
  if (!needs.any()) return nullptr;
  // A dimension of one element has no stride to obey.
  const int64_t out_bytes = dtype_bytes(info.out_dtype);
  if (info.K == 0) return "K is 0";
  constexpr int64_t kRoomForTiles = 2048;  // coordinates of tiles and clusters are 32-bit, their far corners too
  if (info.M > INT32_MAX - kRoomForTiles || info.N > INT32_MAX - kRoomForTiles) return "M or N is within a tile of 2^31";
  if (info.K > 1 && info.a_stride_k != 1) return "a is not contiguous along K";
  if (info.M > 1 && info.a_stride_m % needs.align_a != 0) return "the row stride of a is not a multiple of the row's alignment";
  if (info.M > 1 && info.a_stride_m < info.K) return "the rows of a overlap";
  if ((info.M > 1 && (info.a_stride_m >= kStrideLimit || info.out_stride_m >= kStrideLimit / out_bytes)) ||
      (info.N > 1 && info.b_stride_n >= kStrideLimit)) {
    return "a row stride is 2^40 bytes or more";
  }
  if (info.a_alignment < needs.align_a) return "the data pointer of a is not aligned";
  if (info.K > 1 && info.b_stride_k != 1) return "b is not contiguous along K";
  if (info.N > 1 && info.b_stride_n % needs.align_b != 0) return "the column stride of b is not a multiple of the row's alignment";
  if (info.N > 1 && info.b_stride_n < info.K) return "the columns of b overlap";
  if (info.b_alignment < needs.align_b) return "the data pointer of b is not aligned";
  if (info.N > 1 && info.out_stride_n != 1) return "out is not contiguous along N";
  if (info.M > 1 && info.out_stride_m * out_bytes % needs.align_out != 0) {
    return "the row stride of out is not a multiple of the row's alignment";
  }
  if (info.N * out_bytes % needs.store_bytes != 0) return "the row's kernel stores whole vectors, and the rows of out end within one";
  if (info.out_alignment < needs.align_out) return "the data pointer of out is not aligned";
  return info.batch > 1 ? batch_misfit(info, needs) : nullptr;
}

}  // namespace scaled_mm
