// Row-wise operators: quantizers, norms and activations of the rows of x. No table lists their kernels: there is one for each kind and dtype of x.
#include <cfloat>
#include <iterator>

#include "core/status.h"
#include "core/tensors.h"
#include "problems/kinds.h"
#include "problems/own_kernel.h"

namespace scaled_mm {
namespace {

constexpr Dtypes kFloats = {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32};
constexpr Dtypes kInt8 = {SCALED_MM_DTYPE_INT8};

// The operands of any of the three kinds; nullptr: absent.
struct RowwiseTensors {
  const scaledMMTensorDesc_t *out, *x, *residual, *vector, *offset, *scale, *zero_point, *out_scale, *out_zero_point, *out_row_sums, *total,
      *expert_offsets;
};

// Strides of a matrix; those of a dimension of size 1 are meaningless, 0 is used.
RowwiseStrides strides_of(const scaledMMTensorDesc_t& t) { return {t.shape[0] > 1 ? t.strides[0] : 0, t.shape[1] > 1 ? t.strides[1] : 0}; }

class Rowwise : public Problem {
public:
  Rowwise(int kernel, const char* vector) : kernel_(kernel), vector_(vector) {}

  BucketKey bucket() const override { return {info.M, info.N, 0, 0}; }
  // Rows without elements still have outputs: scales, zero points, row sums.
  bool empty() const override {
    return info.M == 0 || (info.N == 0 && operands_.output != SCALED_MM_ROWWISE_TOKEN && operands_.output != SCALED_MM_ROWWISE_TOKEN_ASYMMETRIC &&
                           operands_.output != SCALED_MM_ROWWISE_STATIC);
  }
  const char* own_kernel() const override { return kRowwiseKernels[kernel_]; }
  KernelSlot* own_slot(Arch* arch) const override { return &arch->rowwise[kernel_][variant]; }

protected:
  scaledMMStatus_t validate(const RowwiseTensors& t, const Options& options, bool takes(int32_t function), bool gives(int32_t output));

private:
  scaledMMStatus_t matrix(const char* name, const char* shape, Dtypes dtypes, int64_t columns, const scaledMMTensorDesc_t* t,
                          RowwiseStrides* strides);
  scaledMMStatus_t vector(const char* name, const scaledMMTensorDesc_t& t, int64_t* stride);
  scaledMMStatus_t of_rows(const char* name, Dtypes dtypes, bool one_value, const scaledMMTensorDesc_t& t, int64_t* stride);
  scaledMMStatus_t parameter(const char* name, Dtypes dtypes, const scaledMMTensorDesc_t& t, int64_t* stride);
  scaledMMStatus_t outputs(const RowwiseTensors& t);
  scaledMMStatus_t absent(const char* name, const char* without, const scaledMMTensorDesc_t* t);

  const int kernel_;         // index in kRowwiseKernels
  const char* const vector_; // the operand's name
  RowwiseOperands operands_{};
};

scaledMMStatus_t Rowwise::absent(const char* name, const char* without, const scaledMMTensorDesc_t* t) {
  if (t == nullptr) return SCALED_MM_STATUS_SUCCESS;
  return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected none %s, got a tensor", name, without);
}

scaledMMStatus_t Rowwise::matrix(const char* name, const char* shape, Dtypes dtypes, int64_t columns, const scaledMMTensorDesc_t* t,
                                 RowwiseStrides* strides) {
  if (scaledMMStatus_t s = check_operand(name, shape, dtypes, 2, t)) return s;
  if (t->shape[0] != info.M || t->shape[1] != columns) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s = [%lld, %lld], got %s", name, shape, number(info.M), number(columns),
                tensor_shape(*t).c_str());
  }
  *strides = strides_of(*t);
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t Rowwise::vector(const char* name, const scaledMMTensorDesc_t& t, int64_t* stride) {
  // check_tensor allows flags for a tensor named weight, because a GGUF weight has them.
  if (t.flags != 0) return fail(SCALED_MM_STATUS_BAD_PARAM, "%s: expected flags 0, got %lld", name, number(t.flags));
  if (scaledMMStatus_t s = check_operand(name, "[N]", kFloats, 1, &t)) return s;
  if (t.shape[0] != info.N) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected [N] = [%lld], got %s", name, number(info.N), tensor_shape(t).c_str());
  }
  *stride = t.shape[0] > 1 ? t.strides[0] : 0;
  return SCALED_MM_STATUS_SUCCESS;
}

// A value for each row, or one for all.
scaledMMStatus_t Rowwise::of_rows(const char* name, Dtypes dtypes, bool one_value, const scaledMMTensorDesc_t& t, int64_t* stride) {
  if (scaledMMStatus_t s = check_operand(name, "[M]", dtypes, -1, &t)) return s;
  int64_t batch = 0;
  return check_vector(name, {"M", info.M, true, one_value, -1, false, "x"}, t, stride, &batch);
}

