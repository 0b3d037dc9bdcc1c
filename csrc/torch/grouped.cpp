// The grouped operators for CUDA tensors. Their schemas, fake implementations and CPU registration: scaled_mm/products/grouped_ops.py.
#include "torch/tensors.h"

using namespace scaled_mm_torch;

namespace {

struct Operands {
  Argument out, a, b, a_scale, b_scale, bias, expert_offsets;
};

void calculate(scaledMMDescriptor_t descriptor, const Operands& o, void* workspace, size_t workspace_size, void* stream) {
  check(scaledMMCalculateGroupedGemm(descriptor, workspace, workspace_size, o.out.data, o.a.data, o.b.data, o.a_scale.data, o.b_scale.data,
                                     o.bias.data, o.expert_offsets.data, stream));
}

// Plan, run, forget.
void run_once(const Operands& o, int32_t device) {
  scaledMMDescriptor_t descriptor = nullptr;
  check(scaledMMCreateGroupedGemmDescriptor(handle_of(device), &descriptor, o.out.get(), o.a.get(), o.b.get(), o.a_scale.get(), o.b_scale.get(),
                                            o.bias.get(), o.expert_offsets.get(), nullptr));
  struct Owner {
    scaledMMDescriptor_t descriptor;
    ~Owner() { scaledMMDestroyDescriptor(descriptor); }
  } owner{descriptor};
  size_t bytes = 0;
  check(scaledMMGetWorkspaceSize(descriptor, &bytes));
  void* stream = current_stream(device);
  if (bytes == 0) return calculate(descriptor, o, nullptr, 0, stream);
  const int64_t size = int64_t(bytes), stride = 1;
  Tensor workspace = empty(1, &size, &stride, /* int8 */ 1, device);
  calculate(descriptor, o, workspace.data_ptr(), bytes, stream);
}

Operands inputs(const Tensor& a, const Tensor& b, const OptionalTensor& a_scale, const OptionalTensor& b_scale, const Tensor& expert_offsets,
                const OptionalTensor& bias, int32_t device) {
  return {{},
          argument("a", a, device),
          argument("b", b, device),
          argument("a_scale", a_scale, device),
          argument("b_scale", b_scale, device),
          argument("bias", bias, device),
          argument("expert_offsets", expert_offsets, device)};
}

void check_dims(const char* name, int32_t ndim, const char* shape, const Argument& given) {
  if (given.desc.ndim == ndim) return;
  raise(SCALED_MM_STATUS_BAD_TENSOR_SHAPE,
        std::string(name) + ": expected " + std::to_string(ndim) + " dimensions " + shape + ", got " + std::to_string(given.desc.ndim));
}

Tensor grouped_scaled_mm(Tensor a, Tensor b, OptionalTensor a_scale, OptionalTensor b_scale, Tensor expert_offsets, OptionalTensor bias,
                         torch::headeronly::ScalarType out_dtype) {
  const int32_t device = device_of(a);
  Operands o = inputs(a, b, a_scale, b_scale, expert_offsets, bias, device);
  if (to_dtype(int32_t(out_dtype)) < 0 || out_dtype == torch::headeronly::ScalarType::Char) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_DTYPE,
          std::string("out_dtype: expected float16, bfloat16, float32 or int32, got ") + dtype_text(int32_t(out_dtype)));
  }
  // Enough to size the output; everything else is the core's to check.
  check_dims("a", 2, "[tokens, K]", o.a);
  check_dims("b", 3, "[E, K, N]", o.b);
  const int64_t sizes[2] = {o.a.desc.shape[0], o.b.desc.shape[2]};
  const int64_t strides[2] = {sizes[1] > 0 ? sizes[1] : 1, 1};
  Tensor out = empty(2, sizes, strides, int32_t(out_dtype), device);
  o.out = argument("out", out, device);
  run_once(o, device);
  return out;
}

void grouped_scaled_mm_out(Tensor out, Tensor a, Tensor b, OptionalTensor a_scale, OptionalTensor b_scale, Tensor expert_offsets,
                           OptionalTensor bias) {
  const int32_t device = device_of(a);
  Operands o = inputs(a, b, a_scale, b_scale, expert_offsets, bias, device);
  o.out = argument("out", out, device);
  run_once(o, device);
}

// `descriptor` is the address of a live scaledMMDescriptor_t, `stream` a cudaStream_t or -1 for the current one.
void grouped_calculate(int64_t descriptor, Tensor out, Tensor a, Tensor b, OptionalTensor a_scale, OptionalTensor b_scale, Tensor expert_offsets,
                       OptionalTensor bias, OptionalTensor workspace, int64_t stream) {
  auto* plan = reinterpret_cast<scaledMMDescriptor_t>(descriptor);
  int32_t device_type = 0, device = 0;
  check(scaledMMGetDevice(plan, &device_type, &device));
  Operands o = inputs(a, b, a_scale, b_scale, expert_offsets, bias, device);
  o.out = argument("out", out, device);
  const scaledMMTensorDesc_t* const tensors[] = {o.out.get(),           o.a.get(), o.b.get(), o.a_scale.get(), o.b_scale.get(), o.bias.get(),
                                                 o.expert_offsets.get()};
  check(scaledMMCheckTensors(plan, SCALED_MM_GROUPED_GEMM, tensors, int32_t(std::size(tensors))));
  size_t bytes = 0;
  void* memory = nullptr;
  if (workspace.has_value()) {
    const Argument w = argument("workspace", *workspace, device);
    check_contiguous("workspace", *workspace);
    memory = w.data;
    bytes = size_t(workspace->numel()) * workspace->element_size();
  }
  calculate(plan, o, memory, bytes, stream == -1 ? current_stream(device) : reinterpret_cast<void*>(stream));
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(scaled_mm, CUDA, m) {
  m.impl("grouped_scaled_mm", TORCH_BOX(&grouped_scaled_mm));
  m.impl("grouped_scaled_mm_out", TORCH_BOX(&grouped_scaled_mm_out));
  m.impl("grouped_calculate", TORCH_BOX(&grouped_calculate));
}
