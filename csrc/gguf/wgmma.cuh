// The gguf_wgmma family: a GGUF product by wgmma on SM90. The levels of the weight become exact 16-bit floats in registers; the activations are
// in shared memory. Every GGUF block along K has its own accumulators. They are scaled into float32 sums while the next block is multiplied.
//
// A tile of the output is kRows rows of the weight, 64 per warpgroup, and kTokens tokens. A thread block computes whole tiles, and a share of
// the tiles that would leave SMs idle (shares.cuh), or a cluster shares every tile (wgmma_cluster.cuh). One producer thread, or two, load ahead, also
// across tiles, into two rings of stages: one for tiles of the weight and the sums by which their minima are multiplied, one for activations. A
// constant packed weight is loaded before the preceding kernel has ended (docs/decisions/0011).
//
// wgmma_shape.cuh: the instruction, tile sizes and shared memory. wgmma_loads.cuh: what the producer loads. wgmma_narrow.cuh, wgmma_wide.cuh: a tile
// of few tokens by mma.sync, of more by wgmma. wgmma_rounded.cuh: one of rounded weights. wgmma_store.cuh: stores a tile beside the next one.
// wgmma_cluster.cuh: thread blocks of a cluster that share a tile. wgmma_kernel.cuh: the kernel. This file: the host side. wgmma_more.cuh: for more
// tile sizes.
#pragma once

#include <climits>
#include <cstring>

#include "gguf/output.cuh"
#include "gguf/round_rows.cuh"
#include "gguf/shares.cuh"
#include "gguf/stage.cuh"
#include "gguf/wgmma_kernel.cuh"

namespace scaled_mm::gguf {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
inline DriverFunction<EncodeTiled> driver_encode_tiled("cuTensorMapEncodeTiled");

// A kernel config of sm90.yaml's gguf section, for one GGUF format.
// kCluster: the most thread blocks of a cluster, which share the K of every tile; 1: no clusters. kRounds: whether weights may be rounded.
template <class F, int kTokens, int kRows, int kSplit, int kStages, int kCluster = 1, bool kRounds = true>
struct Wgmma {
  static_assert((kRows == 64 || kRows == 128) && kSplit >= 1 && kSplit <= 16, "the rules of the table");
  // Tiles of other numbers of tokens, and clusters, are only for weights that are rounded.
  static constexpr bool kExact = (kTokens & (kTokens - 1)) == 0 && kCluster == 1;
  // A kernel config of more than 128 tokens also contains a kernel with tiles of 128 tokens. That one has registers for factors and, for formats with
  // minima, for dealing tiles. One that is not exact contains a kernel that is.
  static constexpr bool kFewer = kTokens > 128 || !kExact;
  static constexpr int kTokensOfFewer = kTokens > 128 ? 128 : kExact ? kTokens : 64;
  using Fewer = Wgmma<F, kTokensOfFewer, kRows, kSplit, (kCluster > 1 ? 2 : kTokens > 128 ? kStages + 1 : kStages), 1, false>;
  using Shape = WgmmaShape<F, kTokens, kRows, kStages>;
  using RoundedShape = WgmmaShape<F, kTokens, kRows, kStages, true, kCluster>;
  template <class S>
  static constexpr int kMemoryOf = int(sizeof(typename S::Storage));
  static constexpr int kSharedMemory = kMemoryOf<std::conditional_t<kExact, Shape, RoundedShape>>;
  static_assert(kSharedMemory <= 227 * 1024 && kMemoryOf<RoundedShape> <= 227 * 1024, "the shared memory of SM90");
  static constexpr Factors kOfFloats = factors_of<F>(Values::kHalf, true);

  template <class T, Factors kFactors>
  static DeviceKernel& device_kernel() {
    static DeviceKernel one(&wgmma_kernel<F, T, std::conditional_t<kFactors == Factors::kRounded, RoundedShape, Shape>, kFactors>);
    return one;
  }