// A static scale or zero point: of each row, of each column, or one value.
scaledMMStatus_t Rowwise::parameter(const char* name, Dtypes dtypes, const scaledMMTensorDesc_t& t, int64_t* stride) {
  if (operands_.output == SCALED_MM_ROWWISE_STATIC) return of_rows(name, dtypes, true, t, stride);
  if (scaledMMStatus_t s = check_operand(name, "[N]", dtypes, -1, &t)) return s;
  int64_t batch = 0;
  return check_vector(name, {"N", info.N, false, true, -1}, t, stride, &batch);
}

// What the output mode needs and what it must not have.
scaledMMStatus_t Rowwise::outputs(const RowwiseTensors& t) {
  const int32_t output = operands_.output;
  const bool of_row = output == SCALED_MM_ROWWISE_TOKEN || output == SCALED_MM_ROWWISE_TOKEN_ASYMMETRIC;
  const bool asymmetric = output == SCALED_MM_ROWWISE_TOKEN_ASYMMETRIC, given = output == SCALED_MM_ROWWISE_STATIC;
  const bool divides = given || output == SCALED_MM_ROWWISE_STATIC_COLUMNS;
  struct Entry {
    const char* name;
    const scaledMMTensorDesc_t* tensor;
    bool wanted, allowed;
    int32_t dtype;
  };
  for (const Entry& e : {Entry{"out_scale", t.out_scale, of_row, of_row, SCALED_MM_DTYPE_FLOAT32},
                         Entry{"out_zero_point", t.out_zero_point, asymmetric, asymmetric, SCALED_MM_DTYPE_INT32},
                         Entry{"out_row_sums", t.out_row_sums, asymmetric, asymmetric || given, SCALED_MM_DTYPE_INT32}}) {
    if (!e.allowed) {
      if (scaledMMStatus_t s = absent(e.name, "with this output", e.tensor)) return s;
    }
    if (e.tensor == nullptr) {
      if (!e.wanted) continue;
      return fail(SCALED_MM_STATUS_NULL_POINTER, "%s: expected a tensor [M] with this output, got a null pointer", e.name);
    }
    int64_t stride = 0;
    if (scaledMMStatus_t s = of_rows(e.name, {e.dtype}, false, *e.tensor, &stride)) return s;
    if (info.M > 1 && stride != 1) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "%s: expected one row's value after the other, got stride %lld", e.name, number(stride));
    }
  }
  if (!divides) {
    if (scaledMMStatus_t s = absent("scale", "without static quantization", t.scale)) return s;
    return absent("zero_point", "without static quantization", t.zero_point);
  }
  if (t.scale == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "scale: expected a tensor with static quantization, got a null pointer");
  if (scaledMMStatus_t s = parameter("scale", {SCALED_MM_DTYPE_FLOAT32}, *t.scale, &operands_.scale_stride)) return s;
  if (t.zero_point == nullptr) return SCALED_MM_STATUS_SUCCESS;
  operands_.zero_point_dtype = t.zero_point->dtype;
  return parameter("zero_point", {SCALED_MM_DTYPE_INT8, SCALED_MM_DTYPE_INT32}, *t.zero_point, &operands_.zero_point_stride);
}

scaledMMStatus_t Rowwise::validate(const RowwiseTensors& t, const Options& options, bool takes(int32_t function), bool gives(int32_t output)) {
  if (!takes(options.option)) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "function: expected a scaledMMRowwise_t of this kind, got %d", int(options.option));
  }
  if (!gives(options.output)) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "output: expected a scaledMMRowwiseOutput_t of this kind, got %d", int(options.output));
  }
  const bool gated = options.option >= SCALED_MM_SILU_AND_MUL, adds = options.option == SCALED_MM_ADD_RMS_NORM;
  const bool norm = adds || options.option == SCALED_MM_RMS_NORM;
  if (!(options.epsilon >= 0 && options.epsilon <= (norm ? FLT_MAX : 0))) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "epsilon: expected %s, got %g",
                norm ? "a number from 0 to the largest float32" : "0, for this function has none", options.epsilon);
  }
  operands_.function = options.option;
  operands_.output = options.output;
  operands_.epsilon = options.epsilon;
  if (scaledMMStatus_t s = check_operand("x", gated ? "[M, 2 N]" : "[M, N]", kFloats, 2, t.x)) return s;
  if (gated && t.x->shape[1] % 2) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "x: expected [M, 2 N], got %s", tensor_shape(*t.x).c_str());
  }
  info.M = t.x->shape[0];
  info.N = t.x->shape[1] / (gated ? 2 : 1);
  info.batch = 1;
  if (info.N > kMostRowElements) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "x: expected rows of at most %d elements, got %s", kMostRowElements, tensor_shape(*t.x).c_str());
  }
  info.rowwise = &operands_;
  operands_.x = strides_of(*t.x);
  variant = info.out_dtype = t.x->dtype;
  const bool cast = options.output == SCALED_MM_ROWWISE_CAST;
  if (scaledMMStatus_t s = matrix("out", "[M, N]", cast ? Dtypes{t.x->dtype} : kInt8, info.N, t.out, &operands_.out)) return s;
  if (scaledMMStatus_t s = check_no_overlap("out", *t.out)) return s;
  if (adds) {
    if (scaledMMStatus_t s = matrix("residual", "[M, N]", {t.x->dtype}, info.N, t.residual, &operands_.residual)) return s;
    if (scaledMMStatus_t s = matrix("total", "[M, N]", {t.x->dtype}, info.N, t.total, &operands_.total)) return s;
    if (scaledMMStatus_t s = check_no_overlap("total", *t.total)) return s;
  } else {
    if (scaledMMStatus_t s = absent("residual", "with this function", t.residual)) return s;
    if (scaledMMStatus_t s = absent("total", "with this function", t.total)) return s;
  }
  if (t.vector != nullptr) {
    if (scaledMMStatus_t s = vector(vector_, *t.vector, &operands_.vector_stride)) return s;
    operands_.vector_dtype = t.vector->dtype;
  }
  if (t.offset != nullptr) {
    if (t.vector == nullptr) return fail(SCALED_MM_STATUS_BAD_PARAM, "offset: expected none without a %s, got a tensor", vector_);
    if (scaledMMStatus_t s = vector("offset", *t.offset, &operands_.offset_stride)) return s;
    if (scaledMMStatus_t s = check_dtype("offset", {t.vector->dtype}, *t.offset)) return s;
  }
  if (scaledMMStatus_t s = check_expert_offsets(t.expert_offsets, &operands_.num_experts)) return s;
  return outputs(t);
}

