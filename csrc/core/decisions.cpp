#include "core/decisions.h"

#include <cstddef>

namespace scaled_mm {
namespace {

struct Remembered {
  const Table* table; // nullptr: nothing is remembered here. A table is never freed, so its address names it
  ProductSize size;
  DeviceRates device;
  Decision decision;

  bool is_of(const Table& other, const ProductSize& s, const DeviceRates& d) const {
    return table == &other && size.M == s.M && size.N == s.N && size.K == s.K && size.count == s.count && size.constant_b == s.constant_b &&
           size.mean_m == s.mean_m && device.multiprocessors == d.multiprocessors && device.bytes_per_us == d.bytes_per_us;
  }
};

constexpr size_t kPlaces = 256; // a direct-mapped cache: a product overwrites the entry of another with the same hash

size_t place_of(const Table& table, const ProductSize& size) {
  uint64_t mixed = reinterpret_cast<uintptr_t>(&table) / alignof(std::max_align_t);
  for (const int64_t part : {size.M, size.N, size.K, size.count * 4 + size.constant_b * 2 + size.mean_m}) {
    mixed = (mixed ^ uint64_t(part)) * 0x9e3779b97f4a7c15u; // 2^64 divided by the golden ratio (Knuth, volume 3, section 6.4)
    mixed ^= mixed >> 32;
  }
  return mixed % kPlaces;
}

} // namespace

Decision fastest_of_all(const Table& table, const ProductSize& size, const DeviceRates& device) {
  static thread_local Remembered places[kPlaces] = {};
  Remembered& place = places[place_of(table, size)];
  if (!place.is_of(table, size, device)) {
    place = {&table, size, device, search(table, size, device, [](const TableRow&) { return true; })};
  }
  return place.decision;
}

} // namespace scaled_mm
