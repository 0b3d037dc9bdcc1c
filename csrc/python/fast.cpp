// The shortest way from Python to the C interface: no dispatcher, no boxing. Python hands over tensors, torch's DLPack
// exchange table (a stable C ABI that hangs on torch.Tensor) says what they are, and the core does the rest.
//
// Built against Python's limited API: one binary for every CPython from 3.10 on. It does not know torch's headers. Anything
// it cannot serve (a tensor subclass, another device, an argument of another type) answers NotImplemented, and the caller
// takes the registered operator, which says what is wrong. Why this exists: docs/decisions/0003-host-overhead.md.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <string>

#include "scaled_mm/scaled_mm.h"

namespace {

// ---- DLPack 1.x (https://dmlc.github.io/dlpack), as far as it is used here ----------------------------------------------

enum : int32_t { kDLCUDA = 2 };
enum : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4 };

struct DLDevice {
  int32_t type, id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLPackExchangeAPI {
  struct {
    uint32_t major, minor;
    void* previous;
  } header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** stream);
};

const DLPackExchangeAPI* api = nullptr;
PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;
PyObject* is_neg = nullptr;                    // the name of the method
PyObject* requires_grad = nullptr;             // the name of the attribute
PyObject* is_inference = nullptr;              // the name of the method
PyObject* is_inference_mode_enabled = nullptr; // torch's function
PyObject* increment_version = nullptr;         // torch's function: autograd is told that a tensor it may have kept has changed

PyObject* allocate_workspace = nullptr; // (bytes, device) -> a tensor

// The operands of a product of any kind: out, then the inputs, in the order of the C interface.
struct Operands {
  int32_t product, count;
  scaledMMTensorDesc_t descs[SCALED_MM_MAX_OPERANDS];
  const scaledMMTensorDesc_t* present[SCALED_MM_MAX_OPERANDS];
  void* data[SCALED_MM_MAX_OPERANDS];
};

enum class Answer { kFine, kNotMine, kRefused };

int32_t to_dtype(DLDataType t) {
  if (t.lanes != 1) return -1;
  if (t.code == kDLInt && t.bits == 8) return SCALED_MM_DTYPE_INT8;
  if (t.code == kDLInt && t.bits == 32) return SCALED_MM_DTYPE_INT32;
  if (t.code == kDLFloat && t.bits == 16) return SCALED_MM_DTYPE_FLOAT16;
  if (t.code == kDLFloat && t.bits == 32) return SCALED_MM_DTYPE_FLOAT32;
  if (t.code == kDLBfloat && t.bits == 16) return SCALED_MM_DTYPE_BFLOAT16;
  return -1;
}

Answer read_tensor(PyObject* object, DLTensor* t) {
  // Exactly a tensor or a parameter: a subclass may mean something else by its data.
  if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type) return Answer::kNotMine;
  if (api->dltensor_from_py_object_no_sync(object, t) != 0) {
    PyErr_Clear(); // sparse, meta, batched ...: the operator names it
    return Answer::kNotMine;
  }
  // DLPack lets the strides of a contiguous tensor be null; torch writes them.
  return t->ndim > 0 && t->strides == nullptr ? Answer::kNotMine : Answer::kFine;
}

// Whether memory holds the negative of the values (views like `x.conj().imag`), which DLPack does not tell and torch does.
Answer check_not_negated(PyObject* object, const DLTensor& t) {
  if (t.dtype.code != kDLFloat && t.dtype.code != kDLBfloat) return Answer::kFine;
  PyObject* negated = PyObject_CallMethodObjArgs(object, is_neg, nullptr);
  if (negated == nullptr) PyErr_Clear();
  const bool fine = negated == Py_False;
  Py_XDECREF(negated);
  return fine ? Answer::kFine : Answer::kNotMine;
}

// How the dimensions of an operand of a row-wise operator are folded: to [rows, K], to [rows], to [tokens, heads, D], not at all; or GGUF blocks
// [..., K / 32, bytes] to [rows, K].
enum class Fold { kNone, kMatrix, kRows, kHeads, kBlocks };

