#include "core/stand_in.h"

#include "core/status.h"

namespace scaled_mm {
namespace {

class Search {
public:
  Search(Arch* arch, const KernelWish& wish, const Problem& problem, const scaledMMHandleInfo_t& device)
      : arch_(arch), wish_(wish), problem_(problem), device_(device) {}

  KernelName name_of(const TableRow& row) const {
    return {arch_, row.name.c_str(), problem_.variant, device_.device_id, device_.max_shared_memory, row.slot(problem_.variant)};
  }

  // Finds the first stand-in; plan->kernel stays nullptr if there is none. Fails if the provider does.
  scaledMMStatus_t find(KernelPlan* plan) const {
    const Table& table = *wish_.table;
    const auto row_of = [&table](int64_t bucket) { return &table.rows[table.buckets[size_t(bucket)].row]; };
    const int64_t buckets = int64_t(table.buckets.size());
    const TableRow* last = nullptr; // neighbours often name the same kernel config
    for (int64_t distance = 0; distance < buckets; ++distance) {
      for (const int64_t bucket : {wish_.bucket + distance, wish_.bucket - distance}) {
        if (bucket < 0 || bucket >= buckets) continue;
        if (row_of(bucket) == last) continue;
        last = row_of(bucket);
        if (scaledMMStatus_t status = try_row(last, plan)) return status;
        if (plan->kernel) return SCALED_MM_STATUS_SUCCESS;
      }
    }
    for (int32_t i = 0; i < table.num_rows && plan->kernel == nullptr; ++i) {
      if (scaledMMStatus_t status = try_row(&table.rows[i], plan)) return status;
    }
    return plan->kernel ? SCALED_MM_STATUS_SUCCESS : try_row(fallback(), plan, true);
  }

  const TableRow* fallback() const { return &wish_.table->rows[wish_.table->fallback_row]; }

private:
  scaledMMStatus_t try_row(const TableRow* row, KernelPlan* plan, bool fallback_too = false) const {
    if (row == wish_.row || (row == fallback() && !fallback_too)) return SCALED_MM_STATUS_SUCCESS;
    const KernelName name = name_of(*row);
    const bool loaded = is_loaded(name);
    if (!loaded && was_asked(name, SCALED_MM_PROVIDE_BUILT)) return SCALED_MM_STATUS_SUCCESS;
    if (problem_.misfit(row->needs)) return SCALED_MM_STATUS_SUCCESS;
    if (!loaded) {
      if (scaledMMStatus_t status = ask_once(name, SCALED_MM_PROVIDE_BUILT)) return status;
      if (!is_loaded(name)) return SCALED_MM_STATUS_SUCCESS;
    }
    const Kernel* kernel = nullptr;
    if (require_kernel(name, &kernel) != SCALED_MM_STATUS_SUCCESS) return SCALED_MM_STATUS_SUCCESS; // it cannot run on this device
    plan->kernel = kernel;
    plan->stand_in = row;
    return SCALED_MM_STATUS_SUCCESS;
  }

  Arch* const arch_;
  const KernelWish& wish_;
  const Problem& problem_;
  const scaledMMHandleInfo_t& device_;
};

} // namespace

scaledMMStatus_t plan_kernel(Arch* arch, const KernelWish& wish, const Problem& problem, const scaledMMHandleInfo_t& device, KernelPlan* plan) {
  const Search search(arch, wish, problem, device);
  const KernelName name = search.name_of(*wish.row);
  if (name.slot == nullptr) {
    return fail(SCALED_MM_STATUS_INTERNAL_ERROR, "kernel: expected row %s for a scaledMMDtype_t below %d, got %d", name.row, kDtypes,
                int(problem.variant));
  }
  if (wish.bucket < 0 || is_loaded(name)) return require_kernel(name, &plan->kernel);
  if (scaledMMStatus_t status = ask_once(name, SCALED_MM_PROVIDE_LATER)) return status;
  if (is_loaded(name)) return require_kernel(name, &plan->kernel);
  if (scaledMMStatus_t status = search.find(plan)) return status;
  if (plan->kernel == nullptr) {
    const TableRow* const starter = search.fallback();
    const KernelName of_starter = search.name_of(*starter);
    if (scaledMMStatus_t status = load_now(of_starter)) return status;
    if (!is_loaded(of_starter)) return fail_not_built(name, ", nor is another row that can take this product");
    if (scaledMMStatus_t status = require_kernel(of_starter, &plan->kernel)) return status;
    if (starter == wish.row) return SCALED_MM_STATUS_SUCCESS;
    plan->stand_in = starter;
  }
  plan->better = await_kernel(name);
  if (plan->better) return SCALED_MM_STATUS_SUCCESS;
  *plan = {}; // it was loaded in the meantime
  return require_kernel(name, &plan->kernel);
}

} // namespace scaled_mm
