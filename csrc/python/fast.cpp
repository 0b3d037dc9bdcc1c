// The shortest way from Python to the C interface: no dispatcher, no boxing. Python hands over tensors, torch's DLPack
// exchange table (a stable C ABI that hangs on torch.Tensor) says what they are, and the core does the rest.
//
// Built against Python's limited API: one binary for every CPython from 3.10 on. It does not know torch's headers. Anything
// it cannot serve (a tensor subclass, a tensor not on CUDA, an argument of another type) answers NotImplemented, and the caller
// takes the registered operator, which says what is wrong. Why this exists: docs/decisions/0003-host-overhead.md.
#include "python/linear.h"
#include "python/operands.h"

namespace {

// None for success: the caller compares identities.
PyObject* status_object(scaledMMStatus_t status) { return status == SCALED_MM_STATUS_SUCCESS ? Py_NewRef(Py_None) : PyLong_FromLong(status); }

PyObject* not_mine() { return Py_NewRef(Py_NotImplemented); }

scaledMMStatus_t launch(scaledMMDescriptor_t descriptor, const Operands& o, void* workspace, size_t bytes, void* stream) {
  return scaledMMCalculate(descriptor, o.product, workspace, bytes, o.data, o.count, stream);
}

// Other Python threads run meanwhile: a launch waits when the queue is full, and a kernel may have to be compiled first.
class WithoutInterpreter {
public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

private:
  PyThreadState* state_;
};

// kFine unless autograd would miss a write to out: it requires grad, or is an inference tensor used outside of inference mode.
Answer check_unwatched(PyObject* out) {
  PyObject* watched = PyObject_GetAttr(out, requires_grad);
  if (watched == nullptr) PyErr_Clear();
  const bool unwatched = watched == Py_False;
  Py_XDECREF(watched);
  if (!unwatched) return Answer::kNotMine;
  PyObject* of_inference = PyObject_CallFunctionObjArgs(is_inference, out, nullptr);
  if (of_inference == nullptr) PyErr_Clear();
  bool fine = of_inference == Py_False;
  Py_XDECREF(of_inference);
  if (of_inference == Py_True) {
    PyObject* inside = PyObject_CallNoArgs(is_inference_mode_enabled);
    if (inside == nullptr) PyErr_Clear();
    fine = inside == Py_True;
    Py_XDECREF(inside);
  }
  return fine ? Answer::kFine : Answer::kNotMine;
}

// None when the launch succeeded and autograd knows that `out` has changed.
PyObject* written(PyObject* out, scaledMMStatus_t status) {
  if (status != SCALED_MM_STATUS_SUCCESS) return status_object(status);
  PyObject* tensors = PyTuple_Pack(1, out);
  if (tensors == nullptr) return nullptr;
  PyObject* result = PyObject_CallFunctionObjArgs(increment_version, tensors, nullptr);
  Py_DECREF(tensors);
  if (result == nullptr) return nullptr;
  Py_DECREF(result);
  return Py_NewRef(Py_None);
}

// Whether something intercepts operators: a dispatch mode, a function mode, or tracing. -1: an error.
int intercepted() {
  for (Py_ssize_t i = 0; i < PyTuple_Size(watchers); ++i) {
    PyObject* answer = PyObject_CallNoArgs(PyTuple_GetItem(watchers, i));
    const int found = answer == nullptr ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (found != 0) return found;
  }
  return 0;
}

// calculate(descriptor, product, device, stream | None, workspace | None, tensors) -> None | status | NotImplemented
PyObject* calculate(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 6 || !PyTuple_Check(args[5]) || PyTuple_Size(args[5]) < 1) {
    PyErr_SetString(PyExc_TypeError, "calculate: expected 5 arguments and a tuple of tensors");
    return nullptr;
  }
  auto descriptor = static_cast<scaledMMDescriptor_t>(PyLong_AsVoidPtr(args[0]));
  const int32_t product = int32_t(PyLong_AsLong(args[1])), device = int32_t(PyLong_AsLong(args[2]));
  if (PyErr_Occurred()) return nullptr;
  if (const int found = intercepted(); found != 0) return found < 0 ? nullptr : not_mine();
  PyObject* out = PyTuple_GetItem(args[5], 0);
  Operands o;
  void *stream = nullptr, *memory = nullptr;
  size_t bytes = 0;
  Answer answer = check_unwatched(out);
  if (answer == Answer::kFine) answer = read_operands(product, args[5], device, &o);
  if (answer == Answer::kFine && args[4] != Py_None) answer = read_workspace(args[4], device, &memory, &bytes);
  if (answer == Answer::kNotMine) return not_mine();
  if (answer == Answer::kRefused) return status_object(SCALED_MM_STATUS_BAD_TENSOR_DEVICE);
  if (args[3] != Py_None) {
    stream = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred()) return nullptr;
  } else if (api->current_work_stream(kDLCUDA, device, &stream) != 0) {
    return nullptr;
  }
  scaledMMStatus_t status;
  {
    const WithoutInterpreter others_may_run;
    status = scaledMMCheckTensors(descriptor, product, o.present, o.count);
    if (status == SCALED_MM_STATUS_SUCCESS) status = launch(descriptor, o, memory, bytes, stream);
  }
  return written(out, status);
}

