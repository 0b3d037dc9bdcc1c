// The wgmma instruction, and the tile sizes, stages and shared memory of a kernel that uses it.
#pragma once

#include <type_traits>
#include <utility>

#include "gguf/hopper.cuh"
#include "gguf/shares.cuh"
#include "cute/arch/mma_sm90.hpp"

namespace scaled_mm::gguf {

template <class T, int kTokens>
using Atom = decltype(cute::SM90::GMMA::rs_op_selector<std::conditional_t<std::is_same_v<T, __half>, cute::half_t, cute::bfloat16_t>,
                                                       std::conditional_t<std::is_same_v<T, __half>, cute::half_t, cute::bfloat16_t>, float,
                                                       cute::Shape<cute::_64, cute::Int<kTokens>, cute::_16>, cute::SM90::GMMA::Major::K,
                                                       cute::SM90::GMMA::Major::K>());

// p (+)= a (64 x 16, registers) * b (16 x tokens, shared memory)
template <class T, size_t... I>
__device__ inline void multiply(float* p, const uint32_t (&a)[4], uint64_t b, bool add, std::index_sequence<I...>) {
  Atom<T, int(sizeof...(I)) * 2>::fma(a[0], a[1], a[2], a[3], b, p[I]..., add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// The matrix descriptor of rows of 64 16-bit values in the 128-byte swizzle.
__device__ inline uint64_t descriptor_of(const void* rows) {
  const uint32_t address = cute::cast_smem_ptr_to_uint(rows);
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}
// That of rows `bytes` further on.
__device__ inline uint64_t descriptor_of(uint64_t first, uint32_t bytes) { return first + bytes / 16; }

struct WgmmaParams {
  CUtensorMap values;  // [M, K], boxes of kBoxTokens x 64
  CUtensorMap full;    // the same in boxes of kTokens x 64, for tiles all of whose boxes have tokens; if kBoxTokens is less
  CUtensorMap outputs; // [M, N], boxes of kBoxTokens x 128 bytes; if stores_boxes
  const uint8_t* tiles;
  const float2* factors;
  Output output;
  Shares shares;
  OutputTiles output_tiles;
  int32_t last_pairs; // pairs of blocks in the last step of a tile: 1 to 4 if kSkips, else kPerTile, which means all
  bool early_weights;
  bool stores_boxes; // whole tiles of Factors::kRounded are stored by bulk copies (wgmma_store.cuh)
};

// The largest box that a tile of this many tokens has a whole number of: up to 64 tokens, a multiple of the swizzle's 8 rows.
constexpr int box_of_many(int tokens) {
  int box = 64;
  while (tokens % box != 0) box -= 8;
  return box;
}

// Tile sizes and shared memory. A stage holds kBoxes times kTokens x 64 k of activations. kRounded: for Factors::kRounded. kCluster: the most
// thread blocks of a cluster, which share the K of every tile.
template <class F, int kTokens_, int kRows_, int kStages_, bool kRounded = false, int kCluster_ = 1>
struct WgmmaShape {
  static constexpr int kTokens = kTokens_, kRows = kRows_, kStages = kStages_, kCluster = kCluster_;
  static constexpr bool kClusters = kCluster > 1;
  static constexpr bool kWide = kTokens >= 32 || kClusters; // multiplies by wgmma, else by mma.sync
  static constexpr int kGroups = kRows / kTileRows, kConsumers = kGroups * 128;
  static constexpr int kBoxes = kWide ? 1 : 4, kPerTile = 4 / kBoxes; // kPerTile: stages of activations for each tile of the weight
  // A box of the tensor map is kBoxTokens x 64 k. Boxes past the last token are not loaded: rows of zeros take longer than rows of memory.
  static constexpr int kBoxTokens = kTokens < 32 ? kTokens : kTokens < 128 ? 32 : box_of_many(kTokens);
  // Two warpgroups of 64 rows and many tokens: registers move from the producer to the consumers, which takes a whole producer warpgroup.
  static constexpr bool kReconfigure = kWide && kGroups == 2;
  static constexpr int kThreads = kConsumers + (kReconfigure ? 128 : 32);
  // Lanes of a consumer warp that arrive at the barrier of a stage when all have read it: one is enough after __syncwarp. racecheck does not follow
  // __syncwarp, so in wide kernels every lane arrives, and tests/robustness/test_sanitizer.py sets 32 for narrow ones too.
  static constexpr int kArrivals = kWide ? 32 : 1;
  // The same for a stage of activations. In wide kernels wgmma reads the activations, so one lane arrives; with kScaled, lanes read factors too.
  template <Factors kFactors>
  static constexpr int kValueArrivals = kWide && kFactors != Factors::kScaled ? 1 : kArrivals;

  static_assert(!kClusters || (kRounded && kWide), "the rules of the table");
  // Of a tile's tokens, by eights, the most that a thread block stores of a cluster of `blocks`.
  __host__ __device__ static constexpr int fragments_of(int blocks) { return (kTokens / 8 + blocks - 1) / blocks; }
  static constexpr int most_received() {
    int most = 1;
    for (const int blocks : kClusterSizes) {
      const int received = (blocks - 1) * fragments_of(blocks);
      if (blocks <= kCluster && received > most) most = received;
    }
    return most;
  }
  static constexpr int kReceived = most_received();

  static constexpr int kLoaded = kRounded ? F::kTileBytes : F::kBandsBytes; // of a tile

  template <int kValueStages>
  struct alignas(1024) StorageOf {
    uint8_t values[kValueStages][kBoxes][kTokens * 128];
    alignas(128) uint8_t tiles[kStages][kGroups][kLoaded];
    union {
      alignas(128) float2 factors[kRounded ? 1 : kValueStages][kBoxes * 2][kRounded ? 1 : kTokens];                        // Factors::kScaled
      alignas(128) uint4 sums_of_values[F::kMinimum && !kRounded ? kStages : 1][kRounded ? 1 : kTokens * kTileBlocks / 2]; // Factors::kSums
    };
    // The sums of the cluster's other thread blocks, for the tokens that this one stores.
    alignas(128) float4 received[kReceived][kClusters ? kConsumers : 1];
    FullBarrier tiles_full[kStages], values_full[kValueStages], received_full;
    EmptyBarrier tiles_empty[kStages], values_empty[kValueStages], received_empty;
    Share share;
  };
  template <class Storage>
  static constexpr int kFitOf = 228 * 1024 / int(sizeof(Storage) + 1024); // thread blocks per SM; each reserves 1 KiB for the system
  // Two thread blocks per SM for up to 64 tokens, if few stages leave room for both. With minima, 64 tokens need too many registers.
  static constexpr bool kPair =
      (kTokens <= 32 || (kTokens == 64 && (kRounded || !F::kMinimum))) && kGroups == 2 && kStages <= 3 && kFitOf<StorageOf<4>> >= 2;
  // Stages of activations. Two thread blocks per SM and factors leave room for four. Five make 256 tokens slower, but for short K: with four or
  // eight, a step's stages are the same ones each time or each second time, which saves instructions.
  template <int kValueStages>
  static constexpr bool kFits = sizeof(StorageOf<kValueStages>) <= 227 * 1024;
  static constexpr int kValueStages = !kWide                                                    ? kStages
                                      : kPair || kTokens == 256 || (kTokens > 128 && !kRounded) ? 4
                                      : kRounded && kFits<8>                                    ? 8
                                      : kFits<6>                                                ? 6
                                      : kFits<5>                                                ? 5
                                                                                                : 4;
  using Storage = StorageOf<kValueStages>;
  // Thread blocks per SM: as many as hide each other's latency, at most as many as shared memory holds.
  static constexpr int kWanted = kTokens >= 128 ? 1 : !kWide ? 4 : kGroups == 1 ? 3 : kPair ? 2 : 1;
  static constexpr int kFit = kFitOf<Storage>;
  static constexpr int kResident = kWanted < kFit ? kWanted : kFit > 1 ? kFit : 1;
  // Whether a thread block may have several tiles, or parts of them. 256 tokens with minima leave no registers for the bookkeeping.
  static constexpr bool kDeals = kTokens <= 128 || !F::kMinimum || kRounded;
  // Thread blocks per SM that work is dealt to: more than two bring nothing.
  static constexpr int kAtOnce = kResident < 2 ? kResident : 2;
  // Factors::kRounded: pairs of blocks that the last step of K does not have are not multiplied. Two thread blocks of 64 tokens leave no registers
  // for it.
  static constexpr bool kSkips = kRounded && kWide && !(kPair && kTokens == 64);
  // Registers per thread after reconfiguration: of producer warps, of consumer warps.
  static constexpr int kLoading = kPair ? 32 : 40, kMultiplying = kPair ? 104 : 232;
};

} // namespace scaled_mm::gguf
