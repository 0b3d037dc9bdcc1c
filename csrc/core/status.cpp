#include "core/status.h"

#include <cstdarg>
#include <cstdio>
#include <new>

namespace scaled_mm {
namespace {
thread_local char last_error[1024] = "";

// Drops the last character of a truncated message, which may be an incomplete UTF-8 sequence.
void drop_last_character(char* text, size_t size) {
  size_t end = size - 1;
  for (int i = 0; i < 3 && (text[end - 1] & 0xc0) == 0x80; ++i) --end;
  text[end - 1] = '\0';
}

} // namespace

scaledMMStatus_t fail(scaledMMStatus_t status, const char* format, ...) {
  va_list args;
  va_start(args, format);
  // Formatted into a separate buffer: an argument may be last_error itself.
  char text[sizeof(last_error)] = "";
  const int length = vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  if (length >= int(sizeof(text))) drop_last_character(text, sizeof(text));
  snprintf(last_error, sizeof(last_error), "%s", text);
  return status;
}

scaledMMStatus_t fail_exception(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error))
    return fail(SCALED_MM_STATUS_INTERNAL_ERROR, "host memory: expected enough for the call, got none");
  return fail(SCALED_MM_STATUS_INTERNAL_ERROR, "expected no exception, got %s", error.what());
}

const char* dtype_name(int32_t dtype) {
  switch (dtype) {
  case SCALED_MM_DTYPE_INT8: return "int8";
  case SCALED_MM_DTYPE_INT32: return "int32";
  case SCALED_MM_DTYPE_INT64: return "int64";
  case SCALED_MM_DTYPE_FLOAT16: return "float16";
  case SCALED_MM_DTYPE_BFLOAT16: return "bfloat16";
  case SCALED_MM_DTYPE_FLOAT32: return "float32";
#define NAME_OF_FORMAT(NAME, name, ...)                                                                                                              \
  case SCALED_MM_DTYPE_##NAME: return #name;
    SCALED_MM_GGUF_FORMATS(NAME_OF_FORMAT)
#undef NAME_OF_FORMAT
  default: return "an unknown dtype"; // scaled_mm/core/checks.py replaces it by torch's name
  }
}

int64_t dtype_bytes(int32_t dtype) {
  switch (dtype) {
  case SCALED_MM_DTYPE_INT8: return 1;
  case SCALED_MM_DTYPE_FLOAT16:
  case SCALED_MM_DTYPE_BFLOAT16: return 2;
  case SCALED_MM_DTYPE_INT32:
  case SCALED_MM_DTYPE_FLOAT32: return 4;
  case SCALED_MM_DTYPE_INT64: return 8;
  default: return scaledMMGetBlockBytes(dtype) > 0 ? 1 : 0; // tensors of GGUF blocks are measured in bytes
  }
}

} // namespace scaled_mm

int32_t scaledMMGetAbiVersion(void) { return SCALED_MM_ABI_VERSION; }

const char* scaledMMGetLastErrorMessage(void) { return scaled_mm::last_error; }

scaledMMStatus_t scaledMMSetLastError(scaledMMStatus_t status, const char* message) { return scaled_mm::fail(status, "%s", message ? message : ""); }

const char* scaledMMGetStatusName(scaledMMStatus_t status) {
  switch (status) {
  case SCALED_MM_STATUS_SUCCESS: return "SUCCESS";
  case SCALED_MM_STATUS_INTERNAL_ERROR: return "INTERNAL_ERROR";
  case SCALED_MM_STATUS_NULL_POINTER: return "NULL_POINTER";
  case SCALED_MM_STATUS_BAD_PARAM: return "BAD_PARAM";
  case SCALED_MM_STATUS_BAD_TENSOR_DTYPE: return "BAD_TENSOR_DTYPE";
  case SCALED_MM_STATUS_BAD_TENSOR_SHAPE: return "BAD_TENSOR_SHAPE";
  case SCALED_MM_STATUS_BAD_TENSOR_STRIDES: return "BAD_TENSOR_STRIDES";
  case SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT: return "BAD_TENSOR_ALIGNMENT";
  case SCALED_MM_STATUS_BAD_TENSOR_DEVICE: return "BAD_TENSOR_DEVICE";
  case SCALED_MM_STATUS_INSUFFICIENT_WORKSPACE: return "INSUFFICIENT_WORKSPACE";
  case SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED: return "DEVICE_NOT_SUPPORTED";
  case SCALED_MM_STATUS_ARCHITECTURE_NOT_SUPPORTED: return "ARCHITECTURE_NOT_SUPPORTED";
  case SCALED_MM_STATUS_KERNEL_NOT_FOUND: return "KERNEL_NOT_FOUND";
  case SCALED_MM_STATUS_KERNEL_NOT_BUILT: return "KERNEL_NOT_BUILT";
  case SCALED_MM_STATUS_OVERFLOW: return "OVERFLOW";
  case SCALED_MM_STATUS_CUDA_ERROR: return "CUDA_ERROR";
  }
  return "UNKNOWN_STATUS";
}
