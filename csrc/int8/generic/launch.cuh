// The host side of the generic kernels: which one serves a product.
#pragma once

#include "int8/generic/few_rows.cuh"
#include "int8/generic/gemm.cuh"

namespace scaled_mm::generic {

// The kernels for few rows and a tile for all other products.
template <int kTileM, int kTileN, int kTileK, class Out>
class Gemm {
  static constexpr int64_t kFewRows = 64;

  template <auto kKernel, int kRows, int kColumns, int kThreads>
  struct Variant {
    static constexpr int64_t kTileColumns = kColumns;

    static DeviceKernel& kernel() {
      static DeviceKernel one(kKernel);
      return one;
    }

    static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) { return prepare_kernel(kernel(), 0, device, message, size); }

    // p: of problem_of, whatever its tiles.
    static scaledMMStatus_t launch(Problem& p, const GemmLaunch& l, char* message, size_t size) {
      p.tiles_n = int((l.N + kColumns - 1) / kColumns);
      const int64_t tiles = int64_t(p.tiles_n) * ((l.M + kRows - 1) / kRows);
      if (tiles > INT32_MAX / l.batch) {
        snprintf(message, size, "out: expected at most %d tiles of %dx%d, got M = %lld, N = %lld, a batch of %lld", INT32_MAX, kRows, kColumns,
                 static_cast<long long>(l.M), static_cast<long long>(l.N), static_cast<long long>(l.batch));
        return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
      }
      p.tiles = int(tiles);
      LaunchShape shape;
      shape.grid = dim3(unsigned(tiles * l.batch));
      shape.block = dim3(kThreads);
      void* pointers[] = {&p};
      return launch_kernel(kernel(), shape, pointers, l, message, size);
    }
  };
  template <class Tile>
  using Few = Variant<&few_rows_kernel<Tile, Out>, Tile::kRows, Tile::kColumns, Tile::kThreads>;
  using Few8 = Few<Rows8<Out>>;
  using Few16 = Few<Rows16<Out>>;
  using Few32 = Few<Rows32<Out>>;
  using Few64 = Few<Rows64<Out>>;
  using Tiles = Variant<&gemm_kernel<kTileM, kTileN, kTileK, Out>, kTileM, kTileN, generic::kThreads>;

public:
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    for (const auto one : {&Few8::prepare, &Few16::prepare, &Few32::prepare, &Few64::prepare, &Tiles::prepare}) {
      if (scaledMMStatus_t status = one(device, message, size)) return status;
    }
    return SCALED_MM_STATUS_SUCCESS;
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    Problem p = problem_of(l, kTileN);
    const bool fits = (l.N + Few8::kTileColumns - 1) / Few8::kTileColumns <= INT32_MAX / l.batch; // in a grid
    if (l.M > kFewRows || !fits || p.access_a == Access::kStrided || p.access_b == Access::kStrided) return Tiles::launch(p, l, message, size);
    const bool aligned = p.access_a == Access::kAligned && p.access_b == Access::kAligned;
    if (l.M <= 8 && aligned) return Few8::launch(p, l, message, size);
    if (l.M <= 16) return Few16::launch(p, l, message, size);
    return l.M <= 32 && aligned ? Few32::launch(p, l, message, size) : Few64::launch(p, l, message, size);
  }

  static constexpr Kernel entry(const char* row) { return {row, DtypeOf<Out>::value, int32_t((kTileM + kTileN) * (kTileK + 16)), &prepare, &launch}; }
};

} // namespace scaled_mm::generic
