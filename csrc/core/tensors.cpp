#include "core/tensors.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "core/status.h"

namespace scaled_mm {
namespace {

std::string list_text(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// Checks each size, because their product could overflow.
bool is_one_value(const scaledMMTensorDesc_t& t) {
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] != 1) return false;
  }
  return true;
}

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// tensor_extent of a tensor of GGUF blocks [rows, K]. A packed weight has the bytes of its blocks in another order, padded to whole tiles, each of
// which ends with the powers of its rows (gguf/formats.cuh).
int64_t blocks_extent(const scaledMMTensorDesc_t& t) {
  constexpr int64_t kBlock = 32, kTileRows = 64, kTileValues = 256, kPowerBytes = 2 * kTileRows;
  if (t.shape[0] == 0 || t.shape[1] == 0) return 0;
  const int64_t bytes = scaledMMGetBlockBytes(t.dtype);
  if (t.flags & SCALED_MM_TENSOR_PACKED) {
    return ceil_div(t.shape[0], kTileRows) * ceil_div(t.shape[1], kTileValues) * (kTileRows * kTileValues / kBlock * bytes + kPowerBytes);
  }
  return (t.shape[0] - 1) * t.strides[0] + t.shape[1] / kBlock * bytes;
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

} // namespace

std::string tensor_shape(const scaledMMTensorDesc_t& t) { return list_text(t.shape, t.ndim); }

int64_t tensor_alignment(const scaledMMTensorDesc_t& t) { return t.flags & SCALED_MM_TENSOR_PACKED ? kPackedAlignment : dtype_bytes(t.dtype); }

int64_t tensor_extent(const scaledMMTensorDesc_t& t) {
  if (scaledMMGetBlockBytes(t.dtype)) return blocks_extent(t);
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return 0;
    last += (t.shape[i] - 1) * t.strides[i];
  }
  return (last + 1) * dtype_bytes(t.dtype);
}

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

// The dtype must have been checked.
scaledMMStatus_t check_tensor(const char* name, const scaledMMTensorDesc_t& t) {
  if (t.ndim < 0 || t.ndim > SCALED_MM_MAX_DIMS) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected 0 to %d dimensions, got %d", name, SCALED_MM_MAX_DIMS, int(t.ndim));
  }
  const AllowedFlags allowed = allowed_flags(name);
  if ((t.flags & ~allowed.flags) != 0) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected flags %s, got %lld", name, allowed.text, static_cast<long long>(t.flags));
  }
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] < 0 || t.shape[i] > INT_MAX) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected sizes from 0 to %d, got %lld in dimension %d", name, INT_MAX,
                  static_cast<long long>(t.shape[i]), i);
    }
    if (t.strides[i] < 0) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "%s: expected strides of 0 or more, got %lld in dimension %d", name,
                  static_cast<long long>(t.strides[i]), i);
    }
    int64_t reach;
    if (t.shape[i] > 1 &&
        (__builtin_mul_overflow(t.shape[i] - 1, t.strides[i], &reach) || __builtin_add_overflow(last, reach, &last) || last > (int64_t(1) << 60))) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "%s: shape %s with stride %lld in dimension %d reaches past 2^60", name,
                  tensor_shape(t).c_str(), static_cast<long long>(t.strides[i]), i);
    }
  }
  if (t.alignment < 1 || (t.alignment & (t.alignment - 1)) != 0) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected an alignment that is a power of two, got %lld", name, static_cast<long long>(t.alignment));
  }
  if (t.alignment < dtype_bytes(t.dtype)) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT, "%s: expected an alignment of at least %lld bytes for %s, got %lld", name,
                static_cast<long long>(dtype_bytes(t.dtype)), dtype_name(t.dtype), static_cast<long long>(t.alignment));
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_matrix(const char* name, const char* shape, Dtypes dtypes, const scaledMMTensorDesc_t* t, Matrix* m) {
  if (t == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected a tensor [%s], got none", name, shape);
  if (scaledMMStatus_t status = check_dtype(name, dtypes, *t)) return status;
  if (scaledMMStatus_t status = check_tensor(name, *t)) return status;
  if (t->ndim != 2 && t->ndim != 3) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected 2 dimensions [%s] or 3 [B, %s], got %d: %s", name, shape, shape, int(t->ndim),
                tensor_shape(*t).c_str());
  }
  const int row = t->ndim - 2;
  const bool batched = row == 1 && t->shape[0] != 1;
  *m = {row == 1 ? t->shape[0] : 1, t->shape[row], t->shape[row + 1], batched ? t->strides[0] : 0, t->strides[row], t->strides[row + 1]};
  return SCALED_MM_STATUS_SUCCESS;
}