  // Whether the weight's values are rounded: where wgmma multiplies them.
  static bool rounds(const BlockOperands& o) { return RoundedShape::kWide && o.round && o.packed; }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    if (scaledMMStatus_t status = Fewer::prepare_scaled(device, message, size)) return status;
    if constexpr (!Shape::kDeals || !kExact) {
      if (scaledMMStatus_t status = Fewer::prepare(device, message, size)) return status;
    }
    if (scaledMMStatus_t status = prepare_kernel(add_shares_kernel(), 0, device, message, size)) return status;
    if constexpr (RoundedShape::kWide && kRounds) {
      for (DeviceKernel* one : {&device_kernel<__half, Factors::kRounded>(), &device_kernel<__nv_bfloat16, Factors::kRounded>()}) {
        if (scaledMMStatus_t status = prepare_kernel(*one, kMemoryOf<RoundedShape>, device, message, size)) return status;
      }
    }
    if constexpr (kExact) {
      if (scaledMMStatus_t status = prepare_kernel(device_kernel<__half, kOfFloats>(), kSharedMemory, device, message, size)) return status;
      return prepare_kernel(device_kernel<__nv_bfloat16, kOfFloats>(), kSharedMemory, device, message, size);
    }
    return SCALED_MM_STATUS_SUCCESS;
  }

  static scaledMMStatus_t prepare_scaled(int32_t device, char* message, size_t size) {
    return prepare_kernel(device_kernel<__half, Factors::kScaled>(), kSharedMemory, device, message, size);
  }

  static int64_t tiles(int64_t M, int64_t N) { return tiles_of(M, kTokens) * tiles_of(N, kRows); }

  template <class S>
  static ClusterBlocks cluster_of(int64_t M, int64_t N, int64_t K, int32_t multiprocessors) {
    if constexpr (!S::kClusters) return {1, 0, 0};
    return cluster_blocks(tiles(M, N), tiles_of(K, kTileK), multiprocessors, S::kResident, S::kCluster);
  }

  template <class S>
  static Shares shares_of(int64_t M, int64_t N, int64_t K, int32_t multiprocessors) {
    if constexpr (S::kClusters) { // whole tiles, several for a cluster if there are more than clusters at a time
      const int64_t all = tiles(M, N), clusters = cluster_of<S>(M, N, K, multiprocessors).at_once;
      return {int32_t(all), 0, 0, int32_t(tiles_of(K, kTileK)), 0, 0, int32_t(all < clusters ? all : clusters), nullptr};
    }
    const int64_t slots = S::kDeals ? int64_t(multiprocessors) * S::kAtOnce : 0;
    return share_tiles(tiles(M, N), tiles_of(K, kTileK), slots, kSplit, kTokens);
  }

  // Whether Fewer computes a product: if weights are not rounded but this config's are, if activations are quantized, or if tiles are not dealt and
  // over a twentieth of the SMs would be idle.
  static bool is_for_fewer(int64_t M, int64_t N, const BlockOperands& o, int32_t multiprocessors) {
    if (!kFewer || rounds(o)) return false;
    if (!kExact || values_of(o, true) == Values::kQuantized) return true;
    return !Shape::kDeals && multiprocessors > 0 && 20 * tiles(M, N) < 19 * tiles_of(tiles(M, N), multiprocessors) * multiprocessors;
  }

  static int64_t workspace_size(int64_t M, int64_t N, int64_t K, const BlockOperands& o, int32_t multiprocessors) {
    return with_rounded_rows(M, K, o, [&](const BlockOperands& o) { return bytes_of(M, N, K, o, multiprocessors); });
  }

  static int64_t bytes_of(int64_t M, int64_t N, int64_t K, const BlockOperands& o, int32_t multiprocessors) {
    if (is_for_fewer(M, N, o, multiprocessors)) return Fewer::bytes_of(M, N, K, o, multiprocessors);
    const Shares shares = rounds(o) ? shares_of<RoundedShape>(M, N, K, multiprocessors) : shares_of<Shape>(M, N, K, multiprocessors);
    const int64_t parts = shares.blocks ? shares.blocks + shares.tiles - 1 : 0;
    return stage_layout<F>(M, N, K, o, kTokens, true).end + parts * (kTokens * kRows * int64_t(sizeof(float)));
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    return launch_with_rounded_rows(
        l, true, [&](const BlockOperands& o) { return bytes_of(l.M, l.N, l.K, o, l.multiprocessors); },
        [&](const GemmLaunch& l, const float* token_scales) { return launch_floats(l, token_scales, message, size); }, message, size);
  }

