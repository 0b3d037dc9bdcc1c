// What Python hands over, as the C interface takes it: tensors through torch's DLPack exchange table, a stable C ABI that hangs on torch.Tensor.
#pragma once

#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <string>

#include "scaled_mm/scaled_mm.h"

namespace {

// ---- DLPack 1.x (https://dmlc.github.io/dlpack), as far as it is used here ----------------------------------------------

#ifndef SCALED_MM_DLPACK_CUDA
#define SCALED_MM_DLPACK_CUDA 2
#endif
enum : int32_t { kDLCUDA = SCALED_MM_DLPACK_CUDA }; // the tests' fake driver runs on CPU tensors
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
PyObject* is_neg = nullptr;                    // torch.Tensor.is_neg, looked up once: calls by name are slower
PyObject* requires_grad = nullptr;             // the name of the attribute
PyObject* is_inference = nullptr;              // torch.Tensor.is_inference
PyObject* is_inference_mode_enabled = nullptr; // torch's function
PyObject* increment_version = nullptr;         // torch's function: autograd is told that a tensor it may have kept has changed

PyObject* dtype_name = nullptr;         // the name of the attribute
PyObject* allocate_workspace = nullptr; // (bytes, device) -> a tensor
PyObject* allocate = nullptr;           // (shape, strides, dtype) -> a tensor on the current device; None: this torch has no such function
PyObject* int8 = nullptr;               // torch.int8
PyObject* watchers = nullptr;           // see `intercepted`

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
  if (t.code == kDLInt && t.bits == 64) return SCALED_MM_DTYPE_INT64;
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

// kFine unless memory holds the negative of the values (views like `x.conj().imag`), which DLPack does not tell and torch does.
Answer check_not_negated(PyObject* object, const DLTensor& t) {
  if (t.dtype.code != kDLFloat && t.dtype.code != kDLBfloat) return Answer::kFine;
  PyObject* negated = PyObject_CallFunctionObjArgs(is_neg, object, nullptr);
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

// Operand i of a product: a tensor, or None for an absent one. Sets its description, data and present pointer.
Answer read_operand(int32_t i, PyObject* object, int32_t device, Fold how, Operands* o, DLTensor* as_given = nullptr) {
  o->present[i] = nullptr;
  o->data[i] = nullptr;
  if (object == Py_None) return Answer::kFine;
  DLTensor t;
  if (Answer answer = read_tensor(object, &t); answer != Answer::kFine) return answer;
  if (t.device.type != kDLCUDA) return Answer::kNotMine;
  if (t.device.id != device) {
    const char* name = scaledMMGetOperandName(o->product, i);
    const std::string message = std::string(name ? name : "operand") + ": expected a tensor on cuda:" + std::to_string(device) +
                                ", got one on cuda:" + std::to_string(t.device.id);
    scaledMMSetLastError(SCALED_MM_STATUS_BAD_TENSOR_DEVICE, message.c_str());
    return Answer::kRefused;
  }
  if (Answer answer = check_not_negated(object, t); answer != Answer::kFine) return answer;
  scaledMMTensorDesc_t& desc = o->descs[i];
  desc.flags = 0;
  desc.dtype = to_dtype(t.dtype);
  if (how != Fold::kNone) {
    if (Answer answer = fold(t, how, &desc); answer != Answer::kFine) return answer;
  } else {
    desc.ndim = t.ndim;
    for (int d = 0; d < t.ndim && d < SCALED_MM_MAX_DIMS; ++d) {
      desc.shape[d] = t.shape[d];
      desc.strides[d] = t.strides[d];
    }
  }
  o->data[i] = static_cast<char*>(t.data) + t.byte_offset;
  const uint64_t address = reinterpret_cast<uintptr_t>(o->data[i]);
  const uint64_t lowest_bit = address & (~address + 1);
  desc.alignment = address == 0 || lowest_bit > 16 ? 16 : int64_t(lowest_bit);
  o->present[i] = &desc;
  if (as_given != nullptr) *as_given = t;
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
    PyObject* object = PyTuple_GetItem(tensors, i); // borrowed
    if (Answer answer = read_operand(i, object, device, folds == nullptr ? Fold::kNone : folds[i], o); answer != Answer::kFine) return answer;
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

} // namespace
