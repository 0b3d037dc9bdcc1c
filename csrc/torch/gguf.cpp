// The operators of products with a GGUF format's weight for CUDA tensors. Schemas, fake and CPU implementations: scaled_mm/gguf/operators.py.
// Formats and modes are numbers of the C interface: the stable ABI of torch 2.10 loses the memory of every string it hands over.
#include <cstdint>
#include <utility>

#include "torch/plan.h"

using namespace scaled_mm_torch;

namespace {

constexpr int64_t kBlock = 32, kTileRows = 64, kTileBlocks = 8, kPowerBytes = 2 * kTileRows; // of a tile (gguf/formats.cuh)

// How a weight's bytes are to be read.
struct Weight {
  int32_t format;
  int64_t rows, k;
  bool packed, constant;
};

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// uint8 of three dimensions, the last two as given; -1: any.
Argument bytes_argument(const char* name, const Tensor& tensor, int32_t device, const int64_t (&sizes)[3]) {
  Argument given = argument(name, tensor, device);
  if (tensor.scalar_type() != torch::headeronly::ScalarType::Byte) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, std::string(name) + ": expected uint8, got " + dtype_text(int32_t(tensor.scalar_type())));
  }
  bool fits = given.desc.ndim == 3;
  for (int i = 0; fits && i < 3; ++i) fits = sizes[i] == -1 || given.desc.shape[i] == sizes[i];
  if (!fits) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, std::string(name) + ": expected " + list_text(sizes, 3) + " (-1: any), got " +
                                                 list_text(given.desc.shape, given.desc.ndim < 3 ? given.desc.ndim : 3));
  }
  return given;
}

Argument blocks_argument(const char* name, const Tensor& tensor, int32_t device, int32_t format, int64_t rows, int64_t blocks) {
  const int64_t bytes = scaledMMGetBlockBytes(format);
  Argument given = bytes_argument(name, tensor, device, {rows, blocks, bytes});
  scaledMMTensorDesc_t& desc = given.desc;
  if (desc.strides[2] != 1 || (desc.shape[1] > 1 && desc.strides[1] != bytes)) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, std::string(name) + ": expected blocks one after the other, the last two strides " +
                                                   std::to_string(bytes) + " and 1, got strides " + list_text(desc.strides, 3));
  }
  desc.dtype = format;
  desc.ndim = 2;
  desc.shape[1] *= kBlock;
  desc.strides[1] = 1;
  return given;
}

// An enumerator of the C interface, as the operators have it.
int32_t code(const char* name, int64_t value) {
  if (value >= 0 && value <= INT32_MAX) return int32_t(value);
  raise(SCALED_MM_STATUS_BAD_PARAM, std::string(name) + ": expected a number of the C interface, got " + std::to_string(value));
}

Argument weight_argument(const Tensor& tensor, const Weight& weight, int32_t device) {
  if (weight.rows < 0 || weight.k < 0 || weight.k % kBlock) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_SHAPE,
          "weight: expected rows and k of 0 or more, k a multiple of 32, got " + std::to_string(weight.rows) + " and " + std::to_string(weight.k));
  }
  if (weight.rows > INT32_MAX || weight.k > INT32_MAX) { // before anything is reckoned from them
    raise(SCALED_MM_STATUS_BAD_TENSOR_SHAPE,
          "weight: expected rows and k of at most 2147483647, got " + std::to_string(weight.rows) + " and " + std::to_string(weight.k));
  }
  if (weight.format == SCALED_MM_DTYPE_Q8_1 || scaledMMGetBlockBytes(weight.format) == 0) {
    raise(SCALED_MM_STATUS_BAD_PARAM, "fmt: expected the scaledMMDtype_t of a weight's format, got " + std::to_string(weight.format));
  }
  const int64_t blocks = weight.k / kBlock;
  Argument given;
  if (weight.packed) {
    given = bytes_argument("weight", tensor, device,
                           {ceil_div(weight.rows, kTileRows), ceil_div(blocks, kTileBlocks),
                            kTileRows * kTileBlocks * scaledMMGetBlockBytes(weight.format) + kPowerBytes});
    check_contiguous("weight", tensor);
    given.desc.dtype = weight.format;
    given.desc.ndim = 2;
    given.desc.shape[0] = weight.rows;
    given.desc.shape[1] = weight.k;
    given.desc.strides[0] = given.desc.strides[1] = 0;
    given.desc.flags = SCALED_MM_TENSOR_PACKED;
  } else {
    given = blocks_argument("weight", tensor, device, weight.format, weight.rows, blocks);
  }
  if (weight.constant) given.desc.flags |= SCALED_MM_TENSOR_CONSTANT;
  return given;
}

