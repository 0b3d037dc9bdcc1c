// The row-wise kernels for the fake driver's device: what the core hands over goes through rows_of to the device code, run by coroutines. A wrong
// stride, dtype or pointer is a wrong number. Compiled with -fsanitize=alignment: a chunk that is read whole where it is not aligned ends the
// process. Entries are appended by the tests.
#include "rowwise_emulated.cpp"

#include "rowwise/launch.cuh"

extern "C" __attribute__((visibility("default"))) void* rowwise_last_stream = nullptr;
extern "C" __attribute__((visibility("default"))) int rowwise_launches = 0;

namespace {

using scaled_mm::GemmLaunch;
using scaled_mm::Kernel;

// The first kernel that serves the rows, as the launcher selects it.
template <class Source>
void run_source(const Rows& p) {
  for (int at = 0; by_source<Source>(p, at, in_chunks(p), false) == kDoesNotServe; ++at) {
  }
}

template <class Source, class WithVector = Source>
scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
  if (l.rowwise == nullptr || l.workspace != nullptr || l.cache != nullptr) {
    snprintf(message, size, "no operands of a row-wise operator, or a workspace or a cache, which it does not have");
    return SCALED_MM_STATUS_INTERNAL_ERROR;
  }
  rowwise_last_stream = l.stream;
  ++rowwise_launches;
  const Rows p = rows_of<typename Source::Element>(l);
  p.vector.data == nullptr ? run_source<Source>(p) : run_source<WithVector>(p);
  return SCALED_MM_STATUS_SUCCESS;
}

scaledMMStatus_t prepare(int32_t, char*, size_t) { return SCALED_MM_STATUS_SUCCESS; }

} // namespace

#define HOST_ROWWISE_KERNEL(symbol, row, dtype, ...)                                                                                                 \
  extern "C" const scaled_mm::Kernel symbol;                                                                                                         \
  const scaled_mm::Kernel symbol = {row, dtype, 0, &prepare, &launch<__VA_ARGS__>};
