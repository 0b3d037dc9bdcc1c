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
  p.packed = o.ids.k == 1 && o.ids.row == p.choices;
  // More than 64 thread blocks would read more than they save.
  const int64_t blocks = l.multiprocessors < 64 ? l.multiprocessors : 64, round = blocks * kMoeIds;
  p.each = p.count > 0 ? (p.count + round - 1) / round * kMoeIds : kMoeIds;
  p.order = static_cast<int32_t*>(l.out);
  p.ends = static_cast<int32_t*>(const_cast<void*>(at.ends));
  p.inverse = static_cast<int32_t*>(const_cast<void*>(at.inverse));
  return p;
}

inline int64_t moe_sort_blocks(const MoeSort& p) { return p.count > 0 ? (int64_t(p.count) + p.each - 1) / p.each : 1; }

// Few ids: a cluster would take longer to start than it saves.
inline bool moe_sort_in_clusters(const MoeSort& p) { return kDependent && moe_sort_blocks(p) > 2 * kMoeCluster; }

struct MoeSortKernel {
  template <int kBlocks>
  static DeviceKernel& device_kernel() {
    static DeviceKernel instance(&moe_sort_kernel<kBlocks>);
    return instance;
  }
  static scaledMMStatus_t prepare(int32_t device, char* message, size_t size) {
    if (scaledMMStatus_t s = prepare_kernel(device_kernel<1>(), 0, device, message, size)) return s;
    if constexpr (kDependent) return prepare_kernel(device_kernel<kMoeCluster>(), 0, device, message, size);
    return SCALED_MM_STATUS_SUCCESS;
  }
  static scaledMMStatus_t launch(const GemmLaunch& l, char* message, size_t size) {
    MoeSort p = moe_sort_of(l);
    LaunchShape shape;
    shape.grid = dim3(unsigned(moe_sort_blocks(p)));
    shape.block = dim3(kMoeThreads);
    shape.dependent = kDependent;
    void* pointers[] = {&p};
    if constexpr (kDependent) {
      if (moe_sort_in_clusters(p)) {
        shape.grid.x = (shape.grid.x + kMoeCluster - 1) / kMoeCluster * kMoeCluster;
        shape.cluster.x = kMoeCluster;
        return launch_kernel(device_kernel<kMoeCluster>(), shape, pointers, l, message, size);
      }
    }
    return launch_kernel(device_kernel<1>(), shape, pointers, l, message, size);
  }
};

template <class Ids>
constexpr Kernel moe_sort_entry(const char* name, int32_t dtype) {
  return {name, dtype, 0, &MoeSortKernel::prepare, &MoeSortKernel::launch};
}

} // namespace scaled_mm::rowwise
