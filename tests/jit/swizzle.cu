// Compares scheduled_tiles with what CUTLASS's own scheduler counts, and prints what swizzle_of picks. On the host alone.
#include <cstdio>

#include "cutlass/gemm/kernel/tile_scheduler_params.h"
#include "int8/c3x/swizzle.h"

int main() {
  using namespace scaled_mm::c3x;
  using Params = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Params;
  const cutlass::KernelHardwareInfo gpu{0, 132};
  for (int cluster_m : {1, 2, 4}) {
    for (int cluster_n : {1, 2}) {
      for (int most : {1, 2, 4, 8}) {
        for (int m = 1; m <= 70; ++m) {
          for (int n : {1, 2, 3, 5, 6, 7, 16, 22, 33, 48, 112, 149, 299}) {
            const TileGrid grid{m, n, cluster_m, cluster_n};
            Params params;
            const dim3 blocks(unsigned(rounded_up(m, cluster_m)), unsigned(rounded_up(n, cluster_n)), 1);
            params.initialize(blocks, {cluster_m, cluster_n, 1}, gpu, most, Params::RasterOrderOptions::Heuristic);
            if (int64_t(params.blocks_per_problem_) != scheduled_tiles(grid, most)) {
              printf("%d x %d tiles, clusters of %d x %d, groups of %d: CUTLASS computes %lld, expected %lld\n", m, n, cluster_m, cluster_n, most,
                     static_cast<long long>(params.blocks_per_problem_), static_cast<long long>(scheduled_tiles(grid, most)));
              return 1;
            }
            const int picked = swizzle_of(grid, most);
            if (picked < 1 || picked > most || scheduled_tiles(grid, picked) * 32 > scheduled_tiles(grid, 1) * 33) return 2;
            if (picked < most && scheduled_tiles(grid, picked * 2) * 32 <= scheduled_tiles(grid, 1) * 33) return 3;
          }
        }
      }
    }
  }
  // M = 2048, 2049, 4096 of 128 rows by N = 14336 of 256 columns.
  printf("%d %d %d\n", swizzle_of({16, 56, 1, 1}, 8), swizzle_of({17, 56, 1, 1}, 8), swizzle_of({32, 56, 1, 1}, 8));
}
