// A kind of product with a table, added after every other one, on the fake driver. test_core_a_new_kind.py adds it to the list of kinds.
// Arguments: its scaledMMProduct_t and the architecture of the fake GPU. PRETEND_TABLE_KIND: its scaledMMTableKind_t.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "problems/kinds.h"

namespace scaled_mm {

int32_t table_number() { return std::atoi(std::getenv("PRETEND_TABLE_KIND")); }

ProblemKind pretend() {
  ProblemKind kind = kBlockScaled;
  kind.name = "pretend GEMM";
  kind.label = "pretend ";
  kind.table.number = table_number();
  kind.table.noun = " of pretend products";
  return kind;
}
extern const ProblemKind kPretend = pretend();

} // namespace scaled_mm

namespace {

scaledMMTensorDesc_t matrix(int32_t dtype, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  return {dtype, 2, {rows, columns, 0}, {row_stride, column_stride, 0}, 16, 0};
}

void expect(const char* what, scaledMMStatus_t got, scaledMMStatus_t expected, const char* message) {
  const char* text = got == SCALED_MM_STATUS_SUCCESS ? "" : scaledMMGetLastErrorMessage();
  if (got == expected && strstr(text, message) != nullptr) return;
  printf("%s: expected %s \"%s\", got %s \"%s\"\n", what, scaledMMGetStatusName(expected), message, scaledMMGetStatusName(got), text);
  std::exit(1);
}

scaledMMStatus_t register_table(const char* arch, int32_t kind, const char* row) {
  const scaledMMTableRow_t rows[] = {{row, 1, 1, 1, 1, {}, 0}};
  const scaledMMTableBucket_t buckets[] = {{INT64_MAX, INT64_MAX, INT64_MAX, 0, 0, 0, 0, 0}};
  const scaledMMTable_t table = {arch, "pretend table", rows, 1, buckets, 1, 0, 0, kind, 0, nullptr, 0};
  return scaledMMRegisterTable(&table);
}

} // namespace

int main(int, char** arguments) {
  const int32_t product = std::atoi(arguments[1]), table = scaled_mm::table_number();
  const char* arch = arguments[2];
  scaledMMHandle_t handle = nullptr;
  expect("handle", scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, 0, nullptr), SCALED_MM_STATUS_SUCCESS, "");
  const scaledMMTensorDesc_t out = matrix(SCALED_MM_DTYPE_BFLOAT16, 5, 24, 24, 1), a = matrix(SCALED_MM_DTYPE_INT8, 5, 128, 128, 1),
                             b = matrix(SCALED_MM_DTYPE_INT8, 128, 24, 1, 128), a_scale = matrix(SCALED_MM_DTYPE_FLOAT32, 5, 1, 1, 1),
                             b_scale = matrix(SCALED_MM_DTYPE_FLOAT32, 1, 1, 1, 1);
  const scaledMMTensorDesc_t* const operands[] = {&out, &a, &b, &a_scale, &b_scale, nullptr};
  scaledMMDescriptor_t d = nullptr;
  const auto create = [&](int32_t kind, const char* row) { return scaledMMCreateDescriptor(handle, &d, kind, operands, 6, 0, row); };

  expect("without a table", create(product, nullptr), SCALED_MM_STATUS_ARCHITECTURE_NOT_SUPPORTED, "no tile table of pretend products is registered");
  expect("the table after the last", register_table(arch, table + 1, "none"), SCALED_MM_STATUS_BAD_PARAM, "expected a kind of scaledMMTableKind_t");
  expect("its table", register_table(arch, table, "pretend_any"), SCALED_MM_STATUS_SUCCESS, "");
  expect("another row", create(product, "wrong"), SCALED_MM_STATUS_KERNEL_NOT_FOUND, "expected a pretend row of");
  expect("its row", create(product, "pretend_any"), SCALED_MM_STATUS_KERNEL_NOT_BUILT, "row pretend_any of");
  // The table is of no other kind.
  expect("the kind it is like", create(SCALED_MM_BLOCK_SCALED_GEMM, nullptr), SCALED_MM_STATUS_ARCHITECTURE_NOT_SUPPORTED,
         "no tile table of block-scaled products is registered");
  expect("that kind's table", register_table(arch, SCALED_MM_TABLE_BLOCK_SCALED_GEMM, "block_scaled_any"), SCALED_MM_STATUS_SUCCESS, "");
  expect("its row again", create(product, "block_scaled_any"), SCALED_MM_STATUS_KERNEL_NOT_FOUND,
         "a pretend row of sm90 (pretend table), got block_scaled_any");
  expect("that kind's row", create(SCALED_MM_BLOCK_SCALED_GEMM, "block_scaled_any"), SCALED_MM_STATUS_KERNEL_NOT_BUILT, "row block_scaled_any of");
  printf("everything held\n");
  return 0;
}