// A descriptor for one calculation.
class Planned {
public:
  ~Planned() {
    if (descriptor_) scaledMMDestroyDescriptor(descriptor_);
  }
  Planned() = default;
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;

  scaledMMStatus_t create(scaledMMHandle_t handle, const Operands& o, int32_t option, size_t* workspace_size) {
    const scaledMMStatus_t status = scaledMMCreateDescriptor(handle, &descriptor_, o.product, o.present, o.count, option, nullptr);
    return status == SCALED_MM_STATUS_SUCCESS ? scaledMMGetWorkspaceSize(descriptor_, workspace_size) : status;
  }
  scaledMMStatus_t create_rowwise(scaledMMHandle_t handle, const Operands& o, int32_t function, int32_t output, double epsilon) {
    return scaledMMCreateRowwiseDescriptor(handle, &descriptor_, o.product, function, output, epsilon, o.present, o.count);
  }
  scaledMMDescriptor_t get() const { return descriptor_; }

private:
  scaledMMDescriptor_t descriptor_ = nullptr;
};

// Launches with a workspace of torch's. Freed when the launch has returned: the allocator reuses it in stream order.
PyObject* launch_with_workspace(scaledMMDescriptor_t descriptor, const Operands& o, size_t needed, int32_t device, void* stream) {
  PyObject* workspace = PyObject_CallFunction(allocate_workspace, "ni", Py_ssize_t(needed), int(device));
  if (workspace == nullptr) return nullptr;
  void* memory = nullptr;
  size_t bytes = 0;
  PyObject* result;
  if (read_workspace(workspace, device, &memory, &bytes) != Answer::kFine) {
    result = not_mine();
  } else {
    scaledMMStatus_t status;
    {
      const WithoutInterpreter others_may_run;
      status = launch(descriptor, o, memory, bytes, stream);
    }
    result = status_object(status);
  }
  Py_DECREF(workspace);
  return result;
}

// Runs one product with a temporary plan -> None | status | NotImplemented. option: of scaledMMCreateDescriptor.
PyObject* run_once(scaledMMHandle_t handle, const Operands& o, int32_t option, int32_t device, void* stream) {
  Planned plan;
  size_t needed = 0;
  scaledMMStatus_t status;
  {
    const WithoutInterpreter others_may_run;
    status = plan.create(handle, o, option, &needed);
    if (status == SCALED_MM_STATUS_SUCCESS && needed == 0) status = launch(plan.get(), o, nullptr, 0, stream);
  }
  if (status == SCALED_MM_STATUS_NULL_POINTER) return not_mine(); // a required operand is None: the operator names it as Python does
  if (status != SCALED_MM_STATUS_SUCCESS || needed == 0) return status_object(status);
  return launch_with_workspace(plan.get(), o, needed, device, stream);
}

