// Counters, and the checks of every answer: its status and its message.
#include "hostile.h"

#include <cstdio>
#include <cstring>
#include <string>

namespace hostile {

std::atomic<int> failures{0};
std::atomic<long> calls{0};
thread_local std::string context;

void require(const char* file, int line, bool holds, const char* what) {
  if (holds || ++failures > 20) return;
  fprintf(stderr, "%s:%d: %s: %s; last error: %s\n", file, line, context.c_str(), what, scaledMMGetLastErrorMessage());
}

namespace {

bool names_an_argument(const std::string& message) {
  // Arguments other than operands. The core gives the names of operands; test_core_products.py compares them with Python's.
  static const char* const kNames[] = {"mode",
                                       "function",
                                       "output",
                                       "epsilon",
                                       "kernel",
                                       "handle",
                                       "descriptor",
                                       "device",
                                       "device_type",
                                       "arch",
                                       "path",
                                       "workspace",
                                       "bytes",
                                       "choice",
                                       "info",
                                       "product",
                                       "operands",
                                       "option",
                                       "device_type, device_id",
                                       "kernel provider",
                                       "host memory",
                                       "table"};
  const std::string name = message.substr(0, message.find(':'));
  for (const char* known : kNames) {
    if (name == known) return true;
  }
  for (int product = 0; scaledMMGetOperandName(product, 0) != nullptr; ++product) {
    for (int i = 0; const char* known = scaledMMGetOperandName(product, i); ++i) {
      if (name == known) return true;
    }
  }
  return message.compare(0, 6, "table ") == 0; // with its source
}

// CALL has set the message to kStale before the call.
bool is_typed(scaledMMStatus_t status) {
  ++calls;
  if (status == SCALED_MM_STATUS_SUCCESS) return true;
  const std::string message = scaledMMGetLastErrorMessage();
  return strcmp(scaledMMGetStatusName(status), "UNKNOWN_STATUS") != 0 && message != kStale && names_an_argument(message);
}

} // namespace

scaledMMStatus_t checked(const char* file, int line, scaledMMStatus_t status) {
  require(file, line, is_typed(status), "a typed status and a message that names an argument");
  return status;
}

} // namespace hostile
