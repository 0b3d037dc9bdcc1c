// The fallback of block-scaled products: any strides and alignment of a, b and out, any K, 0 included. It loads its tiles
// as the plain generic kernel does.
#pragma once

#include "int8/block_scaled/launch.cuh"
#include "int8/generic/gemm.cuh"

namespace scaled_mm::block_scaled {

struct GenericProblem {
  generic::Operand a, b;
  generic::Access access_a, access_b;
  Scales scales;
  EpilogueOperands epilogue;
  void* out;
  int64_t out_stride_m, out_stride_n;
  int tiles_n;
};

constexpr int kGenericThreads = 128;

template <int kTileM, int kTileN>
constexpr int kGenericBytes = (kTileM + kTileN) * Padded::kPitch + ScaleLoader<kTileM, 2>::kBytes;

// shared: kGenericBytes on 16.
template <int kTileM, int kTileN, class Out>
__device__ inline void compute_generic_tile(const GenericProblem& p, int block, unsigned char* shared) {
  constexpr int kWarpM = kTileM / 2, kWarpN = kTileN / 2; // 2 x 2 warps
  static_assert(kHalfBlock % kTileN == 0 && kTileM <= kGenericThreads, "one scale of b for a block of K, one row's scale for a thread");
  using LoaderA = generic::TileLoader<kTileM, kBlock, kGenericThreads>;
  using LoaderB = generic::TileLoader<kTileN, kBlock, kGenericThreads>;
  static_assert(LoaderA::kPitch * 4 == Padded::kPitch && LoaderB::kPitch * 4 == Padded::kPitch, "rows lie as they are read");
  auto* const shared_a = reinterpret_cast<uint32_t*>(shared);
  uint32_t* const shared_b = shared_a + kTileM * LoaderA::kPitch;
  auto* const shared_scales = reinterpret_cast<float*>(shared_b + kTileN * LoaderB::kPitch);

  const int64_t tile_m = int64_t(block / p.tiles_n) * kTileM, tile_n = int64_t(block % p.tiles_n) * kTileN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp / 2 * kWarpM, warp_n = warp % 2 * kWarpN;

  ScaleLoader<kTileM, 2> scales(p.scales, p.a.rows, tile_m, tile_n, shared_scales, int(threadIdx.x));
  LoaderA loader_a;
  LoaderB loader_b;
  WarpTile<Padded, kWarpM, kWarpN> tile;
  tile.clear();
  const auto fetch = [&](int k) {
    loader_a.load(p.a, 0, p.access_a, tile_m, int64_t(k) * kBlock);
    loader_b.load(p.b, 0, p.access_b, tile_n, int64_t(k) * kBlock);
    scales.fetch(p.scales.half ? 2 * k : k, p.scales.blocks_of_stage(p.a.K - int64_t(k) * kBlock));
  };
  const int stages = stages_of(p.a.K);
  if (stages > 0) fetch(0);
  for (int k = 0; k < stages; ++k) {
    loader_a.store(shared_a, p.access_a);
    loader_b.store(shared_b, p.access_b);
    scales.publish(k);
    __syncthreads();
    if (k + 1 < stages) fetch(k + 1); // the next stage travels while this one is multiplied
    tile.template multiply_stage<2>(
        shared_address(shared_a) + warp_m * Padded::kPitch, shared_address(shared_b) + warp_n * Padded::kPitch,
        [&](int i) { return scales.of(k, i) + warp_m; }, p.scales.half, p.scales.blocks_of_stage(p.a.K - int64_t(k) * kBlock), lane);
    __syncthreads();
  }

  tile.finish(p.epilogue, tile_n + warp_n, p.b.rows, lane, [&](int row, int column, float x, float y) {
    const int64_t m = tile_m + warp_m + row, n = tile_n + warp_n + column;
    if (m >= p.a.rows) return;
    Out* out = static_cast<Out*>(p.out) + m * p.out_stride_m + n * p.out_stride_n;
    if (n < p.b.rows) cast(out, x);
    if (n + 1 < p.b.rows) cast(out + p.out_stride_n, y);
  });
}

// One block at least: without that the compiler spills for some architectures, to fit more blocks.
template <int kTileM, int kTileN, class Out>
__global__ void __launch_bounds__(kGenericThreads, 1) generic_kernel(const __grid_constant__ GenericProblem p) {
  __shared__ alignas(16) unsigned char shared[kGenericBytes<kTileM, kTileN>];
  compute_generic_tile<kTileM, kTileN, Out>(p, int(blockIdx.x), shared);
}

template <int kTileN>
GenericProblem generic_problem(const GemmLaunch& l) {
  GenericProblem p;
  p.a = {static_cast<const int8_t*>(l.a), l.M, l.K, l.a_stride_m, l.a_stride_k, 0};
  p.b = {static_cast<const int8_t*>(l.b), l.N, l.K, l.b_stride_n, l.b_stride_k, 0};
  p.access_a = generic::access_of(p.a);
  p.access_b = generic::access_of(p.b);
  p.scales = scales_of(l);
  p.epilogue = epilogue_operands(l);
  p.out = l.out;
  p.out_stride_m = l.out_stride_m;
  p.out_stride_n = l.out_stride_n;
  p.tiles_n = int((l.N + kTileN - 1) / kTileN);
  return p;
}

template <int kTileM, int kTileN, class Out>
struct Generic {
  static DeviceKernel& kernel() {
    static DeviceKernel one(&generic_kernel<kTileM, kTileN, Out>);
    return one;
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) { return prepare_kernel(kernel(), 0, device, message, size); }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    int tiles = 0;
    if (scaledMMStatus_t status = count_tiles(l, kTileM, kTileN, 1, &tiles, message, size)) return status;
    GenericProblem p = generic_problem<kTileN>(l);
    LaunchShape shape;
    shape.grid = dim3(unsigned(tiles));
    shape.block = dim3(kGenericThreads);
    void* pointers[] = {&p};
    return launch_kernel(kernel(), shape, pointers, l, message, size);
  }

  static constexpr Kernel entry(const char* row) { return {row, DtypeOf<Out>::value, kGenericBytes<kTileM, kTileN>, &prepare, &launch}; }
};

} // namespace scaled_mm::block_scaled
