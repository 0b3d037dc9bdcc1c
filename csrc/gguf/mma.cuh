// The gguf_mma family: a GGUF product by mma.sync, for few tokens on every GPU from Turing on. Bound by the bandwidth of reading the weight.
//
// A warp computes a strip, kBands bands of 16 rows of the weight, for kTokens tokens. Strips are dealt evenly to the SMs. Spare warps of a
// thread block split K with the others; the partial sums are added in a fixed order. Each warp fills its own ring of stages and waits for no
// other warp. Activations are staged in the workspace in the order of the instruction's operand. Few tokens are read in place instead (Rows):
// the warps that share a part of K copy them to shared memory first. One or two tokens are multiplied differently (Few).
//
// mma_kernel.cuh: the kernel. This file: the host side.
#pragma once

#include <climits>

#include "gguf/mma_kernel.cuh"
#include "gguf/round_rows.cuh"

namespace scaled_mm::gguf {

// A kernel config of a table's gguf section, for one GGUF format. kWarps: per thread block. kStages: of each warp's ring; 1 means no ring, weights
// go from device memory to registers.
template <class F, int kTokens, int kBands, int kWarps, int kStages, int kArch = compiled_architecture()>
struct Mma {
  static_assert(kTokens % 8 == 0 && kTokens <= 32 && kTileRows / kBandRows % kBands == 0 && kStages >= 1, "the rules of the table");
  static constexpr bool kDependent = kArch >= 90, kAmpere = kArch >= 80; // programmatic dependent launch; mma.sync of bfloat16 and TF32
  static constexpr int kRows = kBands * kBandRows;
  static constexpr int kRing = kStages > 1 ? kWarps *kStages *kBands *F::kBandBytes : 0, kPartial = kWarps * kRows * kTokens * 4;
  static constexpr int kSharedMemory =
      kRing > kPartial ? kRing : kPartial; // excludes Rows' slots and Few's extra stage: added at the launch if they fit in shared memory
  static constexpr bool kTakesRows = kTokens <= 16 && kAmpere && kStages > 1, kTakesFew = kTakesRows && kTokens == 8 && kBands == 1;

  // Selects the kernel of a launch.
  struct Choice {
    Activations activations;
    bool more_stages; // Few with kStages + 1: it multiplies less, so more loads must be in flight
  };

  template <class T, Factors kFactors, Activations kActivations = Activations::kStaged, int kRingStages = kStages>
  static DeviceKernel& device_kernel() {
    constexpr int kOfTile = kActivations == Activations::kFew ? Few<F>::kTokens : kTokens;
    static DeviceKernel one(&mma_kernel<F, T, kOfTile, kBands, kWarps, kRingStages, kFactors, kActivations>);
    return one;
  }

  template <Activations kActivations, int kRingStages, class Function>
  static scaledMMStatus_t for_floats(Values form, Function&& f) {
    constexpr Factors kFactors = factors_of<F>(Values::kHalf, kAmpere);
    if (form == Values::kHalf) return f(device_kernel<__half, kFactors, kActivations, kRingStages>());
    return f(device_kernel<__nv_bfloat16, kFactors, kActivations, kRingStages>());
  }

  // Calls f with the kernel for these activations.
  template <class Function>
  static scaledMMStatus_t for_kernel(Values form, Choice choice, Function&& f) {
    constexpr Factors kOfFloats = factors_of<F>(Values::kHalf, kAmpere);
    if constexpr (kTakesFew) {
      if (choice.activations == Activations::kFew) {
        return choice.more_stages ? for_floats<Activations::kFew, kStages + 1>(form, f) : for_floats<Activations::kFew, kStages>(form, f);
      }
    }
    if constexpr (kTakesRows) {
      if (choice.activations == Activations::kRows) return for_floats<Activations::kRows, kStages>(form, f);
    }
    if constexpr (kAmpere) {
      if (form == Values::kBfloat16) return f(device_kernel<__nv_bfloat16, kOfFloats>());
    }
    if constexpr (F::kMinimum && !kAmpere) {
      if (form == Values::kScaledHalf) return f(device_kernel<__half, kOfFloats>());
    }
    return form == Values::kHalf ? f(device_kernel<__half, kOfFloats>()) : f(device_kernel<__half, Factors::kScaled>());
  }

