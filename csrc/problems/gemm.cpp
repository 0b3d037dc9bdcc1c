// The plain INT8 product and batches of it: out = cast( (f32(acc) * b_scale) * a_scale + bias ), with zero points of both operands.
#include "problems/gemm.h"

#include <algorithm>
#include <climits>
#include <iterator>

#include "core/status.h"

namespace scaled_mm {
namespace {

// Whether all rows of a batch are evenly spaced, as in one matrix of batch * M rows. *stride is then the distance between rows.
bool rows_fold(int64_t M, int64_t batch_stride, int64_t* stride) {
  if (M == 1) *stride = batch_stride;
  return M == 1 || batch_stride == M * *stride;
}

// Folds a batch whose products share b and all operands over N into one product of batch * M rows: fewer, fuller tiles, and b and its sums are
// read once. A batch whose rows are not evenly spaced is left as it is.
void fold_batch(ProductInfo* info) {
  const BatchStrides& s = info->batch_strides;
  if (s.b || s.b_scale || s.bias || s.b_zero_point || s.b_column_sums || !s.a || info->batch * info->M > INT_MAX) return;
  ProductInfo folded = *info;
  const bool even = rows_fold(info->M, s.a, &folded.a_stride_m) && rows_fold(info->M, s.out, &folded.out_stride_m) &&
                    rows_fold(info->M, s.a_scale, &folded.a_scale_stride) && rows_fold(info->M, s.a_zero_point, &folded.a_zero_point_stride) &&
                    rows_fold(info->M, s.a_row_sums, &folded.a_row_sums_stride);
  if (!even) return;
  folded.M = info->batch * info->M;
  folded.batch = 1;
  folded.batch_strides = {};
  *info = folded;
}

} // namespace

scaledMMStatus_t validate_gemm(const GemmTensors& t, ProductInfo* info, bool one_sum) {
  constexpr int32_t kInt8 = SCALED_MM_DTYPE_INT8;
  Matrix out, a, b;
  if (scaledMMStatus_t s = check_matrix(
          "out", "M, N", {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32, SCALED_MM_DTYPE_INT32}, t.out, &out))
    return s;
  if (scaledMMStatus_t s = check_matrix("a", "M, K", {kInt8}, t.a, &a)) return s;
  if (scaledMMStatus_t s = check_matrix("b", "K, N", {kInt8}, t.b, &b)) return s;
  *info = ProductInfo{};

  const bool batched = t.a->ndim == 3 || t.b->ndim == 3;
  info->M = a.rows;
  info->K = a.columns;
  info->N = b.columns;
  info->batch = a.batch == 1 ? b.batch : a.batch;
  info->out_dtype = t.out->dtype;
  const long long M = info->M, N = info->N, K = info->K, B = info->batch;
  if (b.rows != info->K) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "b: expected [K, N] with K = %lld as in a [M, K], got %s", K, tensor_shape(*t.b).c_str());
  }
  if (b.batch != info->batch && b.batch != 1) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "b: expected [B, K, N] with B = %lld as in a [B, M, K], or 1, got %s", B,
                tensor_shape(*t.b).c_str());
  }
  if (t.out->ndim != (batched ? 3 : 2) || out.batch != info->batch || out.rows != info->M || out.columns != info->N) {
    if (!batched) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out: expected [M, N] = [%lld, %lld], got %s", M, N, tensor_shape(*t.out).c_str());
    }
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out: expected [B, M, N] = [%lld, %lld, %lld], got %s", B, M, N, tensor_shape(*t.out).c_str());
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
        return fail(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, "bias: expected out's dtype %s or float32, got %s", dtype_name(info->out_dtype),
                    dtype_name(t.bias->dtype));
      }
      info->has_bias = true;
      info->bias_dtype = t.bias->dtype;
      if (scaledMMStatus_t s = check_vector("bias", every_column, *t.bias, &info->bias_stride, &strides.bias)) return s;
    }
  }
  if (t.a_zero_point) {
    info->has_a_zero_point = true;
    info->a_zero_point_dtype = t.a_zero_point->dtype;
    if (scaledMMStatus_t s =
            check_integers("a_zero_point", rows, {SCALED_MM_DTYPE_INT32, kInt8}, *t.a_zero_point, &info->a_zero_point_stride, &strides.a_zero_point))
      return s;
  }
  if (t.b_zero_point) {
    info->has_b_zero_point = true;
    info->b_zero_point_dtype = t.b_zero_point->dtype;
    if (scaledMMStatus_t s = check_integers("b_zero_point", columns, {SCALED_MM_DTYPE_INT32, kInt8}, *t.b_zero_point, &info->b_zero_point_stride,
                                            &strides.b_zero_point))
      return s;
  }
  if (t.a_row_sums) {
    info->has_a_row_sums = true;
    if (scaledMMStatus_t s =
            check_integers("a_row_sums", every_row, {SCALED_MM_DTYPE_INT32}, *t.a_row_sums, &info->a_row_sums_stride, &strides.a_row_sums))
      return s;
  }
  if (t.b_column_sums) {
    info->has_b_column_sums = true;
    if (scaledMMStatus_t s = check_integers("b_column_sums", every_column, {SCALED_MM_DTYPE_INT32}, *t.b_column_sums, &info->b_column_sums_stride,
                                            &strides.b_column_sums))
      return s;
  }

  // |a - za| <= 255 with a zero point in -128..127 and 128 without one; the sum of K products must stay below 2^31.
  const int64_t largest = (info->has_a_zero_point ? 255 : 128) * (info->has_b_zero_point ? 255 : 128);
  const int64_t bound = (int64_t(1) << 31) - 1;
  if (one_sum && info->K > bound / largest) {
    return fail(SCALED_MM_STATUS_OVERFLOW, "a: expected K <= %lld, beyond which a 32-bit accumulator is not exact %s, got K = %lld",
                static_cast<long long>(bound / largest),
                (info->has_a_zero_point || info->has_b_zero_point) ? "with the zero points given" : "without zero points", K);
  }

  info->a_alignment = t.a->alignment;
  info->b_alignment = t.b->alignment;
  info->out_alignment = t.out->alignment;
  info->constant_b = (t.b->flags & SCALED_MM_TENSOR_CONSTANT) != 0;
  if (info->batch <= 1) {
    strides = {}; // also for an empty batch
  } else if (!info->empty()) {
    fold_batch(info);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

namespace {

// The number of products with zero-point terms of their own; 1 if the whole batch shares them.
int64_t row_term_batches(const ProductInfo& info) {
  const BatchStrides& s = info.batch_strides;
  return s.a || s.a_zero_point || s.a_row_sums ? info.batch : 1;
}

int64_t column_term_batches(const ProductInfo& info) {
  const BatchStrides& s = info.batch_strides;
  return s.b || s.b_zero_point || s.b_column_sums ? info.batch : 1;
}

class Gemm : public Problem {
public:
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (scaledMMStatus_t s = check_no_option(options)) return s;
    if (scaledMMStatus_t s = validate_gemm({t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9]}, &info)) return s;
    variant = info.out_dtype;
    const int64_t row_batches = row_term_batches(info), column_batches = column_term_batches(info);
    info.row_terms_batch_stride = row_batches > 1 ? int32_t(info.M) : 0;
    info.col_terms_batch_stride = column_batches > 1 ? int32_t(info.N) : 0;
    if (info.has_a_zero_point || info.has_b_zero_point) {
      column_terms_offset = (row_batches * info.M + 1) / 2 * 4; // aligned to 16 bytes
      terms_bytes = size_t(4) * column_terms_offset + size_t(8) * column_batches * info.N;
    }
    return SCALED_MM_STATUS_SUCCESS;
  }

  // A batch has as many tiles as one product with the columns of all products, and buckets bound N by how many tiles fill the GPU.
  BucketKey bucket() const override { return {info.M, info.N * info.batch, info.K, info.constant_b ? SCALED_MM_BUCKET_CONSTANT_B : 0}; }

  scaledMMStatus_t workspace(const Kernel& kernel, size_t* bytes) const override {
    *bytes = 0;
    if (kernel.workspace_size == nullptr) return SCALED_MM_STATUS_SUCCESS;
    if (scaledMMStatus_t s = check_workspace_room(kernel.row, {info.M, info.N, info.batch})) return s;
    *bytes = size_t(kernel.workspace_size(info.M, info.N, info.batch));
    return SCALED_MM_STATUS_SUCCESS;
  }

  // For stream-K kernels: int32 sums and two counters for each tile that may be divided, as int8/c3x/gemm.cuh counts them.
  size_t workspace_in_advance(const scaledMMTimeModel_t& time) const override {
    if (time.least_steps == 0) return 0;
    constexpr int64_t kMostTiles = 320;
    const auto count = [](int64_t size, int64_t unit) { return (size + unit - 1) / unit; };
    const int64_t units = count(info.M, time.unit_m) * count(info.N, time.unit_n); // both at most 2^31
    const int64_t tiles = units > kMostTiles / info.batch ? kMostTiles : std::min(kMostTiles, units * info.batch * time.blocks);
    return size_t(tiles * (time.unit_m * time.unit_n / time.blocks) * 4 + tiles * 8 + 256); // 256: both parts are rounded up to 128
  }
};

constexpr OperandSpec kOperands[] = {
    {"out", offsetof(GemmLaunch, out), Role::kOut},
    {"a", offsetof(GemmLaunch, a), Role::kA},
    {"b", offsetof(GemmLaunch, b), Role::kB},
    {"a_scale", offsetof(GemmLaunch, a_scale)},
    {"b_scale", offsetof(GemmLaunch, b_scale)},
    {"bias", offsetof(GemmLaunch, bias)},
    {"a_zero_point", offsetof(GemmLaunch, a_zero_point)},
    {"b_zero_point", offsetof(GemmLaunch, b_zero_point)},
    {"a_row_sums", offsetof(GemmLaunch, a_row_sums)},
    {"b_column_sums", offsetof(GemmLaunch, b_column_sums)},
};

} // namespace

const ProblemKind kGemm = {"GEMM",
                           "",
                           std::size(kOperands),
                           kOperands,
                           true,
                           make_problem<Gemm>,
                           {SCALED_MM_TABLE_GEMM, "", SCALED_MM_BUCKET_CONSTANT_B, "0 or SCALED_MM_BUCKET_CONSTANT_B", "b", false}};

} // namespace scaled_mm
