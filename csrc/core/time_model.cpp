#include "core/time_model.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "core/sharing.h"

namespace scaled_mm {
namespace {

constexpr double kOutBytes = 2; // of an output element, for which times are predicted

// value / by, rounded up. In float64: several times as fast as a division of 64-bit integers, and a decision computes one prediction for each kernel
// config. Exact for integers below 2^31.
double ceil_div(double value, double by) {
  const double quotient = value / by;
  if (quotient >= 0x1p52) return quotient; // has no fraction
  const double whole = double(int64_t(quotient));
  return whole < quotient ? whole + 1 : whole;
}

// Of a kernel that shares tiles.
double shared_us(const scaledMMTimeModel_t& model, const ProductSize& size, const DeviceRates& device) {
  const auto ceil_div = [](int64_t value, int64_t by) { return value / by + (value % by != 0); };
  const int64_t at_once = std::max<int64_t>(1, int64_t(device.multiprocessors) * model.resident);
  const int64_t tiles = ceil_div(size.M, model.unit_m) * ceil_div(size.N, model.unit_n) * size.count, of_tile = ceil_div(size.K, model.unit_k);
  if (model.cluster > 1) {
    const ClusterBlocks of = cluster_blocks(tiles, of_tile, device.multiprocessors, model.resident, model.cluster);
    return double(of.waves) * (double(ceil_div(of_tile, of.blocks)) * model.step_us + model.tile_us);
  }
  const int64_t whole = tiles / at_once, rest = tiles % at_once;
  const int64_t blocks = sharing_blocks(rest, of_tile, at_once, model.most_parts, model.unit_m);
  const double waves = double(whole + (rest > 0));
  if (blocks == 0) return waves * (double(of_tile) * model.step_us + model.tile_us);
  const double steps = double(whole) * double(of_tile) + double(ceil_div(rest * of_tile, blocks));
  return steps * model.step_us + waves * model.tile_us + model.sharing_us + (blocks % rest ? model.two_tiles_us : 0);
}

} // namespace

bool is_legal(const scaledMMTimeModel_t& model) {
  if (model.unit_m == 0) return true;
  for (const int64_t size : {model.unit_m, model.unit_n, model.unit_k}) {
    if (size < 1 || size > INT32_MAX) return false;
  }
  constexpr int32_t kMostBlocks = 1024; // of a unit, in a cluster, on an SM, for a shared tile
  for (const int32_t blocks : {model.blocks, model.cluster, model.resident}) {
    if (blocks < 1 || blocks > kMostBlocks) return false;
  }
  if (model.least_steps < 0 || model.epilogue_overlaps < 0 || model.epilogue_overlaps > 1) return false;
  if (model.most_parts < 0 || model.most_parts > kMostBlocks) return false;
  for (const double time : {model.start_us, model.step_us, model.tile_us, model.wait_us, model.sharing_us, model.two_tiles_us}) {
    if (!std::isfinite(time) || time < 0) return false;
  }
  for (const double rate : {model.memory, model.l2}) {
    if (!std::isfinite(rate) || rate <= 0) return false;
  }
  return true;
}

double predicted_us(const scaledMMTimeModel_t& model, const ProductSize& size, const DeviceRates& device) {
  const double start = model.start_us + (size.constant_b ? 0 : model.wait_us);
  if (model.most_parts > 0) return start + shared_us(model, size, device);
  const double M = double(size.M), N = double(size.N), K = double(size.K), count = double(size.count);
  const double units_m = size.mean_m ? std::max(1.0, M / double(model.unit_m) + 0.5) : ceil_div(M, double(model.unit_m));
  const double units = units_m * ceil_div(N, double(model.unit_n)) * count;
  const int32_t slots = std::max(1, usable_multiprocessors(model.cluster, device.multiprocessors) * model.resident / model.blocks);
  const double waves = ceil_div(units, slots), of_unit = ceil_div(K, double(model.unit_k));
  const bool divided = model.least_steps > 0 && of_unit >= 2.0 * model.least_steps;
  const double steps = divided ? std::max(units * of_unit / slots, double(model.least_steps)) : waves * of_unit;
  const double multiply = steps * model.step_us, tiles = waves * model.tile_us;
  const double compute = model.epilogue_overlaps ? std::sqrt(multiply * multiply + tiles * tiles) : multiply + tiles;
  const double memory = count * (M * K + N * K + kOutBytes * M * N) / (model.memory * device.bytes_per_us);
  const double l2 = units * double(model.unit_m + model.unit_n) * K / (model.l2 * device.multiprocessors);
  return start + std::sqrt(compute * compute + memory * memory + l2 * l2);
}

} // namespace scaled_mm
