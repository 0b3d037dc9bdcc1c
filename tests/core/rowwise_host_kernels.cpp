// The row-wise kernels for the fake driver's device: what the core hands over goes through rows_of to the device code, run by coroutines. A wrong
// stride, dtype or pointer is a wrong number. Compiled with -fsanitize=alignment: a chunk that is read whole where it is not aligned ends the process.
// Entries are appended by the tests.
#include "rowwise_emulated.cpp"

#include "rowwise/launch.cuh"

extern "C" __attribute__((visibility("default"))) void* rowwise_last_stream = nullptr;
extern "C" __attribute__((visibility("default"))) int rowwise_launches = 0;

namespace {

using scaled_mm::GemmLaunch;
using scaled_mm::Kernel;

// Whether the kernel is for rows of this length, and then its run.
template <class Source, int kThreads, int kHeld, bool kVectors>
bool run_kernel(const Rows& p, RowKernel<Source, kThreads, kHeld, kVectors>*) {
  if (p.K > RowKernel<Source, kThreads, kHeld, kVectors>::Launch::kMost) return false;
  run<kThreads>(&row_kernel<Source, kThreads, kHeld, kVectors>, p, 1);
  return true;
}

template <class Source, int kThreads, int kCount, bool kVectors>
bool run_kernel(const Rows& p, ElementKernel<Source, kThreads, kCount, kVectors>*) {
  using Of = ElementKernel<Source, kThreads, kCount, kVectors>;
  if (p.K > Of::Launch::kMost) return false;
  const int spans = kThreads == 32 ? 1 : int((p.K + Of::kSpan - 1) / Of::kSpan);
  run<kThreads>(&element_kernel<Source, kThreads, kCount, kVectors>, p, spans > 0 ? spans : 1);
  return true;
}

template <class... Of>
void run_first(const Rows& p, ByLength<Of...>*) {
  (void)(run_kernel(p, static_cast<Of*>(nullptr)) || ...);
}

template <class Of, bool kReduces>
void run_output(const Rows& p) {
  if constexpr (!kReduces) {
    if (!needs_whole_rows(p)) return run_first(p, static_cast<typename Of::Elementwise*>(nullptr));
  }
  run_first(p, static_cast<typename Of::Rowwise*>(nullptr));
}

template <class Source>
void run_source(const Rows& p) {
  in_chunks(p) ? run_output<KernelsOf<Source, true>, Source::kReduces>(p) : run_output<KernelsOf<Source, false>, Source::kReduces>(p);
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