constexpr size_t at(size_t field) { return offsetof(GemmLaunch, rowwise_pointers) + field; }
#define AT(field) at(offsetof(RowwisePointers, field))

class Quantize : public Rowwise {
public:
  Quantize() : Rowwise(0, "factor") {}
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    return Rowwise::validate(
        {t[0], t[1], nullptr, t[2], t[3], t[4], t[5], t[6], t[7], t[8], nullptr, nullptr}, options,
        [](int32_t f) { return f == SCALED_MM_QUANTIZE_INT8; },
        [](int32_t output) { return output > SCALED_MM_ROWWISE_CAST && output <= SCALED_MM_ROWWISE_STATIC_COLUMNS; });
  }
};

bool casts_or_quantizes(int32_t output) {
  return output == SCALED_MM_ROWWISE_CAST || output == SCALED_MM_ROWWISE_TOKEN || output == SCALED_MM_ROWWISE_STATIC;
}

class Norm : public Rowwise {
public:
  Norm() : Rowwise(1, "weight") {}
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (t[3] == nullptr) return fail(SCALED_MM_STATUS_NULL_POINTER, "weight: expected a tensor [N], got a null pointer");
    return Rowwise::validate(
        {t[0], t[1], t[2], t[3], nullptr, t[4], t[5], t[6], nullptr, nullptr, t[7], nullptr}, options,
        [](int32_t f) { return f == SCALED_MM_RMS_NORM || f == SCALED_MM_ADD_RMS_NORM; }, casts_or_quantizes);
  }
};

class Activation : public Rowwise {
public:
  Activation() : Rowwise(2, "factor") {}
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    return Rowwise::validate(
        {t[0], t[1], nullptr, nullptr, nullptr, t[2], t[3], t[4], nullptr, nullptr, nullptr, t[5]}, options,
        [](int32_t f) { return f >= SCALED_MM_SILU_AND_MUL && f <= SCALED_MM_GELU_TANH_AND_MUL; }, casts_or_quantizes);
  }
};

constexpr OperandSpec kOut = {"out", offsetof(GemmLaunch, out), Role::kOut}, kX = {"x", offsetof(GemmLaunch, a)};
constexpr OperandSpec kScale = {"scale", AT(scale)}, kZeroPoint = {"zero_point", AT(zero_point)};
constexpr OperandSpec kOutScale = {"out_scale", AT(out_scale), Role::kWritten};

constexpr OperandSpec kQuantizeOperands[] = {kOut,
                                             kX,
                                             {"factor", AT(vector)},
                                             {"offset", AT(offset)},
                                             kScale,
                                             kZeroPoint,
                                             kOutScale,
                                             {"out_zero_point", AT(out_zero_point), Role::kWritten},
                                             {"out_row_sums", AT(out_row_sums), Role::kWritten}};
constexpr OperandSpec kNormOperands[] = {
    kOut, kX, {"residual", AT(residual)}, {"weight", AT(vector)}, kScale, kZeroPoint, kOutScale, {"total", AT(total), Role::kWritten, 0b110}};
constexpr OperandSpec kActivationOperands[] = {kOut, kX, kScale, kZeroPoint, kOutScale, {"expert_offsets", AT(expert_offsets)}};

} // namespace

const ProblemKind kRowwiseQuantize = {"row-wise quantizer",   "row-wise ", std::size(kQuantizeOperands), kQuantizeOperands, false,
                                      make_problem<Quantize>, {}};
const ProblemKind kRowwiseNorm = {"row-wise norm", "row-wise ", std::size(kNormOperands), kNormOperands, false, make_problem<Norm>, {}};
const ProblemKind kRowwiseActivation = {"row-wise activation",    "row-wise ", std::size(kActivationOperands), kActivationOperands, false,
                                        make_problem<Activation>, {}};

} // namespace scaled_mm