  // The most shared memory that a thread block may opt in to.
  static cudaError_t most_shared_memory(int device, int* bytes) {
    return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }

  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    int most = 0;
    if (cudaError_t error = most_shared_memory(device, &most)) return cuda_failure(error, "cudaDeviceGetAttribute", message, size);
    for (const Values form : {Values::kHalf, Values::kQuantized, Values::kBfloat16}) {
      for (const Choice c :
           {Choice{Activations::kStaged, false}, {Activations::kRows, false}, {Activations::kFew, false}, {Activations::kFew, true}}) {
        const bool in_place = c.activations != Activations::kStaged;
        if (in_place && (form == Values::kQuantized || !(c.activations == Activations::kFew ? kTakesFew : kTakesRows))) continue;
        const auto prepare_one = [&](DeviceKernel& kernel) { return prepare_kernel(kernel, in_place ? most : kSharedMemory, device, message, size); };
        if (scaledMMStatus_t status = for_kernel(form, c, prepare_one)) return status;
      }
    }
    return SCALED_MM_STATUS_SUCCESS;
  }

  static int64_t workspace_size(int64_t M, int64_t N, int64_t K, const BlockOperands& o, int32_t) {
    return with_rounded_rows(M, K, o, [&](const BlockOperands& o) { return stage_layout<F>(M, N, K, o, kTokens, kAmpere).end; });
  }

  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    return launch_with_rounded_rows(
        l, kDependent, [&](const BlockOperands& o) { return workspace_size(l.M, l.N, l.K, o, l.multiprocessors); },
        [&](const GemmLaunch& l, const float* token_scales) { return run(l, token_scales, message, size); }, message, size);
  }

  static scaledMMStatus_t run(const GemmLaunch& l, const float* token_scales, char* message, size_t size) {
    const int64_t token_tiles = tiles_of(l.M, kTokens), strips = tiles_of(l.N, kRows);
    // Strips per thread block: the fewest with which `rounds` thread blocks per SM cover all strips.
    const int64_t all = l.multiprocessors > 0 ? l.multiprocessors : 1, rounds = tiles_of(strips, all * kWarps);
    const int width = int(tiles_of(strips, all * rounds));
    const int64_t groups = tiles_of(strips, width);
    if (strips > INT_MAX / kRows || groups > INT_MAX / token_tiles) {
      snprintf(message, size, "out: expected at most %d rows and %d tiles of %d tokens and %d rows for this kernel, got %lld tokens and %lld rows",
               INT_MAX / kRows * kRows, INT_MAX, kTokens, width * kRows, static_cast<long long>(l.M), static_cast<long long>(l.N));
      return SCALED_MM_STATUS_BAD_TENSOR_SHAPE;
    }
    const int64_t tiles_k = tiles_of(l.K, kTileK);
    Choice choice = {Activations::kStaged, false};
    int64_t used = kSharedMemory;
    if (kTakesRows && l.M <= kTokens && in_place(l, values_of(*l.blocks, kAmpere))) {
      int most = 0;
      if (cudaError_t error = most_shared_memory(l.device, &most)) return cuda_failure(error, "cudaDeviceGetAttribute", message, size);
      const int64_t wanted = kRing + tiles_k * Rows::slot_bytes(int(l.M), F::kMinimum), with_more = wanted + kRing / kStages;
      if (wanted <= most) {
        const bool few = kTakesFew && l.M <= Few<F>::kTokens;
        choice = {few ? Activations::kFew : Activations::kRows, few && with_more <= most};
        const int64_t taken = choice.more_stages ? with_more : wanted;
        if (taken > used) used = taken;
      }
    }
    const bool staging = choice.activations == Activations::kStaged;
    Staged staged;
    if (scaledMMStatus_t status = stage<F>(l, {kTokens, staging, kAmpere, kDependent, staging}, &staged, message, size)) return status;
    const int parts = kWarps / width;
    MmaParams p = {staged.tiles,
                   static_cast<const uint4*>(staged.values),
                   staged.factors,
                   output_of(l, token_scales),
                   int32_t(tiles_k),
                   int32_t(strips),
                   width,
                   parts,
                   int32_t(groups),
                   l.constant_b && l.blocks->packed,
                   (1 << 16) / width + 1,
                   int32_t(tiles_k / parts),
                   int32_t(tiles_k % parts),
                   {static_cast<const uint8_t*>(l.a), staged.stride * 2, int32_t(l.K), int32_t(l.M)}};
    LaunchShape shape;
    shape.grid = dim3(unsigned(groups * token_tiles));
    shape.block = dim3(32 * kWarps);
    shape.shared_memory = int(used);
    shape.dependent = kDependent;
    void* params[] = {&p};
    return for_kernel(staged.form, choice, [&](DeviceKernel& kernel) { return launch_kernel(kernel, shape, params, l, message, size); });
  }

  static Kernel entry(const char* row) {
    Kernel kernel = {row, F::kDtype, kSharedMemory, &prepare, &launch};
    kernel.block_workspace_size = &workspace_size;
    return kernel;
  }
};

} // namespace scaled_mm::gguf