  // Activations that are not rounded from float32 any more.
  static scaledMMStatus_t launch_floats(const GemmLaunch& l, const float* token_scales, char* message, size_t size) {
    if constexpr (RoundedShape::kWide && kRounds) {
      if (rounds(*l.blocks)) {
        return run<RoundedShape>(l, token_scales, message, size, [](Values form) -> DeviceKernel& {
          return form == Values::kBfloat16 ? device_kernel<__nv_bfloat16, Factors::kRounded>() : device_kernel<__half, Factors::kRounded>();
        });
      }
    }
    if constexpr (!kExact) {
      return Fewer::launch_floats(l, token_scales, message, size);
    } else {
      if (values_of(*l.blocks, true) == Values::kQuantized) return Fewer::run_scaled(l, message, size);
      if constexpr (!Shape::kDeals) {
        if (is_for_fewer(l.M, l.N, *l.blocks, l.multiprocessors)) return Fewer::launch_floats(l, token_scales, message, size);
      }
      return run<Shape>(l, token_scales, message, size, [](Values form) -> DeviceKernel& {
        return form == Values::kBfloat16 ? device_kernel<__nv_bfloat16, kOfFloats>() : device_kernel<__half, kOfFloats>();
      });
    }
  }

  static scaledMMStatus_t run_scaled(const GemmLaunch& l, char* message, size_t size) {
    return run<Shape>(l, nullptr, message, size, [](Values) -> DeviceKernel& { return device_kernel<__half, Factors::kScaled>(); });
  }

  // Whether bulk copies can store the outputs. Those of a token must be contiguous and fill whole units of 16 bytes: of a unit that is partly beyond
  // the last row a bulk copy stores all (measured on an H200). The data pointer and the distance of tokens must be multiples of 16 bytes, too.
  static bool takes_boxes(const GemmLaunch& l) {
    const int64_t aligned = l.blocks->out_dtype == SCALED_MM_DTYPE_FLOAT32 ? 4 : 8; // elements
    return l.out_stride_n == 1 && l.N % aligned == 0 && reinterpret_cast<uintptr_t>(l.out) % 16 == 0 &&
           (l.M == 1 || (l.out_stride_m % aligned == 0 && l.out_stride_m >= l.N));
  }

