// The fastest kernel config of a table by predicted time. Each thread caches up to 256 results: a model repeats the same products, and a new search
// predicts the time of every kernel config.
#pragma once

#include "core/registry.h"
#include "core/time_model.h"

namespace scaled_mm {

struct Decision {
  const TableRow* row; // nullptr: there is none
  double us;           // its predicted time, in microseconds
};

// The kernel config with the least predicted time among those for which can_take(row), without the fallback; the first of equal ones.
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

// The same without can_take: among all kernel configs but the fallback. The result is cached per thread.
Decision fastest_of_all(const Table& table, const ProductSize& size, const DeviceRates& device);

// The same result as `search`, which it calls only if the fastest kernel config of the table cannot take the product.
template <class CanTake>
Decision fastest(const Table& table, const ProductSize& size, const DeviceRates& device, const CanTake& can_take) {
  const Decision of_all = fastest_of_all(table, size, device);
  return of_all.row == nullptr || can_take(*of_all.row) ? of_all : search(table, size, device, can_take);
}

} // namespace scaled_mm
