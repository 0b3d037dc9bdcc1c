// Errors: a status and a message. Every function of the core that can fail returns a scaledMMStatus_t.
#pragma once

#include <exception>
#include <string>

#include "scaled_mm/scaled_mm.h"

namespace scaled_mm {

// Stores the message for the calling thread and returns the status.
[[gnu::format(printf, 2, 3)]] scaledMMStatus_t fail(scaledMMStatus_t status, const char* format, ...);

// Turns an exception of the C++ library, in practice std::bad_alloc, into a status: no exception may leave the C interface.
scaledMMStatus_t fail_exception(const std::exception& error);

const char* dtype_name(int32_t dtype);
// Bytes of an element; 0 for a value that is no dtype. GGUF formats: 1, because their strides are in bytes and their blocks at any address.
int64_t dtype_bytes(int32_t dtype);

} // namespace scaled_mm