// run(handle, product, device, constant, option, tensors) -> None | status | NotImplemented. constant: the second input, tensors[2], is a constant
// weight. option: of scaledMMCreateDescriptor.
PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 6 || !PyTuple_Check(args[5])) {
    PyErr_SetString(PyExc_TypeError, "run: expected 5 arguments and a tuple of tensors");
    return nullptr;
  }
  auto handle = static_cast<scaledMMHandle_t>(PyLong_AsVoidPtr(args[0]));
  const int32_t product = int32_t(PyLong_AsLong(args[1])), device = int32_t(PyLong_AsLong(args[2])), option = int32_t(PyLong_AsLong(args[4]));
  if (PyErr_Occurred()) return nullptr;
  Operands o;
  const Answer answer = read_operands(product, args[5], device, &o);
  if (answer == Answer::kNotMine) return not_mine();
  if (answer == Answer::kRefused) return status_object(SCALED_MM_STATUS_BAD_TENSOR_DEVICE);
  void* stream = nullptr;
  if (api->current_work_stream(kDLCUDA, device, &stream) != 0) return nullptr;
  if (args[3] == Py_True && o.count > 2 && o.present[2]) o.descs[2].flags = SCALED_MM_TENSOR_CONSTANT;
  return run_once(handle, o, option, device, stream);
}

// rowwise(handle, product, function, output, epsilon, device, tensors) -> None | status | NotImplemented. tensors: the operands of the kind, of
// any number of dimensions. output of a GGUF quantizer: the scaledMMDtype_t of the blocks. NotImplemented also for those whose rows do not lie at
// one stride.
PyObject* rowwise(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 7 || !PyTuple_Check(args[6])) {
    PyErr_SetString(PyExc_TypeError, "rowwise: expected 6 arguments and a tuple of tensors");
    return nullptr;
  }
  constexpr Fold N = Fold::kNone, X = Fold::kMatrix, R = Fold::kRows, H = Fold::kHeads, B = Fold::kBlocks;
  constexpr Fold kFolds[][9] = {{X, X, N, N, R, R, R, R, R},
                                {X, X, X, N, R, R, R, X},
                                {X, X, R, R, R, N}, // as scaled_mm.h lists the operands
                                {H, H, H, X, X, H},
                                {X, X, X, N},
                                {B, X},
                                {N, X, N, N, X},
                                {X, X, X, X},
                                {X, X, X, X},
                                {X, X, X}};
  constexpr Fold kWeightFolds[9] = {H, H, H, N};
  auto handle = static_cast<scaledMMHandle_t>(PyLong_AsVoidPtr(args[0]));
  const int32_t product = int32_t(PyLong_AsLong(args[1])), function = int32_t(PyLong_AsLong(args[2]));
  int32_t output = int32_t(PyLong_AsLong(args[3]));
  const double epsilon = PyFloat_AsDouble(args[4]);
  const int32_t device = int32_t(PyLong_AsLong(args[5]));
  if (PyErr_Occurred()) return nullptr;
  if (product < SCALED_MM_ROWWISE_QUANTIZE || product > SCALED_MM_TOPK_SOFTMAX || PyTuple_Size(args[6]) > 9) return not_mine();
  const bool of_weight = product == SCALED_MM_INT8_BLOCK_QUANTIZE && (function & SCALED_MM_INT8_BLOCK_WEIGHT) != 0;
  Operands o;
  const Answer answer = read_operands(product, args[6], device, &o, of_weight ? kWeightFolds : kFolds[product - SCALED_MM_ROWWISE_QUANTIZE]);
  if (answer == Answer::kNotMine) return not_mine();
  if (answer == Answer::kRefused) return status_object(SCALED_MM_STATUS_BAD_TENSOR_DEVICE);
  if (product == SCALED_MM_GGUF_QUANTIZE) { // DLPack has no such dtypes
    o.descs[0].dtype = output;
    output = 0;
  }
  void* stream = nullptr;
  if (api->current_work_stream(kDLCUDA, device, &stream) != 0) return nullptr;
  Planned plan;
  scaledMMStatus_t status;
  {
    const WithoutInterpreter others_may_run;
    status = plan.create_rowwise(handle, o, function, output, epsilon);
    if (status == SCALED_MM_STATUS_SUCCESS) status = launch(plan.get(), o, nullptr, 0, stream);
  }
  return status_object(status);
}

