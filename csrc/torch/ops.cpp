// torch.ops.scaled_mm for CUDA tensors, over the C interface and through torch's stable ABI alone: one binary for every
// torch from 2.10 on. The schemas, their fake implementations and the CPU backend are in scaled_mm/ops.py.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>

#include "scaled_mm/scaled_mm.h"

// In torch's CUDA library; its header declares it only to programs that are built with CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// scaled_mm/ops.py turns this text back into the typed error of the status.
[[noreturn]] void raise(scaledMMStatus_t status, const std::string& message) {
  throw std::runtime_error("[scaled_mm status " + std::to_string(int(status)) + "] " + message);
}

void check(scaledMMStatus_t status) {
  if (status != SCALED_MM_STATUS_SUCCESS) raise(status, scaledMMGetLastErrorMessage());
}

void check_torch(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) raise(SCALED_MM_STATUS_INTERNAL_ERROR, std::string("torch: ") + what + " failed");
}

int32_t to_dtype(int32_t torch_dtype) {
  // c10::ScalarType's numbers, which are part of torch's serialised formats.
  switch (torch_dtype) {
    case 1: return SCALED_MM_DTYPE_INT8;
    case 3: return SCALED_MM_DTYPE_INT32;
    case 5: return SCALED_MM_DTYPE_FLOAT16;
    case 6: return SCALED_MM_DTYPE_FLOAT32;
    case 15: return SCALED_MM_DTYPE_BFLOAT16;
    default: return -1;
  }
}

// What torch calls the dtypes that come by mistake most often.
const char* dtype_text(int32_t torch_dtype) {
  constexpr const char* kNames[] = {"uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"};
  return torch_dtype >= 0 && torch_dtype < 8 ? kNames[torch_dtype] : "another dtype";
}

// An argument as the C interface sees it.
struct Argument {
  scaledMMTensorDesc_t desc;
  void* data = nullptr;
  bool present = false;

  const scaledMMTensorDesc_t* get() const { return present ? &desc : nullptr; }
};

// torch lets None through where a schema says Tensor.
void check_defined(const char* name, AtenTensorHandle handle) {
  bool defined = false;
  check_torch(aoti_torch_is_defined(handle, &defined), "is_defined");
  if (!defined) raise(SCALED_MM_STATUS_NULL_POINTER, std::string(name) + ": expected a tensor, got None");
}

Argument argument(const char* name, const Tensor& tensor, int32_t device) {
  Argument result;
  AtenTensorHandle handle = tensor.get();
  check_defined(name, handle);
  int32_t device_type = 0, device_index = 0;
  check_torch(aoti_torch_get_device_type(handle, &device_type), "get_device_type");
  check_torch(aoti_torch_get_device_index(handle, &device_index), "get_device_index");
  static const int32_t cuda = aoti_torch_device_type_cuda();
  if (device_type != cuda || device_index != device) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_DEVICE,
          std::string(name) + ": expected a tensor on cuda:" + std::to_string(device) + ", got one on " +
              (device_type == cuda ? "cuda:" + std::to_string(device_index) : std::string("another kind of device")));
  }
  int64_t ndim = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;
  check_torch(aoti_torch_get_dim(handle, &ndim), "get_dim");
  check_torch(aoti_torch_get_sizes(handle, &sizes), "get_sizes");
  check_torch(aoti_torch_get_strides(handle, &strides), "get_strides");
  check_torch(aoti_torch_get_dtype(handle, &dtype), "get_dtype");
  check_torch(aoti_torch_get_data_ptr(handle, &result.data), "get_data_ptr");
  result.present = true;
  result.desc.dtype = to_dtype(dtype);
  result.desc.ndim = int32_t(ndim);
  for (int i = 0; i < ndim && i < SCALED_MM_MAX_DIMS; ++i) {
    result.desc.shape[i] = sizes[i];
    result.desc.strides[i] = strides[i];
  }
  const uint64_t address = reinterpret_cast<uintptr_t>(result.data);
  const uint64_t lowest_bit = address & (~address + 1);
  result.desc.alignment = address == 0 || lowest_bit > 16 ? 16 : int64_t(lowest_bit);
  return result;
}

Argument argument(const char* name, const OptionalTensor& tensor, int32_t device) {
  return tensor.has_value() ? argument(name, *tensor, device) : Argument{};
}

int32_t device_of(const Tensor& a) {
  int32_t device_type = 0, device = 0;
  check_defined("a", a.get());
  check_torch(aoti_torch_get_device_type(a.get(), &device_type), "get_device_type");
  check_torch(aoti_torch_get_device_index(a.get(), &device), "get_device_index");
  if (device_type != aoti_torch_device_type_cuda()) {
    raise(SCALED_MM_STATUS_BAD_TENSOR_DEVICE, "a: expected a CUDA tensor as another argument is, got one on another kind of device");
  }
  return device;
}

// One handle per device, made on first use and kept: it holds no GPU resources.
scaledMMHandle_t handle_of(int32_t device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<scaledMMHandle_t> handles[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) raise(SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED, "device: index out of range");
  scaledMMHandle_t handle = handles[device].load(std::memory_order_acquire);
  if (handle == nullptr) {
    check(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, device, nullptr));
    scaledMMHandle_t expected = nullptr;
    if (!handles[device].compare_exchange_strong(expected, handle)) {  // another thread was first
      check(scaledMMDestroyHandle(handle));
      handle = expected;
    }
  }
  return handle;
}