// Writes shape and strides, with the leading dimensions folded into one. Not ours where no single stride leads from row to row, and what is longer
// than the core takes.
Answer fold(const DLTensor& t, Fold how, scaledMMTensorDesc_t* desc) {
  const int kept = how == Fold::kRows ? 0 : how == Fold::kMatrix ? 1 : 2;
  const int last = t.ndim - kept; // the dimensions before it are folded
  if (last < 0) return Answer::kNotMine;
  int64_t rows = 1, stride = 0; // of the dimensions with more than one element so far
  for (int d = last - 1; d >= 0; --d) {
    if (t.shape[d] == 1) continue;
    if (rows == 1) stride = t.strides[d];
    if (rows > 1 && t.shape[d] != 0 && t.strides[d] != rows * stride) return Answer::kNotMine;
    rows *= t.shape[d];
  }
  constexpr int64_t kMost = INT32_MAX - (1 << 14);
  if (rows > kMost || (how == Fold::kMatrix && t.shape[last] > kMost)) return Answer::kNotMine;
  desc->ndim = 1 + kept;
  desc->shape[0] = rows;
  desc->strides[0] = stride;
  for (int i = 0; i < kept; ++i) {
    desc->shape[1 + i] = t.shape[last + i];
    desc->strides[1 + i] = t.strides[last + i];
  }
  if (how != Fold::kBlocks) return Answer::kFine;
  constexpr int64_t kBlock = 32; // values
  if (t.dtype.code != kDLUInt || t.dtype.bits != 8 || t.strides[last + 1] != 1 || (t.shape[last] > 1 && t.strides[last] != t.shape[last + 1])) {
    return Answer::kNotMine;
  }
  desc->ndim = 2;
  desc->shape[1] *= kBlock;
  desc->strides[1] = 1;
  return Answer::kFine;
}

// tensors: a tuple of tensors, and None for those that are absent. folds: nullptr, or one of each operand.
Answer read_operands(int32_t product, PyObject* tensors, int32_t device, Operands* o, const Fold* folds = nullptr) {
  const Py_ssize_t count = PyTuple_Size(tensors);
  if (count < 1 || count > SCALED_MM_MAX_OPERANDS) {
    PyErr_Clear();
    return Answer::kNotMine;
  }
  o->product = product;
  o->count = int32_t(count);
  for (int32_t i = 0; i < o->count; ++i) {
    o->present[i] = nullptr;
    o->data[i] = nullptr;
    PyObject* object = PyTuple_GetItem(tensors, i); // borrowed
    if (object == Py_None) continue;
    DLTensor t;
    if (Answer answer = read_tensor(object, &t); answer != Answer::kFine) return answer;
    if (t.device.type != kDLCUDA) return Answer::kNotMine;
    if (t.device.id != device) {
      const char* name = scaledMMGetOperandName(product, i);
      const std::string message = std::string(name ? name : "operand") + ": expected a tensor on cuda:" + std::to_string(device) +
                                  ", got one on cuda:" + std::to_string(t.device.id);
      scaledMMSetLastError(SCALED_MM_STATUS_BAD_TENSOR_DEVICE, message.c_str());
      return Answer::kRefused;
    }
    if (Answer answer = check_not_negated(object, t); answer != Answer::kFine) return answer;
    o->data[i] = static_cast<char*>(t.data) + t.byte_offset;
    scaledMMTensorDesc_t& desc = o->descs[i];
    desc.flags = 0;
    desc.dtype = to_dtype(t.dtype);
    if (folds != nullptr && folds[i] != Fold::kNone) {
      if (Answer answer = fold(t, folds[i], &desc); answer != Answer::kFine) return answer;
    } else {
      desc.ndim = t.ndim;
      for (int d = 0; d < t.ndim && d < SCALED_MM_MAX_DIMS; ++d) {
        desc.shape[d] = t.shape[d];
        desc.strides[d] = t.strides[d];
      }
    }
    const uint64_t address = reinterpret_cast<uintptr_t>(o->data[i]);
    const uint64_t lowest_bit = address & (~address + 1);
    desc.alignment = address == 0 || lowest_bit > 16 ? 16 : int64_t(lowest_bit);
    o->present[i] = &desc;
  }
  return Answer::kFine;
}

// The memory of a contiguous tensor on the device.
Answer read_workspace(PyObject* object, int32_t device, void** memory, size_t* bytes) {
  DLTensor w;
  if (Answer answer = read_tensor(object, &w); answer != Answer::kFine) return answer;
  int64_t elements = 1;
  for (int d = w.ndim - 1; d >= 0; --d) {
    if (w.shape[d] != 1 && w.strides[d] != elements) return Answer::kNotMine; // not contiguous: the operator says so
    elements *= w.shape[d];
  }
  if (w.device.type != kDLCUDA || w.device.id != device) return Answer::kNotMine;
  *memory = static_cast<char*>(w.data) + w.byte_offset;
  *bytes = size_t(elements) * w.dtype.bits / 8 * w.dtype.lanes;
  return Answer::kFine;
}

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