bool set_number(PyObject* tuple, int32_t at, int64_t value) {
  PyObject* number = PyLong_FromLongLong(value);
  return number != nullptr && PyTuple_SetItem(tuple, at, number) == 0; // which takes the reference, also if it fails
}

PyObject* new_tensor(PyObject* shape, PyObject* strides, PyObject* dtype) {
  PyObject* made = shape && strides && dtype ? PyObject_CallFunctionObjArgs(allocate, shape, strides, dtype, nullptr) : nullptr;
  Py_XDECREF(shape);
  Py_XDECREF(strides);
  return made;
}

// A contiguous tensor of x's shape with another last dimension, on the current device.
PyObject* new_output(const DLTensor& x, int64_t last, PyObject* dtype) {
  PyObject *shape = PyTuple_New(x.ndim), *strides = PyTuple_New(x.ndim);
  int64_t stride = 1;
  bool fine = shape != nullptr && strides != nullptr;
  for (int32_t d = x.ndim - 1; d >= 0 && fine; --d) {
    const int64_t size = d == x.ndim - 1 ? last : x.shape[d];
    fine = set_number(shape, d, size) && set_number(strides, d, stride);
    stride *= size;
  }
  if (fine) return new_tensor(shape, strides, dtype);
  Py_XDECREF(shape);
  Py_XDECREF(strides);
  return nullptr;
}

// multiply(handle, product, device, constant, dtype, dimensions, option, inputs) -> out [rows of the first input, columns of the second] | status |
// NotImplemented, for example if the first input is not 2-D or the second does not have `dimensions`. The device is the current one.
PyObject* multiply(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 8 || !PyTuple_Check(args[7])) {
    PyErr_SetString(PyExc_TypeError, "multiply: expected 7 arguments and a tuple of tensors");
    return nullptr;
  }
  auto handle = static_cast<scaledMMHandle_t>(PyLong_AsVoidPtr(args[0]));
  const int32_t product = int32_t(PyLong_AsLong(args[1])), device = int32_t(PyLong_AsLong(args[2])), dimensions = int32_t(PyLong_AsLong(args[5]));
  if (PyErr_Occurred()) return nullptr;
  if (const int found = intercepted(); found != 0) return found < 0 ? nullptr : not_mine();
  const int32_t option = int32_t(PyLong_AsLong(args[6])); // not before: while operators are traced it may be a symbol
  if (PyErr_Occurred()) return nullptr;
  const Py_ssize_t inputs = PyTuple_Size(args[7]);
  if (allocate == Py_None || inputs < 2 || inputs >= SCALED_MM_MAX_OPERANDS) return not_mine();
  Operands o;
  o.product = product;
  o.count = int32_t(inputs) + 1;
  for (int32_t i = 1; i < o.count; ++i) {
    const Answer answer = read_operand(i, PyTuple_GetItem(args[7], i - 1), device, Fold::kNone, &o);
    if (answer != Answer::kFine) return not_mine(); // also on another device than the current one
  }
  const scaledMMTensorDesc_t *a = o.present[1], *b = o.present[2];
  if (a == nullptr || b == nullptr || a->ndim != 2 || b->ndim != dimensions) return not_mine();
  void* stream = nullptr;
  if (api->current_work_stream(kDLCUDA, device, &stream) != 0) return nullptr;
  if (args[3] == Py_True) o.descs[2].flags = SCALED_MM_TENSOR_CONSTANT;
  const Py_ssize_t M = Py_ssize_t(a->shape[0]), N = Py_ssize_t(b->shape[dimensions - 1]);
  PyObject* out = new_tensor(Py_BuildValue("(nn)", M, N), Py_BuildValue("(ni)", N > 1 ? N : Py_ssize_t(1), 1), args[4]);
  if (out == nullptr) return nullptr;
  const bool readable = read_operand(0, out, device, Fold::kNone, &o) == Answer::kFine;
  PyObject* result = readable ? run_once(handle, o, option, device, stream) : not_mine();
  if (result == Py_None) {
    Py_DECREF(result);
    return out;
  }
  Py_DECREF(out);
  return result;
}

