// The functions of descriptors, for a product of any kind.
#include "hostile.h"

#include <cstdlib>
#include <utility>

namespace hostile {

namespace {

// The header's typed functions take as many operands as the kind has.
template <size_t... I, class Function, class... Last>
scaledMMStatus_t create_typed(std::index_sequence<I...>, Function* function, scaledMMHandle_t handle, scaledMMDescriptor_t* made, const Descs& s,
                              Last... last) {
  return function(handle, made, s.t[I]..., last...);
}
template <size_t... I, class Function>
scaledMMStatus_t calculate_typed(std::index_sequence<I...>, Function* function, scaledMMDescriptor_t d, void* workspace, size_t size,
                                 void* const (&p)[kMost]) {
  return function(d, workspace, size, p[I]..., nullptr);
}
template <Kind kind>
using OperandsOf = std::make_index_sequence<kTensors[kind]>;

} // namespace

scaledMMStatus_t create(scaledMMHandle_t handle, void** d, const Product& p) {
  const Descs s(p);
  auto* made = reinterpret_cast<scaledMMDescriptor_t*>(d);
  static std::atomic<unsigned> turn{0};
  if (turn++ % 2) return scaledMMCreateDescriptor(handle, made, kProducts[p.kind], s.t, kTensors[p.kind], p.kind == kGguf ? p.mode : 0, p.kernel);
  switch (p.kind) {
  case kGemm: return create_typed(OperandsOf<kGemm>(), scaledMMCreateGemmDescriptor, handle, made, s, p.kernel);
  case kGrouped: return create_typed(OperandsOf<kGrouped>(), scaledMMCreateGroupedGemmDescriptor, handle, made, s, p.kernel);
  case kBlockScaled: return create_typed(OperandsOf<kBlockScaled>(), scaledMMCreateBlockScaledGemmDescriptor, handle, made, s, p.kernel);
  case kGguf: return create_typed(OperandsOf<kGguf>(), scaledMMCreateGgufGemmDescriptor, handle, made, s, p.mode, p.kernel);
  case kGroupedBlockScaled:
    return create_typed(OperandsOf<kGroupedBlockScaled>(), scaledMMCreateGroupedBlockScaledGemmDescriptor, handle, made, s, p.kernel);
  case kKinds: break;
  }
  abort();
}

scaledMMStatus_t check(Kind kind, void* d, const Product& p) {
  return scaledMMCheckTensors(static_cast<scaledMMDescriptor_t>(d), kProducts[kind], Descs(p).t, kTensors[kind]);
}

scaledMMStatus_t calculate(Kind kind, void* object, void* workspace, size_t size, void* const (&p)[kMost]) {
  auto* d = static_cast<scaledMMDescriptor_t>(object);
  static std::atomic<unsigned> turn{0};
  if (turn++ % 2) return scaledMMCalculate(d, kProducts[kind], workspace, size, p, kTensors[kind], nullptr);
  switch (kind) {
  case kGemm: return calculate_typed(OperandsOf<kGemm>(), scaledMMCalculateGemm, d, workspace, size, p);
  case kGrouped: return calculate_typed(OperandsOf<kGrouped>(), scaledMMCalculateGroupedGemm, d, workspace, size, p);
  case kBlockScaled: return calculate_typed(OperandsOf<kBlockScaled>(), scaledMMCalculateBlockScaledGemm, d, workspace, size, p);
  case kGguf: return calculate_typed(OperandsOf<kGguf>(), scaledMMCalculateGgufGemm, d, workspace, size, p);
  case kGroupedBlockScaled: return calculate_typed(OperandsOf<kGroupedBlockScaled>(), scaledMMCalculateGroupedBlockScaledGemm, d, workspace, size, p);
  case kKinds: break;
  }
  abort();
}

scaledMMStatus_t get_workspace_size(void* d, size_t* bytes) { return scaledMMGetWorkspaceSize(static_cast<scaledMMDescriptor_t>(d), bytes); }

scaledMMStatus_t get_device(void* d, int32_t* type, int32_t* id) { return scaledMMGetDevice(static_cast<scaledMMDescriptor_t>(d), type, id); }

scaledMMStatus_t get_kernel(void* d, scaledMMKernelChoice_t* choice) { return scaledMMGetKernel(static_cast<scaledMMDescriptor_t>(d), choice); }

scaledMMStatus_t destroy(void* d) { return scaledMMDestroyDescriptor(static_cast<scaledMMDescriptor_t>(d)); }

} // namespace hostile
