// The generic kernels on gpu.h, as a library: what they do with indices, fragments, alignments and tails, without a GPU.
#include "warp.h"

inline void atomicAdd(int32_t* sum, int32_t value) { *sum += value; } // threads are coroutines: there is no race

#include "int8/generic/few_rows.cuh"

using namespace scaled_mm;

namespace {

template <class Tile, class Out>
int run(const generic::Problem& given, bool aligned) {
  if (!aligned && !Tile::kTakesAny) return 1;
  generic::Problem p = given;
  p.tiles_n = int((p.b.rows + Tile::kColumns - 1) / Tile::kColumns);
  p.tiles = p.tiles_n * int((p.a.rows + Tile::kRows - 1) / Tile::kRows);
  for (int block = 0; block < p.tiles; ++block) {
    gpu::run_block(Tile::kThreads, unsigned(block), true, [&] { generic::few_rows_kernel<Tile, Out>(p); });
  }
  return 0;
}

template <class Out>
int run_tiles(const generic::Problem& given) {
  constexpr int kTile = 64;
  generic::Problem p = given;
  p.tiles_n = int((p.b.rows + kTile - 1) / kTile);
  p.tiles = p.tiles_n * int((p.a.rows + kTile - 1) / kTile);
  for (int block = 0; block < p.tiles; ++block) {
    gpu::run_block(generic::kThreads, unsigned(block), true, [&] { generic::gemm_kernel<kTile, kTile, 64, Out>(p); });
  }
  return 0;
}

// rows: of the kernel for few rows; 0: the tiles for all other products.
template <class Out>
int run_rows(const generic::Problem& p, int rows, bool aligned) {
  if (rows == 0) return run_tiles<Out>(p);
  if (rows == 8) return run<generic::Rows8<Out>, Out>(p, aligned);
  if (rows == 16) return run<generic::Rows16<Out>, Out>(p, aligned);
  if (rows == 32) return run<generic::Rows32<Out>, Out>(p, aligned);
  return run<generic::Rows64<Out>, Out>(p, aligned);
}

} // namespace

// Returns 1 if the kernel does not take this alignment.
extern "C" int emulate(int rows, int is_int32, int64_t M, int64_t N, int64_t K, const int8_t* a, int64_t lda, const int8_t* b, int64_t ldb,
                       int64_t stride_k, void* out, int64_t ldout, const float* a_scale, const float* b_scale, const float* bias) {
  generic::Problem p = {};
  p.a = {a, M, K, lda, stride_k, 0};
  p.b = {b, N, K, ldb, stride_k, 0};
  p.access_a = generic::access_of(p.a);
  p.access_b = generic::access_of(p.b);
  p.out = out;
  p.out_stride_m = ldout;
  p.out_stride_n = 1;
  p.epilogue.a_scale = a_scale;
  p.epilogue.b_scale = b_scale;
  p.epilogue.bias = bias;
  p.epilogue.a_scale_stride = p.epilogue.b_scale_stride = p.epilogue.bias_stride = 1;
  p.epilogue.bias_dtype = SCALED_MM_DTYPE_FLOAT32;
  const bool aligned = p.access_a == generic::Access::kAligned && p.access_b == generic::Access::kAligned;
  return is_int32 ? run_rows<int32_t>(p, rows, aligned) : run_rows<__nv_bfloat16>(p, rows, aligned);
}