// linear(handle, device, constant, transposed, dtype, x, weight, weight_scale, bias, smooth_scale, input_scale, input_zero_point, column_sums)
//   -> y | status | NotImplemented. y: of the torch.dtype, or of x's if it is None. The device is the current one.
PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 5 + Linear::kArguments) {
    PyErr_SetString(PyExc_TypeError, "linear: expected 13 arguments");
    return nullptr;
  }
  auto handle = static_cast<scaledMMHandle_t>(PyLong_AsVoidPtr(args[0]));
  const int32_t device = int32_t(PyLong_AsLong(args[1]));
  if (PyErr_Occurred()) return nullptr;
  if (const int found = intercepted(); found != 0) return found < 0 ? nullptr : not_mine();
  Linear call;
  if (allocate == Py_None || call.read(args + 5, device, args[2] == Py_True, args[3] == Py_True, true) != Answer::kFine) return not_mine();
  void *stream = nullptr, *memory = nullptr;
  if (api->current_work_stream(kDLCUDA, device, &stream) != 0) return nullptr;
  PyObject* of_x = args[4] == Py_None ? PyObject_GetAttr(args[5], dtype_name) : nullptr;
  if (of_x == nullptr && args[4] == Py_None) return nullptr;
  PyObject* y = new_output(call.x, call.n(), of_x ? of_x : args[4]);
  Py_XDECREF(of_x);
  if (y == nullptr) return nullptr;
  PyObject* between = new_tensor(Py_BuildValue("(n)", Py_ssize_t(call.bytes())), Py_BuildValue("(i)", 1), int8);
  if (between == nullptr) {
    Py_DECREF(y);
    return nullptr;
  }
  size_t bytes = 0, needed = 0;
  Answer answer = read_operand(0, y, device, Fold::kMatrix, &call.product);
  if (answer == Answer::kFine) answer = read_workspace(between, device, &memory, &bytes);
  PyObject* result = nullptr;
  if (answer == Answer::kFine) {
    call.place(memory);
    Planned quantizer, product;
    scaledMMStatus_t status;
    {
      const WithoutInterpreter others_may_run;
      status = quantizer.create_rowwise(handle, call.quantizer, SCALED_MM_QUANTIZE_INT8, call.output_mode(), 0.0);
      if (status == SCALED_MM_STATUS_SUCCESS) status = product.create(handle, call.product, 0, &needed);
      if (status == SCALED_MM_STATUS_SUCCESS) status = launch(quantizer.get(), call.quantizer, nullptr, 0, stream);
      if (status == SCALED_MM_STATUS_SUCCESS && needed == 0) status = launch(product.get(), call.product, nullptr, 0, stream);
    }
    const bool waits = status == SCALED_MM_STATUS_SUCCESS && needed > 0; // for the workspace
    result = waits ? launch_with_workspace(product.get(), call.product, needed, device, stream) : status_object(status);
  } else {
    result = not_mine();
  }
  Py_DECREF(between); // the allocator reuses it in stream order
  if (result == Py_None) {
    Py_DECREF(result);
    return y;
  }
  Py_DECREF(y);
  return result;
}

