#include "core/time_model.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

namespace scaled_mm {
namespace {

constexpr double kOutBytes = 2; // of an output element, for which times are predicted

double ceil_div(int64_t value, int64_t by) { return double(value / by + (value % by != 0)); }

// SMs that clusters of this size can use: clusters lie within groups of SMs, which are not whole multiples of them.
int64_t usable(int32_t cluster, int64_t multiprocessors) {
  constexpr int64_t kOf = 132;
  return cluster == 4 ? multiprocessors * 116 / kOf : cluster == 8 ? multiprocessors * 112 / kOf : multiprocessors;
}

} // namespace

bool is_legal(const scaledMMTimeModel_t& model) {
  if (model.unit_m == 0) return true;
  for (const int64_t size : {model.unit_m, model.unit_n, model.unit_k, int64_t(model.blocks), int64_t(model.cluster), int64_t(model.resident)}) {
    if (size < 1 || size > INT32_MAX) return false;
  }
  for (const double time : {model.start_us, model.step_us, model.tile_us, model.wait_us}) {
    if (!std::isfinite(time) || time < 0) return false;
  }
  for (const double rate : {model.memory, model.l2}) {
    if (!std::isfinite(rate) || rate <= 0) return false;
  }
  return true;
}

double predicted_us(const scaledMMTimeModel_t& model, const ProductSize& size, const DeviceRates& device) {
  const double M = double(size.M), N = double(size.N), K = double(size.K), count = double(size.count);
  const double units = ceil_div(size.M, model.unit_m) * ceil_div(size.N, model.unit_n) * count;
  const int64_t slots = std::max(int64_t(1), usable(model.cluster, device.multiprocessors) * model.resident / model.blocks);
  const double compute = std::ceil(units / double(slots)) * (ceil_div(size.K, model.unit_k) * model.step_us + model.tile_us);
  const double memory = count * (M * K + N * K + kOutBytes * M * N) / (model.memory * device.bytes_per_us);
  const double l2 = units * double(model.unit_m + model.unit_n) * K / (model.l2 * device.multiprocessors);
  return model.start_us + (size.constant_b ? 0 : model.wait_us) + std::sqrt(compute * compute + memory * memory + l2 * l2);
}

} // namespace scaled_mm