// Whether autograd watches an output, so that writing to it would go unseen, or it is one of inference mode seen from outside.
Answer check_unwatched(PyObject* out) {
  PyObject* watched = PyObject_GetAttr(out, requires_grad);
  if (watched == nullptr) PyErr_Clear();
  const bool unwatched = watched == Py_False;
  Py_XDECREF(watched);
  if (!unwatched) return Answer::kNotMine;
  PyObject* of_inference = PyObject_CallMethodObjArgs(out, is_inference, nullptr);
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

// calculate(descriptor, product, device, stream | None, workspace | None, tensors) -> None | status | NotImplemented
PyObject* calculate(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 6 || !PyTuple_Check(args[5]) || PyTuple_Size(args[5]) < 1) {
    PyErr_SetString(PyExc_TypeError, "calculate: expected 5 arguments and a tuple of tensors");
    return nullptr;
  }
  auto descriptor = static_cast<scaledMMDescriptor_t>(PyLong_AsVoidPtr(args[0]));
  const int32_t product = int32_t(PyLong_AsLong(args[1])), device = int32_t(PyLong_AsLong(args[2]));
  if (PyErr_Occurred()) return nullptr;
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

  scaledMMStatus_t create(scaledMMHandle_t handle, const Operands& o, size_t* workspace_size) {
    const scaledMMStatus_t status = scaledMMCreateDescriptor(handle, &descriptor_, o.product, o.present, o.count, 0, nullptr);
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

// run(handle, product, device, constant, tensors) -> None | status | NotImplemented. constant: the second input, tensors[2], is a constant weight.
PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 5 || !PyTuple_Check(args[4])) {
    PyErr_SetString(PyExc_TypeError, "run: expected 4 arguments and a tuple of tensors");
    return nullptr;
  }
  auto handle = static_cast<scaledMMHandle_t>(PyLong_AsVoidPtr(args[0]));
  const int32_t product = int32_t(PyLong_AsLong(args[1])), device = int32_t(PyLong_AsLong(args[2]));
  if (PyErr_Occurred()) return nullptr;
  Operands o;
  const Answer answer = read_operands(product, args[4], device, &o);
  if (answer == Answer::kNotMine) return not_mine();
  if (answer == Answer::kRefused) return status_object(SCALED_MM_STATUS_BAD_TENSOR_DEVICE);
  void* stream = nullptr;
  if (api->current_work_stream(kDLCUDA, device, &stream) != 0) return nullptr;
  if (args[3] == Py_True && o.count > 2 && o.present[2]) o.descs[2].flags = SCALED_MM_TENSOR_CONSTANT;
  Planned plan;
  size_t needed = 0;
  scaledMMStatus_t status;
  {
    const WithoutInterpreter others_may_run;
    status = plan.create(handle, o, &needed);
    if (status == SCALED_MM_STATUS_SUCCESS && needed == 0) status = launch(plan.get(), o, nullptr, 0, stream);
  }
  if (status == SCALED_MM_STATUS_NULL_POINTER) return not_mine(); // a required operand is None: the operator names it as Python does
  if (status != SCALED_MM_STATUS_SUCCESS || needed == 0) return status_object(status);
  return launch_with_workspace(plan.get(), o, needed, device, stream);
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
                                {X, X, R, R, R}, // as scaled_mm.h lists the operands
                                {H, H, H, X, X, H},
                                {X, X, X},
                                {B, X}};
  constexpr Fold kWeightFolds[9] = {H, H, H};
  auto handle = static_cast<scaledMMHandle_t>(PyLong_AsVoidPtr(args[0]));
  const int32_t product = int32_t(PyLong_AsLong(args[1])), function = int32_t(PyLong_AsLong(args[2]));
  int32_t output = int32_t(PyLong_AsLong(args[3]));
  const double epsilon = PyFloat_AsDouble(args[4]);
  const int32_t device = int32_t(PyLong_AsLong(args[5]));
  if (PyErr_Occurred()) return nullptr;
  if (product < SCALED_MM_ROWWISE_QUANTIZE || product > SCALED_MM_GGUF_QUANTIZE || PyTuple_Size(args[6]) > 9) return not_mine();
  const bool of_weight = product == SCALED_MM_INT8_BLOCK_QUANTIZE && function == SCALED_MM_INT8_BLOCK_WEIGHT;
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

// bind(torch.Tensor, torch.nn.Parameter, increment_version, is_inference_mode_enabled, allocate_workspace) -> whether this torch has an
// exchange table that is understood here
PyObject* bind(PyObject*, PyObject* args) {
  PyObject *tensor = nullptr, *parameter = nullptr, *increment = nullptr, *mode = nullptr, *allocate = nullptr;
  if (!PyArg_ParseTuple(args, "O!O!OOO", &PyType_Type, &tensor, &PyType_Type, &parameter, &increment, &mode, &allocate)) return nullptr;
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
  is_neg = PyUnicode_InternFromString("is_neg");
  requires_grad = PyUnicode_InternFromString("requires_grad");
  is_inference = PyUnicode_InternFromString("is_inference");
  if (is_neg == nullptr || requires_grad == nullptr || is_inference == nullptr) return nullptr;
  increment_version = Py_NewRef(increment);
  is_inference_mode_enabled = Py_NewRef(mode);
  allocate_workspace = Py_NewRef(allocate);
  api = table;
  tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor));
  parameter_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter));
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS, nullptr},
    {"calculate", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&calculate)), METH_FASTCALL, nullptr},
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run)), METH_FASTCALL, nullptr},
    {"rowwise", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&rowwise)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "scaled_mm_fast", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_scaled_mm_fast(void) { return PyModule_Create(&module); }
