// Products with a weight in a GGUF format: activation [M, K] with M tokens (a of GemmLaunch), weight [N, K] (b), out [N, M] = W A^T.
#include <iterator>

#include "core/status.h"
#include "core/tensors.h"
#include "problems/kinds.h"

namespace scaled_mm {
namespace {

constexpr int64_t kBlock = 32; // values of a GGUF block

#define DTYPE_OF_FORMAT(NAME, ...) SCALED_MM_DTYPE_##NAME,
constexpr Dtypes kWeightFormats = {SCALED_MM_GGUF_WEIGHT_FORMATS(DTYPE_OF_FORMAT)};
#undef DTYPE_OF_FORMAT

// Checks of a tensor of GGUF blocks beyond check_operand.
scaledMMStatus_t check_blocks(const char* name, const scaledMMTensorDesc_t& t) {
  if (t.shape[1] % kBlock) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected K a multiple of 32, the values of a block, got %s", name, tensor_shape(t).c_str());
  }
  if ((t.flags & SCALED_MM_TENSOR_PACKED) == 0 && t.shape[1] > 0 && t.strides[1] != 1) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_STRIDES,
                "%s: expected stride 1 in dimension 1, for the blocks of a row lie one after the other, got %lld", name, number(t.strides[1]));
  }
  return SCALED_MM_STATUS_SUCCESS;
}

class Gguf : public Problem {
public:
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    info.batch = 1;
    info.blocks = &blocks_;
    if (scaledMMStatus_t s = check_weight(t[1])) return s;
    if (scaledMMStatus_t s = check_activation(t[2])) return s;
    if (scaledMMStatus_t s = check_out(t[0])) return s;
    if (scaledMMStatus_t s = check_bias(t[3])) return s;
    variant = blocks_.format;
    return check_mode(options.option);
  }

  void settle(const Table& table) override {
    if (mode_ != SCALED_MM_GGUF_AUTO) return;
    const int32_t mode = table.find_mode(info.M);
    const bool keeps = mode == SCALED_MM_GGUF_W16A16 && (blocks_.out_dtype == SCALED_MM_DTYPE_FLOAT32 || !blocks_.packed);
    set_mode(keeps ? int32_t(SCALED_MM_GGUF_W4A16) : mode);
  }

  BucketKey bucket() const override {
    const bool rounds = mode_ == SCALED_MM_GGUF_W16A16 && blocks_.packed; // unpacked weights stay exact
    int32_t serves = mode_ == SCALED_MM_GGUF_W4A8 ? SCALED_MM_BUCKET_W4A8 : rounds ? SCALED_MM_BUCKET_W16A16 : SCALED_MM_BUCKET_W4A16;
    if (blocks_.format == SCALED_MM_DTYPE_Q4_1 || blocks_.format == SCALED_MM_DTYPE_Q5_1) serves |= SCALED_MM_BUCKET_MINIMA;
    return {info.M, info.N, info.K, serves};
  }

  const char* misfit(const RowNeeds&) const override { return nullptr; } // GGUF kernels take any operands

  scaledMMStatus_t workspace(const Kernel& kernel, size_t* bytes) const override {
    *bytes = 0;
    if (kernel.block_workspace_size == nullptr) return SCALED_MM_STATUS_SUCCESS;
    const int64_t matrices[][2] = {{info.M, info.N}, {info.M, info.K}, {info.N, info.K}};
    for (const auto& [rows, columns] : matrices) {
      if (scaledMMStatus_t s = check_workspace_room(kernel.row, {rows, columns})) return s;
    }
    *bytes = size_t(kernel.block_workspace_size(info.M, info.N, info.K, blocks_, info.multiprocessors));
    return SCALED_MM_STATUS_SUCCESS;
  }

  const char* mode() const override { return mode_ == SCALED_MM_GGUF_W4A8 ? "w4a8 " : mode_ == SCALED_MM_GGUF_W4A16 ? "w4a16 " : "w16a16 "; }

private:
  scaledMMStatus_t check_weight(const scaledMMTensorDesc_t* t);
  scaledMMStatus_t check_activation(const scaledMMTensorDesc_t* t);
  scaledMMStatus_t check_out(const scaledMMTensorDesc_t* t);
  scaledMMStatus_t check_bias(const scaledMMTensorDesc_t* t);
  scaledMMStatus_t check_mode(int32_t mode);

  // AUTO is settled later, by the table (settle).
  void set_mode(int32_t mode) {
    mode_ = mode;
    blocks_.quantize = mode == SCALED_MM_GGUF_W4A8 && blocks_.activation != SCALED_MM_DTYPE_Q8_1;
    blocks_.round = mode == SCALED_MM_GGUF_W16A16;
  }

  int32_t mode_ = SCALED_MM_GGUF_AUTO; // scaledMMGgufMode_t
  BlockOperands blocks_{};
};

