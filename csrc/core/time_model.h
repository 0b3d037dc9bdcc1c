// The predicted time of a kernel config on a product: it selects the kernel in a bucket of SCALED_MM_FASTEST, and orders stand-ins.
// scaled_mm/kernels/time_model.py has the formula in words and computes the same; a test compares the two.
#pragma once

#include "scaled_mm/scaled_mm.h"

namespace scaled_mm {

// What predictions need to know of a device.
struct DeviceRates {
  int32_t multiprocessors = 0;
  double bytes_per_us = 0; // of device memory
};

// `count` products out [M,N] = a [M,K] x b [K,N] in one launch. mean_m: M is the mean number of rows of
// the experts that have rows.
struct ProductSize {
  int64_t M, N, K, count;
  bool constant_b, mean_m;
};

// Whether the fields are in their ranges. A model with unit_m = 0 is absent.
bool is_legal(const scaledMMTimeModel_t& model);

// Microseconds. The model must be present.
double predicted_us(const scaledMMTimeModel_t& model, const ProductSize& size, const DeviceRates& device);

} // namespace scaled_mm
