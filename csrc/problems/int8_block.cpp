// Groupwise quantization to int8: a scale for a block of 128 or 64 elements of a row, or for 128 x 128 or 64 x 64 elements of a weight.
#include <iterator>

#include "problems/kinds.h"
#include "problems/own_kernel.h"

namespace scaled_mm {
namespace {

class Int8Block : public OwnKernelProblem<4> {
public:
  scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* t, const Options& options) override {
    if (scaledMMStatus_t s = check_option("dim", "scaledMMInt8BlockDim_t", options, 7)) return s;
    const bool is_weight = (options.option & SCALED_MM_INT8_BLOCK_WEIGHT) != 0;
    const int64_t block = (options.option & SCALED_MM_INT8_BLOCK_SMALL) != 0 ? 64 : 128;
    operands_.function = options.option;
    info.rowwise = &operands_;
    const char* const shape = is_weight ? "[N, K] or [B, N, K]" : "[M, K]";
    if (scaledMMStatus_t s = check_operand("x", shape, kFloatDtypes, is_weight ? -1 : 2, t[1])) return s;
    const scaledMMTensorDesc_t& x = *t[1];
    if (x.ndim != 2 && x.ndim != 3) {
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "x: expected 2 or 3 dimensions %s, got %d: %s", shape, int(x.ndim), tensor_shape(x).c_str());
    }
    const int n = x.ndim - 2, k = x.ndim - 1;
    info.batch = n ? x.shape[0] : 1;
    info.M = x.shape[n];
    info.N = x.shape[k];
    variant = info.out_dtype = x.dtype;
    int64_t sizes[3] = {info.batch, info.M, info.N};
    if (scaledMMStatus_t s = written("out", SCALED_MM_DTYPE_INT8, x.ndim, sizes + 1 - n, t[0])) return s;
    if (is_weight) sizes[1] = blocks_along(sizes[1], block);
    sizes[2] = blocks_along(sizes[2], block);
    if (scaledMMStatus_t s = written("out_scale", SCALED_MM_DTYPE_FLOAT32, x.ndim, sizes + 1 - n, t[2])) return s;
    if (t[3] != nullptr && is_weight) return fail(SCALED_MM_STATUS_BAD_PARAM, "expert_offsets: expected none for a weight, got a tensor");
    if (scaledMMStatus_t s = check_expert_offsets(t[3], &operands_.num_experts)) return s;
    info.batch_strides.a = n ? stride_along(x, 0) : 0;
    info.batch_strides.out = n ? stride_along(*t[0], 0) : 0;
    info.batch_strides.a_scale = n ? stride_along(*t[2], 0) : 0;
    info.a_stride_m = stride_along(x, n);
    info.a_stride_k = stride_along(x, k);
    info.out_stride_m = stride_along(*t[0], n);
    info.out_stride_n = stride_along(*t[0], k);
    info.a_scale_stride = stride_along(*t[2], n);
    info.a_scale_stride_k = stride_along(*t[2], k);
    return SCALED_MM_STATUS_SUCCESS;
  }

private:
  static int64_t blocks_along(int64_t size, int64_t block) { return (size + block - 1) / block; }

  static scaledMMStatus_t written(const char* name, int32_t dtype, int32_t ndim, const int64_t* sizes, const scaledMMTensorDesc_t* t) {
    scaledMMTensorDesc_t expected = {};
    expected.ndim = ndim;
    for (int i = 0; i < ndim; ++i) expected.shape[i] = sizes[i];
    const std::string shape = tensor_shape(expected);
    if (scaledMMStatus_t s = check_operand(name, shape.c_str(), {dtype}, ndim, t)) return s;
    for (int i = 0; i < ndim; ++i) {
      if (t->shape[i] == sizes[i]) continue;
      return fail(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "%s: expected %s, got %s", name, shape.c_str(), tensor_shape(*t).c_str());
    }
    return check_no_overlap(name, *t);
  }

  RowwiseOperands operands_{};
};

constexpr OperandSpec kOperands[] = {{"out", offsetof(GemmLaunch, out), Role::kOut},
                                     {"x", offsetof(GemmLaunch, a)},
                                     {"out_scale", offsetof(GemmLaunch, rowwise_pointers) + offsetof(RowwisePointers, out_scale), Role::kWritten},
                                     {"expert_offsets", offsetof(GemmLaunch, rowwise_pointers) + offsetof(RowwisePointers, expert_offsets)}};

} // namespace

const ProblemKind kInt8Block = {"groupwise INT8 quantizer", "row-wise ", std::size(kOperands), kOperands, false, make_problem<Int8Block>, {}};

} // namespace scaled_mm