scaledMMStatus_t Gguf::check_weight(const scaledMMTensorDesc_t* t) {
  if (scaledMMStatus_t s = check_operand("weight", "[N, K]", kWeightFormats, 2, t)) return s;
  if (scaledMMStatus_t s = check_blocks("weight", *t)) return s;
  info.N = t->shape[0];
  info.K = t->shape[1];
  blocks_.format = t->dtype;
  blocks_.packed = (t->flags & SCALED_MM_TENSOR_PACKED) != 0;
  info.constant_b = (t->flags & SCALED_MM_TENSOR_CONSTANT) != 0;
  if (blocks_.packed && t->alignment < kPackedAlignment) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT, "weight: expected an alignment of at least %lld bytes for packed tiles, got %lld",
                number(kPackedAlignment), number(t->alignment));
  }
  if (!blocks_.packed) {
    info.b_stride_n = t->strides[0];
    info.b_stride_k = scaledMMGetBlockBytes(t->dtype);
  }
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t Gguf::check_activation(const scaledMMTensorDesc_t* t) {
  if (scaledMMStatus_t s = check_operand("activation", "[M, K]",
                                         {SCALED_MM_DTYPE_Q8_1, SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32}, 2, t))
    return s;
  const bool blocks = t->dtype == SCALED_MM_DTYPE_Q8_1;
  if (blocks) {
    if (scaledMMStatus_t s = check_blocks("activation", *t)) return s;
  }
  if (t->shape[1] != info.K) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "activation: expected [M, K] with K = %lld as in weight [N, K], got %s", number(info.K),
                tensor_shape(*t).c_str());
  }
  info.M = t->shape[0];
  blocks_.activation = t->dtype;
  info.a_stride_m = t->strides[0];
  info.a_stride_k = blocks ? scaledMMGetBlockBytes(t->dtype) : t->strides[1];
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t Gguf::check_out(const scaledMMTensorDesc_t* t) {
  if (scaledMMStatus_t s = check_operand("out", "[N, M]", {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32}, 2, t))
    return s;
  if (t->shape[0] != info.N || t->shape[1] != info.M) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "out: expected [N, M] = [%lld, %lld], got %s", number(info.N), number(info.M),
                tensor_shape(*t).c_str());
  }
  if (scaledMMStatus_t s = check_no_overlap("out", *t)) return s;
  blocks_.out_dtype = info.out_dtype = t->dtype;
  info.out_stride_n = t->strides[0];
  info.out_stride_m = t->strides[1];
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t Gguf::check_bias(const scaledMMTensorDesc_t* t) {
  if (t == nullptr) return SCALED_MM_STATUS_SUCCESS;
  const int32_t out_dtype = blocks_.out_dtype;
  if (t->dtype != out_dtype && t->dtype != SCALED_MM_DTYPE_FLOAT32) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, "bias: expected out's dtype %s or float32, got %s", dtype_name(out_dtype), dtype_name(t->dtype));
  }
  if (scaledMMStatus_t s = check_operand("bias", "[N]", {out_dtype, SCALED_MM_DTYPE_FLOAT32}, 1, t)) return s;
  if (t->shape[0] != info.N) {
    return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "bias: expected [N] with N = %lld as in weight [N, K], got %s", number(info.N),
                tensor_shape(*t).c_str());
  }
  info.has_bias = true;
  info.bias_dtype = t->dtype;
  info.bias_stride = t->strides[0];
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t Gguf::check_mode(int32_t mode) {
  if (mode < SCALED_MM_GGUF_AUTO || mode > SCALED_MM_GGUF_W16A16) {
    return fail(SCALED_MM_STATUS_BAD_PARAM, "mode: expected a scaledMMGgufMode_t, got %d", int(mode));
  }
  const int32_t dtype = blocks_.activation;
  if (dtype == SCALED_MM_DTYPE_Q8_1) {
    if (mode > SCALED_MM_GGUF_W4A8) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "mode: expected auto or w4a8 with %s activations, got %s", dtype_name(dtype),
                  mode == SCALED_MM_GGUF_W4A16 ? "w4a16" : "w16a16");
    }
    mode = SCALED_MM_GGUF_W4A8;
  } else if (dtype == SCALED_MM_DTYPE_FLOAT32) {
    if (mode == SCALED_MM_GGUF_W4A16) {
      return fail(SCALED_MM_STATUS_BAD_PARAM, "mode: expected auto, w4a8 or w16a16 with %s activations, got w4a16", dtype_name(dtype));
    }
    if (mode == SCALED_MM_GGUF_AUTO) mode = SCALED_MM_GGUF_W16A16;
  }
  set_mode(mode);
  return SCALED_MM_STATUS_SUCCESS;
}

constexpr OperandSpec kOperands[] = {
    {"out", offsetof(GemmLaunch, out), Role::kOut},
    {"weight", offsetof(GemmLaunch, b), Role::kB},
    {"activation", offsetof(GemmLaunch, a), Role::kA},
    {"bias", offsetof(GemmLaunch, bias)},
};

constexpr int32_t kBucketFlags = SCALED_MM_BUCKET_W4A8 | SCALED_MM_BUCKET_W4A16 | SCALED_MM_BUCKET_W16A16 | SCALED_MM_BUCKET_MINIMA;

} // namespace

const ProblemKind kGguf = {"GGUF GEMM",
                           "GGUF ",
                           std::size(kOperands),
                           kOperands,
                           false,
                           make_problem<Gguf>,
                           {SCALED_MM_TABLE_GGUF_GEMM, " of GGUF products", kBucketFlags,
                            "of at most one of SCALED_MM_BUCKET_W4A8, _W4A16 and _W16A16, and _MINIMA or not", "mode or format", true}};

} // namespace scaled_mm
