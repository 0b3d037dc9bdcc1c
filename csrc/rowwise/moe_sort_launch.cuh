// The host side of the order by expert.
#pragma once

#include "rowwise/launch.cuh"
#include "rowwise/moe_sort.cuh"

namespace scaled_mm::rowwise {

inline MoeSort moe_sort_of(const GemmLaunch& l) {
  const MoeOperands& o = *l.moe;
  const MoePointers& at = l.moe_pointers;
  MoeSort p = {};
  p.ids = l.a;
  p.ids_stride_token = o.ids.row;
  p.ids_stride_choice = o.ids.k;
  p.wide = o.wide_ids;
  p.expert_map = static_cast<const int32_t*>(at.expert_map);
  p.map_stride = o.map_stride;
  p.mapped = o.mapped;
  p.choices = int(o.choices > 0 ? o.choices : 1);
  p.count = int(l.M * o.choices);
  p.experts = int(o.experts);
  // Every thread block reads all ids: no more thread blocks than multiprocessors.
  const int64_t share = (p.count + int64_t(l.multiprocessors) - 1) / l.multiprocessors;
  const int64_t least = 4 * kMoeThreads, each = share > least ? share : least;
  p.each = (each + kMoeThreads - 1) / kMoeThreads * kMoeThreads;
  p.order = static_cast<int32_t*>(l.out);
  p.ends = static_cast<int32_t*>(const_cast<void*>(at.ends));
  p.inverse = static_cast<int32_t*>(const_cast<void*>(at.inverse));
  return p;
}

inline int64_t moe_sort_blocks(const MoeSort& p) { return p.count > 0 ? (int64_t(p.count) + p.each - 1) / p.each : 1; }

struct MoeSortKernel {
  static DeviceKernel& device_kernel() {
    static DeviceKernel instance(&moe_sort_kernel);
    return instance;
  }
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) { return prepare_kernel(device_kernel(), 0, device, message, size); }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    MoeSort p = moe_sort_of(l);
    return launch_grid(device_kernel(), moe_sort_blocks(p), kMoeThreads, &p, l, message, size);
  }
};

template <class Ids>
constexpr Kernel moe_sort_entry(const char* name, int32_t dtype) {
  return {name, dtype, 0, &MoeSortKernel::prepare, &MoeSortKernel::launch};
}

} // namespace scaled_mm::rowwise
