// The block-scaled operators for CUDA tensors. Their schemas, fake implementations and CPU registration: scaled_mm/products/block_scaled_ops.py.
#include "torch/tensors.h"

using namespace scaled_mm_torch;

namespace {

struct Operands {
  Argument out, a, b, a_scale, b_scale, bias;
};

// No kernel asks for a workspace: scaledMMGetWorkspaceSize answers 0.
void calculate(scaledMMDescriptor_t descriptor, const Operands& o, void* stream) {
  check(
      scaledMMCalculateBlockScaledGemm(descriptor, nullptr, 0, o.out.data, o.a.data, o.b.data, o.a_scale.data, o.b_scale.data, o.bias.data, stream));
}

// Plan, run, forget.
void run_once(const Operands& o, int32_t device) {
  scaledMMDescriptor_t descriptor = nullptr;
  check(scaledMMCreateBlockScaledGemmDescriptor(handle_of(device), &descriptor, o.out.get(), o.a.get(), o.b.get(), o.a_scale.get(), o.b_scale.get(),
                                                o.bias.get(), nullptr));
  struct Owner {
    scaledMMDescriptor_t descriptor;
    ~Owner() { scaledMMDestroyDescriptor(descriptor); }
  } owner{descriptor};
  calculate(descriptor, o, current_stream(device));
}

Operands inputs(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, const OptionalTensor& bias, int32_t device) {
  return {{},
          argument("a", a, device),
          argument("b", b, device),
          argument("a_scale", a_scale, device),
          argument("b_scale", b_scale, device),
          argument("bias", bias, device)};
}

void check_matrix(const char* name, const char* shape, const Argument& given) {
  if (given.desc.ndim == 2) return;
  raise(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, std::string(name) + ": expected 2 dimensions " + shape + ", got " + std::to_string(given.desc.ndim));
}

Tensor block_scaled_mm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, OptionalTensor bias, torch::headeronly::ScalarType out_dtype) {
  const int32_t device = device_of(a);
  Operands o = inputs(a, b, a_scale, b_scale, bias, device);
  const int32_t dtype = to_dtype(int32_t(out_dtype));
  if (dtype != SCALED_MM_DTYPE_FLOAT16 && dtype != SCALED_MM_DTYPE_BFLOAT16 && dtype != SCALED_MM_DTYPE_FLOAT32) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_DTYPE, std::string("out_dtype: expected float16, bfloat16 or float32, got ") + dtype_text(int32_t(out_dtype)));
  }
  // Enough to size the output; everything else is the core's to check.
  check_matrix("a", "[M, K]", o.a);
  check_matrix("b", "[K, N]", o.b);
  const int64_t sizes[2] = {o.a.desc.shape[0], o.b.desc.shape[1]};
  const int64_t strides[2] = {sizes[1] > 0 ? sizes[1] : 1, 1};
  Tensor out = empty(2, sizes, strides, int32_t(out_dtype), device);
  o.out = argument("out", out, device);
  run_once(o, device);
  return out;
}

void block_scaled_mm_out(Tensor out, Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, OptionalTensor bias) {
  const int32_t device = device_of(a);
  Operands o = inputs(a, b, a_scale, b_scale, bias, device);
  o.out = argument("out", out, device);
  run_once(o, device);
}

// `descriptor` is the address of a live scaledMMDescriptor_t, `stream` a cudaStream_t or -1 for the current one.
void block_scaled_calculate(int64_t descriptor, Tensor out, Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, OptionalTensor bias, int64_t stream) {
  auto* plan = reinterpret_cast<scaledMMDescriptor_t>(descriptor);
  int32_t device_type = 0, device = 0;
  check(scaledMMGetDevice(plan, &device_type, &device));
  Operands o = inputs(a, b, a_scale, b_scale, bias, device);
  o.out = argument("out", out, device);
  const scaledMMTensorDesc_t* const tensors[] = {o.out.get(), o.a.get(), o.b.get(), o.a_scale.get(), o.b_scale.get(), o.bias.get()};
  check(scaledMMCheckTensors(plan, SCALED_MM_BLOCK_SCALED_GEMM, tensors, int32_t(std::size(tensors))));
  calculate(plan, o, stream == -1 ? current_stream(device) : reinterpret_cast<void*>(stream));
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(scaled_mm, CUDA, m) {
  m.impl("block_scaled_mm", TORCH_BOX(&block_scaled_mm));
  m.impl("block_scaled_mm_out", TORCH_BOX(&block_scaled_mm_out));
  m.impl("block_scaled_calculate", TORCH_BOX(&block_scaled_calculate));
}