// calculate_linear(quantizer, product, device, constant, transposed, stream | None, workspace, y, x, ... as `linear`)
//   -> None | status | NotImplemented. quantizer, product: descriptors.
PyObject* calculate_linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 8 + Linear::kArguments) {
    PyErr_SetString(PyExc_TypeError, "calculate_linear: expected 16 arguments");
    return nullptr;
  }
  auto quantizer = static_cast<scaledMMDescriptor_t>(PyLong_AsVoidPtr(args[0]));
  auto product = static_cast<scaledMMDescriptor_t>(PyLong_AsVoidPtr(args[1]));
  const int32_t device = int32_t(PyLong_AsLong(args[2]));
  if (PyErr_Occurred()) return nullptr;
  if (const int found = intercepted(); found != 0) return found < 0 ? nullptr : not_mine();
  Linear call;
  void *stream = nullptr, *memory = nullptr;
  size_t bytes = 0;
  Answer answer = check_unwatched(args[7]);
  if (answer == Answer::kFine) answer = call.read(args + 8, device, args[3] == Py_True, args[4] == Py_True, false);
  if (answer == Answer::kFine) answer = read_operand(0, args[7], device, Fold::kNone, &call.product);
  if (answer == Answer::kFine && args[6] != Py_None) answer = read_workspace(args[6], device, &memory, &bytes);
  if (answer != Answer::kFine || bytes < call.bytes() || reinterpret_cast<uintptr_t>(memory) % 16 != 0) return not_mine();
  if (!call.is_apart(memory, call.bytes()) || !call.out_is_apart()) return not_mine();
  if (args[5] != Py_None) {
    stream = PyLong_AsVoidPtr(args[5]);
    if (PyErr_Occurred()) return nullptr;
  } else if (api->current_work_stream(kDLCUDA, device, &stream) != 0) {
    return nullptr;
  }
  call.place(memory);
  memory = static_cast<char*>(memory) + call.bytes();
  bytes -= call.bytes();
  scaledMMStatus_t status;
  {
    const WithoutInterpreter others_may_run;
    status = scaledMMCheckTensors(quantizer, call.quantizer.product, call.quantizer.present, call.quantizer.count);
    if (status == SCALED_MM_STATUS_SUCCESS) {
      status = scaledMMCheckTensors(product, call.product.product, call.product.present, call.product.count);
    }
    if (status == SCALED_MM_STATUS_SUCCESS) status = launch(quantizer, call.quantizer, nullptr, 0, stream);
    if (status == SCALED_MM_STATUS_SUCCESS) status = launch(product, call.product, bytes ? memory : nullptr, bytes, stream);
  }
  return written(args[7], status);
}

// bind(torch.Tensor, torch.nn.Parameter, increment_version, is_inference_mode_enabled, allocate_workspace, allocate | None, torch.int8, watchers)
//   -> whether this torch has an exchange table that is understood here. allocate: (shape, strides, dtype) -> a tensor on the current device.
// watchers: a tuple of functions; one of them is true while something intercepts operators.
PyObject* bind(PyObject*, PyObject* args) {
  PyObject *tensor = nullptr, *parameter = nullptr, *increment = nullptr, *mode = nullptr, *of_workspaces = nullptr, *of_outputs = nullptr,
           *dtype = nullptr, *watching = nullptr;
  if (!PyArg_ParseTuple(args, "O!O!OOOOOO!", &PyType_Type, &tensor, &PyType_Type, &parameter, &increment, &mode, &of_workspaces, &of_outputs, &dtype,
                        &PyTuple_Type, &watching)) {
    return nullptr;
  }
  PyObject* capsule = PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear(); // a torch from before the table
    Py_RETURN_FALSE;
  }
  // The table is a static object of torch's; the capsule need not outlive this call.
  auto* table = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (table == nullptr) return nullptr;
  if (table->header.major != 1 || table->dltensor_from_py_object_no_sync == nullptr || table->current_work_stream == nullptr) Py_RETURN_FALSE;
  is_neg = PyObject_GetAttrString(tensor, "is_neg");
  requires_grad = PyUnicode_InternFromString("requires_grad");
  is_inference = PyObject_GetAttrString(tensor, "is_inference");
  dtype_name = PyUnicode_InternFromString("dtype");
  if (is_neg == nullptr || requires_grad == nullptr || is_inference == nullptr || dtype_name == nullptr) return nullptr;
  increment_version = Py_NewRef(increment);
  is_inference_mode_enabled = Py_NewRef(mode);
  allocate_workspace = Py_NewRef(of_workspaces);
  allocate = Py_NewRef(of_outputs);
  int8 = Py_NewRef(dtype);
  watchers = Py_NewRef(watching);
  api = table;
  tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor));
  parameter_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter));
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS, nullptr},
    {"calculate", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&calculate)), METH_FASTCALL, nullptr},
    {"multiply", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&multiply)), METH_FASTCALL, nullptr},
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run)), METH_FASTCALL, nullptr},
    {"rowwise", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&rowwise)), METH_FASTCALL, nullptr},
    {"linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&linear)), METH_FASTCALL, nullptr},
    {"calculate_linear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&calculate_linear)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "scaled_mm_fast", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_scaled_mm_fast(void) { return PyModule_Create(&module); }
