// A valid table of two kernel configs, for sections that register it as it is or after a change.
#pragma once

#include "hostile.h"

namespace hostile {

struct Table {
  scaledMMTableRow_t rows[2] = {{"any", 1, 1, 1, 1, {}}, {"fast", 16, 16, 16, 16, {}}};
  scaledMMTableBucket_t buckets[2] = {{16, 16, 16, 1, 0}, {INT64_MAX, INT64_MAX, INT64_MAX, 0, 0}};
  scaledMMTableMode_t modes[2] = {{8, SCALED_MM_GGUF_W4A8, 0}, {INT64_MAX, SCALED_MM_GGUF_W4A16, 0}};
  scaledMMTable_t table = {"sm75", "hostile table", rows, 2, buckets, 2, 0, 0, SCALED_MM_TABLE_GEMM, 0, nullptr, 0};

  Table() = default;
  Table(const Table&) = delete;
  void of_gguf() {
    table.kind = SCALED_MM_TABLE_GGUF_GEMM;
    table.modes = modes;
    table.num_modes = 2;
  }
};

#define EXPECT_TABLE(change, status)                                                                                                                 \
  do {                                                                                                                                               \
    Table t;                                                                                                                                         \
    change;                                                                                                                                          \
    EXPECT(scaledMMRegisterTable(&t.table), status);                                                                                                 \
  } while (0)

} // namespace hostile