Tensor empty(int ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device) {
  AtenTensorHandle made = nullptr;
  check_torch(aoti_torch_empty_strided(ndim, sizes, strides, dtype, aoti_torch_device_type_cuda(), device, &made), "empty_strided");
  return Tensor(made);
}

void* current_stream(int32_t device) {
  void* stream = nullptr;
  check_torch(aoti_torch_get_current_cuda_stream(device, &stream), "get_current_cuda_stream");
  return stream;
}

struct Operands {
  Argument out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums;
};

void calculate(scaledMMGemmDescriptor_t descriptor, const Operands& o, void* workspace, size_t workspace_size, void* stream) {
  check(scaledMMCalculateGemm(descriptor, workspace, workspace_size, o.out.data, o.a.data, o.b.data, o.a_scale.data,
                              o.b_scale.data, o.bias.data, o.a_zero_point.data, o.b_zero_point.data,
                              o.a_row_sums.data, o.b_column_sums.data, stream));
}

// Plan, run, forget: the descriptor's validation and dispatch without its reuse.
void run_once(const Operands& o, int32_t device) {
  scaledMMGemmDescriptor_t descriptor = nullptr;
  check(scaledMMCreateGemmDescriptor(handle_of(device), &descriptor, o.out.get(), o.a.get(), o.b.get(), o.a_scale.get(),
                                     o.b_scale.get(), o.bias.get(), o.a_zero_point.get(), o.b_zero_point.get(),
                                     o.a_row_sums.get(), o.b_column_sums.get(), nullptr));
  struct Owner {
    scaledMMGemmDescriptor_t descriptor;
    ~Owner() { scaledMMDestroyGemmDescriptor(descriptor); }
  } owner{descriptor};
  size_t bytes = 0;
  check(scaledMMGetGemmWorkspaceSize(descriptor, &bytes));
  void* stream = current_stream(device);
  if (bytes == 0) return calculate(descriptor, o, nullptr, 0, stream);
  const int64_t size = int64_t(bytes), stride = 1;
  Tensor workspace = empty(1, &size, &stride, /* int8 */ 1, device);
  calculate(descriptor, o, workspace.data_ptr(), bytes, stream);
}

Operands inputs(const Tensor& a, const Tensor& b, const OptionalTensor& a_scale, const OptionalTensor& b_scale,
                const OptionalTensor& bias, const OptionalTensor& a_zero_point, const OptionalTensor& b_zero_point,
                const OptionalTensor& a_row_sums, const OptionalTensor& b_column_sums, int32_t device) {
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
    raise(SCALED_MM_STATUS_BAD_TENSOR_SHAPE,
          std::string(name) + ": expected 2 dimensions " + shape + ", got " + std::to_string(desc.ndim));
  }
  return desc.ndim == 3 ? desc.shape[0] : 1;
}

Tensor scaled_mm(Tensor a, Tensor b, OptionalTensor a_scale, OptionalTensor b_scale, OptionalTensor bias,
                 OptionalTensor a_zero_point, OptionalTensor b_zero_point, torch::headeronly::ScalarType out_dtype,
                 OptionalTensor a_row_sums, OptionalTensor b_column_sums) {
  const int32_t device = device_of(a);
  Operands o = inputs(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums, device);
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

void scaled_mm_out(Tensor out, Tensor a, Tensor b, OptionalTensor a_scale, OptionalTensor b_scale, OptionalTensor bias,
                   OptionalTensor a_zero_point, OptionalTensor b_zero_point, OptionalTensor a_row_sums,
                   OptionalTensor b_column_sums) {
  const int32_t device = device_of(a);
  Operands o = inputs(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums, device);
  o.out = argument("out", out, device);
  run_once(o, device);
}

// `descriptor` is the address of a live scaledMMGemmDescriptor_t, `stream` a cudaStream_t or -1 for the current one.
void calculate_op(int64_t descriptor, Tensor out, Tensor a, Tensor b, OptionalTensor a_scale, OptionalTensor b_scale,
                  OptionalTensor bias, OptionalTensor a_zero_point, OptionalTensor b_zero_point, OptionalTensor workspace,
                  int64_t stream, OptionalTensor a_row_sums, OptionalTensor b_column_sums) {
  auto* plan = reinterpret_cast<scaledMMGemmDescriptor_t>(descriptor);
  int32_t device_type = 0, device = 0;
  check(scaledMMGetGemmDevice(plan, &device_type, &device));
  Operands o = inputs(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums, device);
  o.out = argument("out", out, device);
  check(scaledMMCheckGemmTensors(plan, o.out.get(), o.a.get(), o.b.get(), o.a_scale.get(), o.b_scale.get(), o.bias.get(),
                                 o.a_zero_point.get(), o.b_zero_point.get(), o.a_row_sums.get(), o.b_column_sums.get()));
  void* on = stream == -1 ? current_stream(device) : reinterpret_cast<void*>(stream);
  size_t bytes = 0;
  void* memory = nullptr;
  if (workspace.has_value()) {
    const Argument w = argument("workspace", *workspace, device);
    if (!workspace->is_contiguous()) raise(SCALED_MM_STATUS_BAD_TENSOR_STRIDES, "workspace: expected a contiguous tensor");
    memory = w.data;
    bytes = size_t(workspace->numel()) * workspace->element_size();
  }
  calculate(plan, o, memory, bytes, on);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(scaled_mm, CUDA, m) {
  m.impl("scaled_mm", TORCH_BOX(&scaled_mm));
  m.impl("scaled_mm_out", TORCH_BOX(&scaled_mm_out));
  m.impl("calculate", TORCH_BOX(&calculate_op));
}