Argument activation_argument(const Tensor& tensor, int32_t device) {
  check_defined("activation", tensor.get());
  if (tensor.scalar_type() == torch::headeronly::ScalarType::Byte) {
    return blocks_argument("activation", tensor, device, SCALED_MM_DTYPE_Q8_1, -1, -1);
  }
  return argument("activation", tensor, device);
}

Tensor gguf_gemm(Tensor weight, Tensor activation, OptionalTensor bias, int64_t fmt, int64_t rows, int64_t k, bool packed, bool constant_weight,
                 torch::headeronly::ScalarType out_dtype, int64_t mode, bool transposed_out) {
  const int32_t device = device_of(weight, "weight");
  Operands o;
  o.push({}); // out
  o.push(weight_argument(weight, {code("fmt", fmt), rows, k, packed, constant_weight}, device));
  o.push(activation_argument(activation, device));
  o.push(argument("bias", bias, device));
  const int32_t dtype = to_dtype(int32_t(out_dtype));
  if (dtype != SCALED_MM_DTYPE_FLOAT16 && dtype != SCALED_MM_DTYPE_BFLOAT16 && dtype != SCALED_MM_DTYPE_FLOAT32) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, std::string("out_dtype: expected float16, bfloat16 or float32, got ") + dtype_text(int32_t(out_dtype)));
  }
  // Enough to size the output; everything else is the core's to check.
  const scaledMMTensorDesc_t& given = o.arguments[2].desc;
  if (given.ndim != 2) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, "activation: expected 2 dimensions [M, K], got " + std::to_string(given.ndim));
  }
  const int64_t tokens = given.shape[0];
  const int64_t sizes[2] = {transposed_out ? tokens : rows, transposed_out ? rows : tokens};
  const int64_t strides[2] = {sizes[1] > 0 ? sizes[1] : 1, 1};
  Tensor out = empty(2, sizes, strides, int32_t(out_dtype), device);
  Argument& result = o.arguments[0];
  result = argument("out", out, device);
  if (transposed_out) { // the core takes out as [rows of the weight, tokens]
    std::swap(result.desc.shape[0], result.desc.shape[1]);
    std::swap(result.desc.strides[0], result.desc.strides[1]);
  }
  run_once(SCALED_MM_GGUF_GEMM, o, code("mode", mode), device);
  return out;
}

void gguf_calculate(int64_t descriptor, Tensor out, Tensor weight, Tensor activation, OptionalTensor bias, OptionalTensor workspace, int64_t fmt,
                    int64_t rows, int64_t k, bool packed, int64_t stream) {
  const Planned plan(descriptor);
  Operands o;
  o.push(argument("out", out, plan.device));
  o.push(weight_argument(weight, {code("fmt", fmt), rows, k, packed, false}, plan.device));
  o.push(activation_argument(activation, plan.device));
  o.push(argument("bias", bias, plan.device));
  plan.calculate(SCALED_MM_GGUF_GEMM, o, workspace, stream);
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(scaled_mm, CUDA, m) {
  m.impl("gguf_gemm", TORCH_BOX(&gguf_gemm));
  m.impl("gguf_calculate", TORCH_BOX(&gguf_calculate));
}
