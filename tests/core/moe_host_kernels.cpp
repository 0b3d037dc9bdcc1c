// The row-wise kernels of experts and their launchers for the fake driver's device. A launch runs each thread as a coroutine on the CPU.
// -fsanitize=alignment ends the process at a misaligned vector access. The test appends the entries.
#include "warp.h"

#include <algorithm>

#include "int8/launch.cuh"

extern "C" __attribute__((visibility("default"))) void* rowwise_last_stream = nullptr;
extern "C" __attribute__((visibility("default"))) int rowwise_launches = 0;

namespace scaled_mm {

// Replaces DeviceKernel.
class HostKernel {
public:
  template <class Params>
  explicit HostKernel(void (*kernel)(Params)) : call([kernel](void** params) { kernel(*static_cast<const std::remove_cv_t<Params>*>(params[0])); }) {}
  std::function<void(void**)> call;
};

inline scaledMMStatus_t prepare_kernel(HostKernel&, int, int, char*, size_t) { return SCALED_MM_STATUS_SUCCESS; }

inline scaledMMStatus_t launch_kernel(HostKernel& kernel, const LaunchShape& shape, void** params, const GemmLaunch& l, char* message, size_t size) {
  rowwise_last_stream = l.stream;
  ++rowwise_launches;
  const unsigned blocks = shape.grid.x, threads = shape.block.x;
  if (blocks < 1 || blocks > INT32_MAX || shape.grid.y != 1 || threads < 1 || threads > 1024) {
    snprintf(message, size, "CUDA would refuse %u thread blocks of %u threads", blocks, threads);
    return SCALED_MM_STATUS_CUDA_ERROR;
  }
  gpu::shared_size = 0;
  gpu::grid_dim.x = blocks;
  for (unsigned block = 0; block < blocks; ++block) gpu::run_block(int(threads), block, true, [&] { kernel.call(params); });
  return SCALED_MM_STATUS_SUCCESS;
}

} // namespace scaled_mm

#define DeviceKernel HostKernel
#include "rowwise/moe_launch.cuh"
#include "rowwise/moe_sort_launch.cuh"
#include "rowwise/topk_softmax_launch.cuh"