namespace {

// A hint for a vector with one value per row of a whole batch: reshape it.
std::string vector_hint(const VectorRule& rule, const scaledMMTensorDesc_t& t) {
  int64_t values = 1, wanted = rule.length;
  for (int i = 0; i < t.ndim; ++i) {
    if (__builtin_mul_overflow(values, t.shape[i], &values)) return "";
  }
  if (rule.batch > 0 && __builtin_mul_overflow(wanted, rule.batch, &wanted)) return "";
  if (!rule.is_column || values != wanted || values < 2) return "";
  const std::string length = std::to_string(rule.length);
  if (rule.batch < 0) return std::string("; ") + rule.rows_of + " is flat, so reshape it to [" + length + ", 1]";
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
  return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s (%s), got %s%s", name, forms.c_str(), sizes.c_str(), tensor_shape(t).c_str(),
              vector_hint(rule, t).c_str());
}

} // namespace

scaledMMStatus_t check_vector(const char* name, const VectorRule& rule, const scaledMMTensorDesc_t& t, int64_t* stride, int64_t* batch_stride) {
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

scaledMMStatus_t check_scale(const char* name, const VectorRule& rule, const scaledMMTensorDesc_t* t, int64_t* stride, int64_t* batch_stride) {
  if (t == nullptr) {
    return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected float32 scales (only an int32 out goes without), got none", name);
  }
  if (scaledMMStatus_t status = check_dtype(name, {SCALED_MM_DTYPE_FLOAT32}, *t)) return status;
  return check_vector(name, rule, *t, stride, batch_stride);
}

scaledMMStatus_t check_integers(const char* name, const VectorRule& rule, Dtypes dtypes, const scaledMMTensorDesc_t& t, int64_t* stride,
                                int64_t* batch_stride) {
  if (scaledMMStatus_t status = check_dtype(name, dtypes, t)) return status;
  return check_vector(name, rule, t, stride, batch_stride);
}

scaledMMStatus_t check_no_overlap(const char* name, const scaledMMTensorDesc_t& t) {
  int order[SCALED_MM_MAX_DIMS], count = 0; // dimensions by stride: an insertion sort of at most three
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
      return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES,
                  "%s: expected strides under which no two elements overlap, each larger than all that the smaller ones reach, got %s for shape %s",
                  name, list_text(t.strides, t.ndim).c_str(), tensor_shape(t).c_str());
    }
    reach += (t.shape[order[i]] - 1) * t.strides[order[i]];
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_same(const char* name, const scaledMMTensorDesc_t* expected, const scaledMMTensorDesc_t* got) {
  if ((expected == nullptr) != (got == nullptr)) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected %s as the descriptor was created, got %s", name, expected ? "a tensor" : "none",
                got ? "a tensor" : "none");
  }
  if (expected == nullptr) return SCALED_MM_STATUS_SUCCESS;
  if (got->dtype != expected->dtype) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, "%s: expected %s as the descriptor was created, got %s", name, dtype_name(expected->dtype),
                dtype_name(got->dtype));
  }
  const bool packed = (expected->flags & SCALED_MM_TENSOR_PACKED) != 0; // a packed tensor has no strides
  if (packed != ((got->flags & SCALED_MM_TENSOR_PACKED) != 0)) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected %s as the descriptor was created, got %s", name, packed ? "packed tiles" : "blocks",
                packed ? "blocks" : "packed tiles");
  }
  bool same_shape = got->ndim == expected->ndim, same_strides = true;
  for (int i = 0; same_shape && i < expected->ndim; ++i) {
    same_shape = got->shape[i] == expected->shape[i];
    same_strides = same_strides && (packed || expected->shape[i] <= 1 || got->strides[i] == expected->strides[i]);
  }
  if (!same_shape) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s as the descriptor was created, got %s", name, tensor_shape(*expected).c_str(),
                got->ndim <= SCALED_MM_MAX_DIMS ? tensor_shape(*got).c_str() : "more dimensions");
  }
  if (!same_strides) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "%s: expected strides %s as the descriptor was created, got %s", name,
                list_text(expected->strides, expected->ndim).c_str(), list_text(got->strides, got->ndim).c_str());
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t check_operand(const char* name, const char* shape, Dtypes dtypes, int32_t ndim, const scaledMMTensorDesc_t* t) {
  if (t == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected a tensor %s, got none", name, shape);
  if (scaledMMStatus_t status = check_dtype(name, dtypes, *t)) return status;
  if (scaledMMStatus_t status = check_tensor(name, *t)) return status;
  if (ndim >= 0 && t->ndim != ndim) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %d dimension%s %s, got %d: %s", name, int(ndim), ndim == 1 ? "" : "s", shape,
                int(t->ndim), tensor_shape(*t).c_str());
  }
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace scaled_mm

int64_t scaledMMGetBlockBytes(int32_t dtype) {
  switch (dtype) {
#define BYTES_OF_FORMAT(NAME, name, code, bytes, ...)                                                                                                \
  case SCALED_MM_DTYPE_##NAME: return bytes;
    SCALED_MM_GGUF_FORMATS(BYTES_OF_FORMAT)
#undef BYTES_OF_FORMAT
  default: return 0;
  }
}