  // kernel_of(form): the kernel for activations in that form, with tiles of S.
  template <class S, class KernelOf>
  static scaledMMStatus_t run(const GemmLaunch& l, const float* token_scales, char* message, size_t size, KernelOf&& kernel_of) {
    const int64_t tiles_m = tiles_of(l.M, kTokens), tiles_n = tiles_of(l.N, kRows);
    if (tiles_n > INT_MAX / tiles_m) {
      snprintf(message, size, "out: expected at most %d tiles of %d tokens and %d rows for this kernel, got %lld tokens and %lld rows", INT_MAX,
               kTokens, kRows, static_cast<long long>(l.M), static_cast<long long>(l.N));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    Staged staged;
    constexpr bool kFactors = !std::is_same_v<S, RoundedShape> || !S::kWide;
    if (scaledMMStatus_t status = stage<F>(l, {kTokens, false, true, true, kFactors}, &staged, message, size)) return status;
    WgmmaParams p;
    memset(&p, 0, sizeof(p));
    p.tiles = staged.tiles;
    p.factors = staged.factors;
    p.output = output_of(l, token_scales);
    p.output_tiles = OutputTiles::of(tiles_n, tiles_m);
    p.shares = shares_of<S>(l.M, l.N, l.K, l.multiprocessors);
    p.shares.sums = reinterpret_cast<float4*>(static_cast<uint8_t*>(l.workspace) + stage_layout<F>(l.M, l.N, l.K, *l.blocks, kTokens, true).end);
    p.early_weights = l.constant_b && l.blocks->packed;
    p.last_pairs = S::kSkips && l.K > 0 ? int32_t(tiles_of((l.K - 1) % kTileK + 1, 2 * kBlock)) : S::kPerTile;
    if (l.K > 0) {
      EncodeTiled encode = nullptr;
      CurrentDevice current(l.device);
      if (current.error()) return cuda_failure(current.error(), "cudaSetDevice", message, size);
      if (cudaError_t error = driver_encode_tiled.find(&encode)) return cuda_failure(error, "looking up cuTensorMapEncodeTiled", message, size);
      // Of M rows, in boxes of 128 bytes of `tokens` rows.
      const auto map = [&](CUtensorMap* to, const void* from, int32_t dtype, int64_t columns, int64_t stride, int tokens) {
        const cuuint32_t bytes = dtype == SCALED_MM_DTYPE_FLOAT32 ? 4 : 2, box[2] = {128 / bytes, cuuint32_t(tokens)}, one[2] = {1, 1};
        const cuuint64_t sizes[2] = {cuuint64_t(columns), cuuint64_t(l.M)}, strides[1] = {cuuint64_t(stride) * bytes};
        const CUtensorMapDataType type = bytes == 4                          ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                         : dtype == SCALED_MM_DTYPE_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        return encode(to, type, 2, const_cast<void*>(from), sizes, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
      };
      const int32_t values_dtype = staged.form == Values::kBfloat16 ? SCALED_MM_DTYPE_BFLOAT16 : SCALED_MM_DTYPE_FLOAT16;
      CUresult result = map(&p.values, staged.values, values_dtype, l.K, staged.stride, S::kBoxTokens);
      const bool any_full = kTokens > S::kBoxTokens && l.M > kTokens - S::kBoxTokens; // any tile: WgmmaLoads::values
      if (result == CUDA_SUCCESS && any_full) result = map(&p.full, staged.values, values_dtype, l.K, staged.stride, kTokens);
      if (result != CUDA_SUCCESS) return cuda_failure(static_cast<cudaError_t>(result), "cuTensorMapEncodeTiled", message, size);
      if (std::is_same_v<S, RoundedShape> && BoxStore<S>::kPossible && p.shares.whole > 0 && takes_boxes(l)) {
        // Outputs that a tensor map cannot describe are stored one by one.
        p.stores_boxes = map(&p.outputs, l.out, l.blocks->out_dtype, l.N, l.M > 1 ? l.out_stride_m : l.N, S::kBoxTokens) == CUDA_SUCCESS;
      }
    }
    LaunchShape shape;
    shape.cluster = dim3(unsigned(cluster_of<S>(l.M, l.N, l.K, l.multiprocessors).blocks));
    shape.grid = dim3(unsigned(p.shares.thread_blocks) * shape.cluster.x);
    shape.block = dim3(S::kThreads);
    shape.shared_memory = kMemoryOf<S>;
    shape.dependent = true;
    void* params[] = {&p};
    if (scaledMMStatus_t status = launch_kernel(kernel_of(staged.form), shape, params, l, message, size)) return status;
    if (p.shares.blocks == 0) return SCALED_MM_STATUS_SUCCESS;
    return launch_add_shares({p.shares, p.output, p.output_tiles, kTokens}, kRows, l, message, size);
  }

  static Kernel entry(const char* row) {
    Kernel kernel = {row, F::kDtype, kSharedMemory, &prepare, &launch};
    kernel.block_workspace_size = &workspace_size;
    return kernel;
  }
};

// A kernel config whose clusters share tiles: for weights that round. For others it contains a kernel without clusters.
template <class F, int kTokens, int kRows, int kCluster, int kStages>
using WgmmaCluster = Wgmma<F, kTokens, kRows, 16, kStages, kCluster>;

} // namespace scaled_mm::gguf
