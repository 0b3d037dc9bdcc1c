// Malformed tables: pointers, counts and fields.
#include "tables.h"

#include <climits>
#include <cmath>

namespace hostile {

void tables() {
  context = "tables";
  const std::string huge(1 << 20, 'x');
  EXPECT(scaledMMRegisterTable(nullptr), NULL_POINTER);
  EXPECT_TABLE(, SUCCESS);
  EXPECT_TABLE(t.of_gguf(), SUCCESS);
  EXPECT_TABLE(t.table.arch = nullptr, NULL_POINTER);
  EXPECT_TABLE(t.table.source = nullptr, NULL_POINTER);
  EXPECT_TABLE(t.table.rows = nullptr, NULL_POINTER);
  EXPECT_TABLE(t.table.buckets = nullptr, NULL_POINTER);
  EXPECT_TABLE(t.of_gguf(); t.table.modes = nullptr, BAD_PARAM);
  EXPECT_TABLE(t.rows[1].name = nullptr, BAD_PARAM);
  EXPECT_TABLE(t.table.arch = "", BAD_PARAM);
  EXPECT_TABLE(t.table.arch = huge.c_str(), BAD_PARAM);
  EXPECT_TABLE(t.table.arch = "sm_of_16_letters", BAD_PARAM);
  EXPECT_TABLE(t.table.arch = "sm_of_15_letter", SUCCESS);
  EXPECT_TABLE(t.table.source = huge.c_str(), SUCCESS);
  EXPECT_TABLE(t.rows[1].name = huge.c_str(), SUCCESS);
  EXPECT_TABLE(t.rows[0].name = huge.c_str(); t.rows[0].align_a = 16, BAD_PARAM);
  for (int64_t count : {INT64_MIN, int64_t(-1), int64_t(0), int64_t(1) << 17, int64_t(1) << 32, (int64_t(1) << 32) + 1, INT64_MAX / 16, INT64_MAX}) {
    EXPECT_TABLE(t.table.num_rows = count, BAD_PARAM);
    EXPECT_TABLE(t.table.num_buckets = count, BAD_PARAM);
    EXPECT_TABLE(t.of_gguf(); t.table.num_modes = count, BAD_PARAM);
    if (count != 0) EXPECT_TABLE(t.table.num_modes = count, BAD_PARAM);
  }
  for (int32_t value : {INT_MIN, -1, 2, INT_MAX}) EXPECT_TABLE(t.table.fallback_row = value, BAD_PARAM);
  for (int32_t value : {INT_MIN, -2, 2, INT_MAX}) {
    EXPECT_TABLE(t.buckets[0].row = value, BAD_PARAM);
    EXPECT_TABLE(t.buckets[1].row = value, BAD_PARAM);
  }
  EXPECT_TABLE(t.buckets[1].row = SCALED_MM_FASTEST, SUCCESS);
  EXPECT_TABLE(t.of_gguf(); t.buckets[1].row = SCALED_MM_FASTEST, BAD_PARAM);
  const scaledMMTimeModel_t model = {64, 64, 128, 1, 1, 1, 0, 1, 0, 2, 0.1, 1, 1, 0, 6e4, 0, 0};
  EXPECT_TABLE(t.rows[1].time = model, SUCCESS);
  for (int64_t size : {INT64_MIN, int64_t(-1), int64_t(1) << 40, INT64_MAX}) {
    EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.unit_m = size, BAD_PARAM);
    EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.unit_k = size, BAD_PARAM);
  }
  EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.blocks = 0, BAD_PARAM);
  EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.least_steps = 8, SUCCESS);
  for (int32_t steps : {INT_MIN, -1}) EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.least_steps = steps, BAD_PARAM);
  for (int32_t parts : {INT_MIN, -1, 1025, INT_MAX}) EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.most_parts = parts, BAD_PARAM);
  EXPECT_TABLE(t.of_gguf(); t.rows[1].time = model, BAD_PARAM);
  EXPECT_TABLE(t.of_gguf(); t.rows[1].time = model; t.rows[1].time.most_parts = 16; t.buckets[1].row = SCALED_MM_FASTEST, SUCCESS);
  for (int32_t overlaps : {INT_MIN, -1, 2, INT_MAX}) EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.epilogue_overlaps = overlaps, BAD_PARAM);
  for (double us : {-1.0, double(NAN), double(INFINITY)}) EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.step_us = us, BAD_PARAM);
  EXPECT_TABLE(t.table.fallback_row = 1, BAD_PARAM);
  for (int32_t kind : {INT_MIN, -1, int(kKinds), INT_MAX}) EXPECT_TABLE(t.table.kind = kind, BAD_PARAM);
  for (int32_t flags : {INT_MIN, -1, 32, INT_MAX}) {
    EXPECT_TABLE(t.buckets[0].flags = flags, BAD_PARAM);
    EXPECT_TABLE(t.of_gguf(); t.buckets[0].flags = flags, BAD_PARAM);
  }
  for (int32_t flags : {SCALED_MM_BUCKET_MINIMA, SCALED_MM_BUCKET_W4A8 | SCALED_MM_BUCKET_MINIMA}) {
    EXPECT_TABLE(t.buckets[0].flags = flags, BAD_PARAM);
    EXPECT_TABLE(t.of_gguf(); t.buckets[0].flags = flags, SUCCESS);
    EXPECT_TABLE(t.of_gguf(); t.buckets[1].flags = flags, BAD_PARAM);
  }
  EXPECT_TABLE(t.of_gguf(); t.buckets[0].flags = SCALED_MM_BUCKET_W4A8 | SCALED_MM_BUCKET_W4A16, BAD_PARAM);
  for (int32_t value : {INT_MIN, -16, -1, 0, 3, 24, INT_MAX}) {
    EXPECT_TABLE(t.rows[1].align_a = value, BAD_PARAM);
    EXPECT_TABLE(t.rows[1].align_b = value, BAD_PARAM);
    EXPECT_TABLE(t.rows[1].align_out = value, BAD_PARAM);
    if (value < 1) EXPECT_TABLE(t.rows[1].store_bytes = value, BAD_PARAM);
    if (value < 0) EXPECT_TABLE(t.rows[1].block_size = value, BAD_PARAM);
  }
  for (int32_t mode : {INT_MIN, -1, 0, 4, INT_MAX}) EXPECT_TABLE(t.of_gguf(); t.modes[0].mode = mode, BAD_PARAM);
  EXPECT_TABLE(t.of_gguf(); t.modes[1].m_max = 8, BAD_PARAM);
  EXPECT_TABLE(t.buckets[1].m_max = INT64_MAX - 1, BAD_PARAM);
  EXPECT_TABLE(t.buckets[0].m_max = INT64_MIN; t.buckets[0].n_max = -1, SUCCESS);
  EXPECT_TABLE(t.buckets[0].m_min = INT64_MAX; t.buckets[0].k_min = INT64_MIN, SUCCESS);
  EXPECT_TABLE(t.buckets[1].n_min = 1, BAD_PARAM);
}

} // namespace hostile
