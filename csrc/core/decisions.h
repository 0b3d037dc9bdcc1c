// The fastest kernel config of a table by predicted time. Each thread remembers its latest decisions: a model calls the same products again and
// again, and a new decision computes one prediction for each kernel config.
#pragma once

#include "core/registry.h"
#include "core/time_model.h"

namespace scaled_mm {

struct Decision {
  const TableRow* row; // nullptr: there is none
  double us;           // its predicted time, in microseconds
};

// The least time among the kernel configs for which can_take(row), besides the fallback; of equal times the first.
template <class CanTake>
Decision search(const Table& table, const ProductSize& size, const DeviceRates& device, const CanTake& can_take) {
  Decision best{nullptr, 0};
  for (int32_t i = 0; i < table.num_rows; ++i) {
    const TableRow& row = table.rows[i];
    if (i == table.fallback_row || !row.has_time()) continue;
    const double us = predicted_us(row.time, size, device);
    if ((best.row == nullptr || us < best.us) && can_take(row)) best = {&row, us};
  }
  return best;
}

// The same among all of them, remembered.
Decision fastest_of_all(const Table& table, const ProductSize& size, const DeviceRates& device);

// The result of `search`. Only if the fastest of all cannot take the product does it search.
template <class CanTake>
Decision fastest(const Table& table, const ProductSize& size, const DeviceRates& device, const CanTake& can_take) {
  const Decision of_all = fastest_of_all(table, size, device);
  return of_all.row == nullptr || can_take(*of_all.row) ? of_all : search(table, size, device, can_take);
}

} // namespace scaled_mm
