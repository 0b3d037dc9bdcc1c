// The generic kernels on gpu.h, as a library: what they do with indices, fragments, alignments and tails, without a GPU.
#include "warp.h"

#include "int8/generic/few_rows.cuh"

using namespace scaled_mm;

namespace {

// What the test passes, in the order of its ctypes structure.
struct Product {
  int64_t rows; // of the kernel for few rows; 0: the tiles for all other products
  int64_t batch, M, N, K;
  const int8_t *a, *b;
  int64_t lda, ldb, stride_k, a_batch, b_batch;
  void* out;
  int64_t out_stride_m, out_stride_n, out_batch;
  const float *a_scale, *b_scale, *bias;
  const int2 *row_terms, *col_terms; // of every product of the batch
};

template <class Kernel>
void run_blocks(const Product& given, generic::Problem p, int tile_rows, int tile_columns, int threads, Kernel* kernel) {
  p.tiles_n = int((given.N + tile_columns - 1) / tile_columns);
  p.tiles = p.tiles_n * int((given.M + tile_rows - 1) / tile_rows);
  for (int block = 0; block < p.tiles * given.batch; ++block) gpu::run_block(threads, unsigned(block), true, [&] { kernel(p); });
}

template <class Tile, class Out>
int run_few(const Product& given, const generic::Problem& p) {
  if (!Tile::kTakesAny && (p.access_a != generic::Access::kAligned || p.access_b != generic::Access::kAligned)) return 1;
  run_blocks(given, p, Tile::kRows, Tile::kColumns, Tile::kThreads, &generic::few_rows_kernel<Tile, Out>);
  return 0;
}

template <class Out>
int run(const Product& given) {
  generic::Problem p = {};
  p.a = {given.a, given.M, given.K, given.lda, given.stride_k, given.a_batch};
  p.b = {given.b, given.N, given.K, given.ldb, given.stride_k, given.b_batch};
  p.access_a = generic::access_of(p.a);
  p.access_b = generic::access_of(p.b);
  p.out = given.out;
  p.out_stride_m = given.out_stride_m;
  p.out_stride_n = given.out_stride_n;
  p.out_stride_batch = given.out_batch;
  p.epilogue.a_scale = given.a_scale;
  p.epilogue.b_scale = given.b_scale;
  p.epilogue.bias = given.bias;
  p.epilogue.a_scale_stride = p.epilogue.b_scale_stride = p.epilogue.bias_stride = 1;
  p.epilogue.bias_dtype = SCALED_MM_DTYPE_FLOAT32;
  p.epilogue.row_terms = given.row_terms;
  p.epilogue.col_terms = given.col_terms;
  if (given.rows == 8) return run_few<generic::Rows8<Out>, Out>(given, p);
  if (given.rows == 16) return run_few<generic::Rows16<Out>, Out>(given, p);
  if (given.rows == 32) return run_few<generic::Rows32<Out>, Out>(given, p);
  if (given.rows == 64) return run_few<generic::Rows64<Out>, Out>(given, p);
  run_blocks(given, p, 64, 64, generic::kThreads, &generic::gemm_kernel<64, 64, 64, Out>);
  return 0;
}

} // namespace

// Returns 1 if the kernel does not take this alignment.
extern "C" int emulate(const Product* p, int dtype) {
  if (dtype == SCALED_MM_DTYPE_INT32) return run<int32_t>(*p);
  if (dtype == SCALED_MM_DTYPE_FLOAT32) return run<float>(*p);
  return dtype == SCALED_MM_DTYPE_FLOAT16 ? run<__half>(*p) : run<__nv_bfloat16>(*p);
}
