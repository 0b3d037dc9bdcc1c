// torch.ops.scaled_mm for CUDA tensors, over the C interface and through torch's stable ABI alone: one binary for every
// torch from 2.10 on. The schemas, their fake implementations and the CPU backend are in scaled_mm/core/operators.py.
#include "torch/tensors.h"

using namespace scaled_mm_torch;

namespace {

struct Operands {
  Argument out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums;
};

void calculate(scaledMMDescriptor_t descriptor, const Operands& o, void* workspace, size_t workspace_size, void* stream) {
  check(scaledMMCalculateGemm(descriptor, workspace, workspace_size, o.out.data, o.a.data, o.b.data, o.a_scale.data, o.b_scale.data, o.bias.data,
                              o.a_zero_point.data, o.b_zero_point.data, o.a_row_sums.data, o.b_column_sums.data, stream));
}

// Plan, run, forget: the descriptor's validation and dispatch without its reuse.
void run_once(const Operands& o, int32_t device) {
  scaledMMDescriptor_t descriptor = nullptr;
  check(scaledMMCreateGemmDescriptor(handle_of(device), &descriptor, o.out.get(), o.a.get(), o.b.get(), o.a_scale.get(), o.b_scale.get(),
                                     o.bias.get(), o.a_zero_point.get(), o.b_zero_point.get(), o.a_row_sums.get(), o.b_column_sums.get(), nullptr));
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

Operands inputs(const Tensor& a, const Tensor& b, const OptionalTensor& a_scale, const OptionalTensor& b_scale, const OptionalTensor& bias,
                const OptionalTensor& a_zero_point, const OptionalTensor& b_zero_point, const OptionalTensor& a_row_sums,
                const OptionalTensor& b_column_sums, int32_t device) {
  return {{},
          argument("a", a, device),
          argument("b", b, device),
          argument("a_scale", a_scale, device),
          argument("b_scale", b_scale, device),
          argument("bias", bias, device),
          argument("a_zero_point", a_zero_point, device),
          argument("b_zero_point", b_zero_point, device),
          argument("a_row_sums", a_row_sums, device),
          argument("b_column_sums", b_column_sums, device)};
}

// Products in an operand; a matrix is one.
int64_t batch_of(const char* name, const char* shape, const scaledMMTensorDesc_t& desc) {
  if (desc.ndim != 2 && desc.ndim != 3) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_SHAPE, std::string(name) + ": expected 2 dimensions " + shape + ", got " + std::to_string(desc.ndim));
  }
  return desc.ndim == 3 ? desc.shape[0] : 1;
}

Tensor scaled_mm(Tensor a, Tensor b, OptionalTensor a_scale, OptionalTensor b_scale, OptionalTensor bias, OptionalTensor a_zero_point,
                 OptionalTensor b_zero_point, torch::headeronly::ScalarType out_dtype, OptionalTensor a_row_sums, OptionalTensor b_column_sums,
                 bool constant_b) {
  const int32_t device = device_of(a);
  Operands o = inputs(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums, device);
  if (constant_b) o.b.desc.flags = SCALED_MM_TENSOR_CONSTANT;
  if (to_dtype(int32_t(out_dtype)) < 0 || out_dtype == torch::headeronly::ScalarType::Char) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_DTYPE,
          std::string("out_dtype: expected float16, bfloat16, float32 or int32, got ") + dtype_text(int32_t(out_dtype)));
  }
  // Enough to size the output; everything else is the core's to check.
  const int64_t batch_a = batch_of("a", "[M, K] or 3 [B, M, K]", o.a.desc), batch_b = batch_of("b", "[K, N] or 3 [B, K, N]", o.b.desc);
  const int64_t rows = o.a.desc.shape[o.a.desc.ndim - 2], columns = o.b.desc.shape[o.b.desc.ndim - 1];
  const int ndim = o.a.desc.ndim > o.b.desc.ndim ? o.a.desc.ndim : o.b.desc.ndim;
  const int64_t sizes[3] = {batch_a == 1 ? batch_b : batch_a, rows, columns};
  const int64_t row_stride = columns > 0 ? columns : 1, strides[3] = {(rows > 0 ? rows : 1) * row_stride, row_stride, 1};
  Tensor out = empty(ndim, sizes + 3 - ndim, strides + 3 - ndim, int32_t(out_dtype), device);
  o.out = argument("out", out, device);
  run_once(o, device);
  return out;
}

void scaled_mm_out(Tensor out, Tensor a, Tensor b, OptionalTensor a_scale, OptionalTensor b_scale, OptionalTensor bias, OptionalTensor a_zero_point,
                   OptionalTensor b_zero_point, OptionalTensor a_row_sums, OptionalTensor b_column_sums, bool constant_b) {
  const int32_t device = device_of(a);
  Operands o = inputs(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums, device);
  if (constant_b) o.b.desc.flags = SCALED_MM_TENSOR_CONSTANT;
  o.out = argument("out", out, device);
  run_once(o, device);
}

// `descriptor` is the address of a live scaledMMDescriptor_t, `stream` a cudaStream_t or -1 for the current one.
void calculate_op(int64_t descriptor, Tensor out, Tensor a, Tensor b, OptionalTensor a_scale, OptionalTensor b_scale, OptionalTensor bias,
                  OptionalTensor a_zero_point, OptionalTensor b_zero_point, OptionalTensor workspace, int64_t stream, OptionalTensor a_row_sums,
                  OptionalTensor b_column_sums) {
  auto* plan = reinterpret_cast<scaledMMDescriptor_t>(descriptor);
  int32_t device_type = 0, device = 0;
  check(scaledMMGetDevice(plan, &device_type, &device));
  Operands o = inputs(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums, device);
  o.out = argument("out", out, device);
  const scaledMMTensorDesc_t* const tensors[] = {o.out.get(),
                                                 o.a.get(),
                                                 o.b.get(),
                                                 o.a_scale.get(),
                                                 o.b_scale.get(),
                                                 o.bias.get(),
                                                 o.a_zero_point.get(),
                                                 o.b_zero_point.get(),
                                                 o.a_row_sums.get(),
                                                 o.b_column_sums.get()};
  check(scaledMMCheckTensors(plan, SCALED_MM_GEMM, tensors, int32_t(std::size(tensors))));
  void* on = stream == -1 ? current_stream(device) : reinterpret_cast<void*>(stream);
  size_t bytes = 0;
  void* memory = nullptr;
  if (workspace.has_value()) {
    const Argument w = argument("workspace", *workspace, device);
    check_contiguous("workspace", *workspace);
    memory = w.data;
    bytes = size_t(workspace->numel()) * workspace->element_size();
  }
  calculate(plan, o, memory, bytes, on);
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(scaled_mm, CUDA, m) {
  m.impl("scaled_mm", TORCH_BOX(&scaled_mm));
  m.impl("scaled_mm_out", TORCH_BOX(&scaled_mm_out));
  m.impl("calculate", TORCH_BOX(&calculate_op));
}
