// A kernel library for the program in hostile/: loops over host memory (tests/core/host_kernels.cpp), and a table of each kind for sm90.
// No row serves a float16 out, so that one dtype has no kernel.
#include "../core/host_kernels.cpp"

HOST_ZERO_POINT_TERMS(terms)
HOST_KERNEL(any_bf16, "any", SCALED_MM_DTYPE_BFLOAT16, kNone)
HOST_KERNEL(any_fp32, "any", SCALED_MM_DTYPE_FLOAT32, kNone)
HOST_KERNEL(any_int32, "any", SCALED_MM_DTYPE_INT32, kNone)
HOST_KERNEL(fast_bf16, "fast", SCALED_MM_DTYPE_BFLOAT16, kAll)
HOST_KERNEL(fast_fp32, "fast", SCALED_MM_DTYPE_FLOAT32, kAll)
HOST_KERNEL(fast_int32, "fast", SCALED_MM_DTYPE_INT32, kAll)
WORKSPACE_KERNEL(split_fp32, "split")
HOST_GROUPED_KERNEL(grouped_any_fp32, "grouped_any", SCALED_MM_DTYPE_FLOAT32, kNone)
HOST_GROUPED_KERNEL(grouped_any_int32, "grouped_any", SCALED_MM_DTYPE_INT32, kNone)
HOST_GROUPED_KERNEL(grouped_fast_fp32, "grouped_fast", SCALED_MM_DTYPE_FLOAT32, kAll)
HOST_GROUPED_KERNEL(grouped_fast_int32, "grouped_fast", SCALED_MM_DTYPE_INT32, kAll)
HOST_BLOCK_SCALED_KERNEL(scaled_any_bf16, "scaled_any", SCALED_MM_DTYPE_BFLOAT16, kNone)
HOST_BLOCK_SCALED_KERNEL(scaled_any_fp32, "scaled_any", SCALED_MM_DTYPE_FLOAT32, kNone)
HOST_BLOCK_SCALED_KERNEL(scaled_fast_fp32, "scaled_fast", SCALED_MM_DTYPE_FLOAT32, kAll)
HOST_GROUPED_BLOCK_SCALED_KERNEL(both_any_bf16, "both_any", SCALED_MM_DTYPE_BFLOAT16, kNone)
HOST_GROUPED_BLOCK_SCALED_KERNEL(both_any_fp32, "both_any", SCALED_MM_DTYPE_FLOAT32, kNone)
HOST_GROUPED_BLOCK_SCALED_KERNEL(both_fast_fp32, "both_fast", SCALED_MM_DTYPE_FLOAT32, kAll)
HOST_BLOCK_KERNEL(blocks_q4_0, "blocks", Q4_0)
HOST_BLOCK_KERNEL(blocks_q5_1, "blocks", Q5_1)
HOST_BLOCK_KERNEL(blocks_q8_0, "blocks", Q8_0)

namespace {

constexpr int64_t kOpen = INT64_MAX;
const Kernel* const kernels[] = {&terms,           &any_bf16,        &any_fp32,         &any_int32,         &fast_bf16,         &fast_fp32,
                                 &fast_int32,      &split_fp32,      &grouped_any_fp32, &grouped_any_int32, &grouped_fast_fp32, &grouped_fast_int32,
                                 &scaled_any_bf16, &scaled_any_fp32, &scaled_fast_fp32, &blocks_q4_0,       &blocks_q5_1,       &blocks_q8_0,
                                 &both_any_bf16,   &both_any_fp32,   &both_fast_fp32};

#define ROWS(any, fast)                                                                                                                              \
  {                                                                                                                                                  \
    {any, 1, 1, 1, 1, {}}, {fast, 16, 16, 16, 16, {}}, {                                                                                             \
      "split", 1, 1, 1, 2, {}                                                                                                                        \
    }                                                                                                                                                \
  }
const scaledMMTableRow_t gemm_rows[] = ROWS("any", "fast"), grouped_rows[] = ROWS("grouped_any", "grouped_fast"),
                         scaled_rows[] = ROWS("scaled_any", "scaled_fast"), both_rows[] = ROWS("both_any", "both_fast"),
                         block_rows[] = {{"blocks", 1, 1, 1, 1, {}}};
const scaledMMTableBucket_t gemm_buckets[] = {{4, kOpen, kOpen, 2, 0}, {kOpen, kOpen, kOpen, 1, 0}}, fast_buckets[] = {{kOpen, kOpen, kOpen, 1, 0}},
                            block_buckets[] = {{kOpen, kOpen, kOpen, 0, 0}};
const scaledMMTableMode_t modes[] = {{4, SCALED_MM_GGUF_W4A8, 0}, {kOpen, SCALED_MM_GGUF_W4A16, 0}};

const scaledMMTable_t gemm = {"sm90", "hostile", gemm_rows, 3, gemm_buckets, 2, 0, 0, SCALED_MM_TABLE_GEMM, 0, nullptr, 0};
const scaledMMTable_t grouped = {"sm90", "hostile", grouped_rows, 2, fast_buckets, 1, 0, 0, SCALED_MM_TABLE_GROUPED_GEMM, 0, nullptr, 0};
const scaledMMTable_t scaled = {"sm90", "hostile", scaled_rows, 2, fast_buckets, 1, 0, 0, SCALED_MM_TABLE_BLOCK_SCALED_GEMM, 0, nullptr, 0};
const scaledMMTable_t blocks = {"sm90", "hostile", block_rows, 1, block_buckets, 1, 0, 0, SCALED_MM_TABLE_GGUF_GEMM, 0, modes, 2};
const scaledMMTable_t both = {"sm90", "hostile", both_rows, 2, fast_buckets, 1, 0, 0, SCALED_MM_TABLE_GROUPED_BLOCK_SCALED_GEMM, 0, nullptr, 0};
const scaledMMTable_t* const tables[] = {&gemm, &grouped, &scaled, &blocks, &both};
const scaled_mm::KernelLibrary library = {SCALED_MM_KERNEL_ABI_VERSION,       "sm90", kernels,
                                          sizeof(kernels) / sizeof(*kernels), tables, sizeof(tables) / sizeof(*tables)};

} // namespace

const scaled_mm::KernelLibrary* scaled_mm_kernel_library(void) { return &library; }
