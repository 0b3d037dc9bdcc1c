// Hostile values for the fields of a tensor descriptor.
#pragma once

#include <scaled_mm/scaled_mm.h>

#include <climits>

namespace hostile {

constexpr int64_t kValues[] = {INT64_MIN,
                               INT64_MIN + 1,
                               -(int64_t(1) << 40),
                               INT32_MIN,
                               -16,
                               -1,
                               0,
                               1,
                               2,
                               3,
                               4,
                               5,
                               8,
                               11,
                               15,
                               16,
                               17,
                               31,
                               32,
                               64,
                               127,
                               128,
                               255,
                               256,
                               65535,
                               65536,
                               131071,
                               131072,
                               INT32_MAX - 31,
                               INT32_MAX - 1,
                               INT32_MAX,
                               int64_t(1) << 31,
                               int64_t(1) << 32,
                               (int64_t(1) << 40) - 1,
                               int64_t(1) << 40,
                               int64_t(1) << 59,
                               int64_t(1) << 60,
                               (int64_t(1) << 60) + 1,
                               int64_t(1) << 61,
                               int64_t(1) << 62,
                               INT64_MAX - 1,
                               INT64_MAX};
constexpr int kFields = 10;

void set_field(scaledMMTensorDesc_t* t, int field, int64_t value);

} // namespace hostile
