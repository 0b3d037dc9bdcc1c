// torch.ops.scaled_mm for CUDA tensors, over the C interface and through torch's stable ABI alone: one binary for every torch from 2.10 on.
// Schemas, fake implementations and CPU implementations: scaled_mm/core/operators.py. A kind of product is one entry of the list below.
#include <type_traits>
#include <utility>

#include "torch/plan.h"

using namespace scaled_mm_torch;
using ScalarType = torch::headeronly::ScalarType;

namespace {

struct Shape {
  int ndim;
  int64_t sizes[3];
};

// A kind of product: as scaled_mm/products/<kind>.py describes it.
struct Kind {
  int32_t product;
  int num_inputs;
  uint32_t required;                      // a bit for each input
  int constant;                           // the input that may be a constant weight; -1: none
  bool has_int32_out;                     // besides float16, bfloat16 and float32
  Shape (*out_shape)(const Argument* in); // enough to allocate out; everything else is the core's to check
};

void check_ndim(const char* name, const char* shape, const Argument& given, int32_t ndim) {
  if (given.desc.ndim == ndim) return;
  raise(SCALED_MM_STATUS_BAD_TENSOR_SHAPE,
        std::string(name) + ": expected " + std::to_string(ndim) + " dimensions " + shape + ", got " + std::to_string(given.desc.ndim));
}

int64_t batch_of(const char* name, const char* shape, const Argument& given) {
  if (given.desc.ndim == 3) return given.desc.shape[0];
  check_ndim(name, shape, given, 2);
  return 1;
}

Shape gemm_shape(const Argument* in) {
  const Argument &a = in[0], &b = in[1];
  const int64_t batch_a = batch_of("a", "[M, K] or 3 [B, M, K]", a), batch_b = batch_of("b", "[K, N] or 3 [B, K, N]", b);
  const int64_t rows = a.desc.shape[a.desc.ndim - 2], columns = b.desc.shape[b.desc.ndim - 1];
  if (a.desc.ndim == 2 && b.desc.ndim == 2) return {2, {rows, columns}};
  return {3, {batch_a == 1 ? batch_b : batch_a, rows, columns}};
}

Shape grouped_shape(const Argument* in) {
  check_ndim("a", "[tokens, K]", in[0], 2);
  check_ndim("b", "[E, K, N]", in[1], 3);
  return {2, {in[0].desc.shape[0], in[1].desc.shape[2]}};
}

Shape block_scaled_shape(const Argument* in) {
  check_ndim("a", "[M, K]", in[0], 2);
  check_ndim("b", "[K, N]", in[1], 2);
  return {2, {in[0].desc.shape[0], in[1].desc.shape[1]}};
}

constexpr Kind kGemm = {SCALED_MM_GEMM, 9, 0b11, 1, true, gemm_shape};
constexpr Kind kGrouped = {SCALED_MM_GROUPED_GEMM, 10, 0b100011, -1, true, grouped_shape};
constexpr Kind kGroupedBlockScaled = {SCALED_MM_GROUPED_BLOCK_SCALED_GEMM, 6, 0b101111, -1, false, grouped_shape};
constexpr Kind kBlockScaled = {SCALED_MM_BLOCK_SCALED_GEMM, 5, 0b1111, -1, false, block_scaled_shape};

void check_out_dtype(const Kind& kind, ScalarType out_dtype) {
  const int32_t dtype = to_dtype(int32_t(out_dtype));
  if (dtype == SCALED_MM_DTYPE_FLOAT16 || dtype == SCALED_MM_DTYPE_BFLOAT16 || dtype == SCALED_MM_DTYPE_FLOAT32) return;
  if (dtype == SCALED_MM_DTYPE_INT32 && kind.has_int32_out) return;
  raise(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, std::string("out_dtype: expected float16, bfloat16") +
                                               (kind.has_int32_out ? ", float32 or int32" : " or float32") + ", got " +
                                               dtype_text(int32_t(out_dtype)));
}

Tensor empty_out(const Shape& shape, ScalarType dtype, int32_t device) {
  int64_t strides[3], stride = 1;
  for (int i = shape.ndim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape.sizes[i] > 0 ? shape.sizes[i] : 1;
  }
  return empty(shape.ndim, shape.sizes, strides, int32_t(dtype), device);
}

template <const Kind& kind, int I>
using Input = std::conditional_t<(kind.required >> I & 1) != 0, Tensor, OptionalTensor>;

// The three operators of a kind. I: the indices of its inputs.
template <const Kind& kind, class Indices>
struct Operators;

template <const Kind& kind, size_t... I>
struct Operators<kind, std::index_sequence<I...>> {
  static Operands operands(const Argument& out, bool constant, int32_t device, const Input<kind, I>&... inputs) {
    Operands o;
    o.push(out);
    (o.push(argument(scaledMMGetOperandName(kind.product, 1 + I), inputs, device)), ...);
    if (constant && kind.constant >= 0) o.arguments[1 + kind.constant].desc.flags = SCALED_MM_TENSOR_CONSTANT;
    return o;
  }

  template <class... Rest>
  static int32_t device_of_first(const Tensor& first, const Rest&...) {
    return device_of(first);
  }

  static Tensor functional(Input<kind, I>... inputs, ScalarType out_dtype, bool constant) {
    const int32_t device = device_of_first(inputs...);
    Operands o = operands({}, constant, device, inputs...);
    check_out_dtype(kind, out_dtype);
    Tensor out = empty_out(kind.out_shape(o.arguments + 1), out_dtype, device);
    o.arguments[0] = argument("out", out, device);
    run_once(kind.product, o, 0, device);
    return out;
  }

  static void write(Tensor out, Input<kind, I>... inputs, bool constant) {
    const int32_t device = device_of_first(inputs...);
    run_once(kind.product, operands(argument("out", out, device), constant, device, inputs...), 0, device);
  }

  static void calculate(int64_t descriptor, Tensor out, Input<kind, I>... inputs, OptionalTensor workspace, int64_t stream) {
    const Planned plan(descriptor);
    const Operands o = operands(argument("out", out, plan.device), false, plan.device, inputs...);
    plan.calculate(kind.product, o, workspace, stream);
  }
};

template <const Kind& kind>
using OperatorsOf = Operators<kind, std::make_index_sequence<kind.num_inputs>>;

} // namespace

#define SCALED_MM_IMPL(name, kind)                                                                                                                   \
  m.impl(name, TORCH_BOX(&OperatorsOf<kind>::functional));                                                                                           \
  m.impl(name "_out", TORCH_BOX(&OperatorsOf<kind>::write));                                                                                         \
  m.impl(name "_calculate", TORCH_BOX(&OperatorsOf<kind>::calculate))

STABLE_TORCH_LIBRARY_IMPL(scaled_mm, CUDA, m) {
  SCALED_MM_IMPL("scaled_mm", kGemm);
  SCALED_MM_IMPL("grouped_scaled_mm", kGrouped);
  SCALED_MM_IMPL("block_scaled_mm", kBlockScaled);
  SCALED_MM_IMPL("grouped_block_scaled_mm", kGroupedBlockScaled);
}
