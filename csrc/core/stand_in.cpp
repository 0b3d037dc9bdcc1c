#include "core/stand_in.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "core/status.h"

namespace scaled_mm {
namespace {

class Search {
public:
  Search(const scaledMMHandle& handle, const KernelWish& wish, const Problem& problem) : handle_(handle), wish_(wish), problem_(problem) {}

  KernelName name_of(const TableRow& row) const {
    const scaledMMHandleInfo_t& device = handle_.info;
    return {handle_.arch, row.name.c_str(), problem_.variant, device.device_id, device.max_shared_memory, row.slot(problem_.variant)};
  }

  // Finds the first stand-in; plan->kernel stays nullptr if there is none. Fails if the provider does.
  scaledMMStatus_t find(KernelPlan* plan) const {
    const Table& table = *wish_.table;
    std::vector<std::pair<double, const TableRow*>> rows;
    const ProductSize size = problem_.size();
    // In a table with modes (GGUF) times are those of the products whose bucket takes the fastest. Others take the order of the table.
    const bool by_time = table.modes.empty() || table.buckets[wish_.bucket].row == SCALED_MM_FASTEST;
    for (int32_t i = 0; i < table.num_rows; ++i) {
      const TableRow& row = table.rows[i];
      rows.emplace_back(by_time && row.has_time() ? predicted_us(row.time, size, handle_.rates()) : std::numeric_limits<double>::infinity(), &row);
    }
    std::stable_sort(rows.begin(), rows.end(), [](const auto& one, const auto& other) { return one.first < other.first; });
    for (const auto& [us, row] : rows) {
      if (scaledMMStatus_t status = try_row(row, plan)) return status;
      if (plan->kernel) return SCALED_MM_STATUS_SUCCESS;
    }
    return try_row(fallback(), plan, true);
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

  const scaledMMHandle& handle_;
  const KernelWish& wish_;
  const Problem& problem_;
};

} // namespace

scaledMMStatus_t plan_kernel(const scaledMMHandle& handle, const KernelWish& wish, const Problem& problem, KernelPlan* plan) {
  const Search search(handle, wish, problem);
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
