// The kernels of rope, of groupwise INT8 quantization and of the GGUF quantizers on gpu.h, as a library, with the parameters that their launchers
// make.
#include "warp.h"

#include "gguf/quantize_launch.cuh"
#include "rowwise/int8_block_launch.cuh"
#include "rowwise/rope_launch.cuh"

using namespace scaled_mm;

namespace {

template <class Kernel, class Params>
void run(Kernel* kernel, const Params& p, int64_t blocks, int threads) {
  gpu::shared_size = 0;
  gpu::grid_dim.x = unsigned(blocks);
  for (int64_t block = 0; block < blocks; ++block) gpu::run_block(threads, unsigned(block), true, [&] { kernel(p); });
}

// call(X()) for the dtype of x.
template <class Call>
int by_dtype(int dtype, const Call& call) {
  if (dtype == SCALED_MM_DTYPE_FLOAT16) return call(__half());
  if (dtype == SCALED_MM_DTYPE_BFLOAT16) return call(__nv_bfloat16());
  return dtype == SCALED_MM_DTYPE_FLOAT32 ? call(float()) : -1;
}

template <class X, class F, bool kLargest>
void run_quantize(gguf::Quantize<X, F, kLargest>, const gguf::QuantizeParams& p) {
  constexpr int64_t kEachThreadBlock = gguf::kQuantizeThreads / gguf::kSharers;
  run(&gguf::quantize_kernel<X, F, kLargest>, p, (p.blocks + kEachThreadBlock - 1) / kEachThreadBlock, gguf::kQuantizeThreads);
}

} // namespace

// sizes: tokens, query heads, key heads, D, angles. strides: of query, key, out, out_key (token, head, k), of cos and sin (token, k). Returns the
// pairs of a thread.
extern "C" int emulate_rope(int dtype, int interleaved, int multiprocessors, const int64_t* sizes, void* const* pointers, const int64_t* strides,
                            const int* angle_dtypes) {
  RopeOperands o = {};
  o.interleaved = interleaved;
  o.query_heads = sizes[1], o.key_heads = sizes[2], o.angles = sizes[4];
  HeadStrides* const heads[] = {&o.query, &o.key, &o.out_query, &o.out_key};
  for (HeadStrides* of : heads) *of = {strides[0], strides[1], strides[2]}, strides += 3;
  o.cos = {strides[0], strides[1]}, o.sin = {strides[2], strides[3]};
  o.cos_dtype = angle_dtypes[0], o.sin_dtype = angle_dtypes[1];
  GemmLaunch l = {};
  l.M = sizes[0], l.N = sizes[3], l.batch = 1, l.multiprocessors = multiprocessors, l.rope = &o;
  l.a = pointers[0], l.rope_pointers = {pointers[1], pointers[4], pointers[5], pointers[3]}, l.out = pointers[2];
  return by_dtype(dtype, [&](auto of) {
    using X = decltype(of);
    bool vectors = false;
    const rowwise::Rope p = rowwise::rope_of<X>(l, &vectors);
    constexpr int kMany = rowwise::kChunk;
    const auto kernel = interleaved ? (vectors ? &rowwise::rope_kernel<X, true, kMany> : &rowwise::rope_kernel<X, true, 1>)
                                    : (vectors ? &rowwise::rope_kernel<X, false, kMany> : &rowwise::rope_kernel<X, false, 1>);
    run(kernel, p, l.M * p.splits, rowwise::kRopeThreads);
    return vectors ? kMany : 1;
  });
}

// sizes: B, N, K, E. pointers: x, out, out_scale, expert_offsets or nullptr. strides: of the first three, three each.
// Returns whether x and out are read and written in chunks: bits 0 and 1.
extern "C" int emulate_int8_block(int dtype, int function, const int64_t* sizes, void* const* pointers, const int64_t* strides) {
  RowwiseOperands o = {};
  o.function = function, o.num_experts = sizes[3];
  GemmLaunch l = {};
  l.batch = sizes[0], l.M = sizes[1], l.N = sizes[2], l.rowwise = &o;
  l.a = pointers[0], l.out = pointers[1], l.rowwise_pointers.out_scale = pointers[2], l.rowwise_pointers.expert_offsets = pointers[3];
  l.batch_strides.a = strides[0], l.a_stride_m = strides[1], l.a_stride_k = strides[2];
  l.batch_strides.out = strides[3], l.out_stride_m = strides[4], l.out_stride_n = strides[5];
  l.batch_strides.a_scale = strides[6], l.a_scale_stride = strides[7], l.a_scale_stride_k = strides[8];
  return by_dtype(dtype, [&](auto of) {
    using X = decltype(of);
    const rowwise::Int8Blocks p = rowwise::int8_blocks_of<X>(l);
    const bool is_weight = rowwise::int8_block_of_weight(l);
    const auto run_blocks = [&](auto* of_weight, auto* of_token, int64_t token_blocks) {
      const int64_t each = is_weight ? 1 : token_blocks, all = (p.blocks + each - 1) / each;
      // With absent rows: half as many thread blocks, so that each has several blocks.
      run(is_weight ? of_weight : of_token, p, p.rows_end != nullptr ? (all + 1) / 2 : all, rowwise::kInt8BlockThreads);
    };
    if (rowwise::int8_block_is_small(l)) {
      run_blocks(&rowwise::int8_block_weight_kernel<X, 64>, &rowwise::int8_block_token_kernel<X, 64>, rowwise::kInt8BlockThreads / 8);
    } else {
      run_blocks(&rowwise::int8_block_weight_kernel<X, 128>, &rowwise::int8_block_token_kernel<X, 128>, rowwise::kInt8BlockThreads / 16);
    }
    return p.x.vectors + 2 * p.out.vectors;
  });
}

// sizes: rows, K. strides of x.
extern "C" int emulate_gguf_quantize(int dtype, int format, int rule, const int64_t* sizes, void* const* pointers, const int64_t* strides) {
  GemmLaunch l = {};
  l.M = sizes[0], l.N = sizes[1], l.batch = 1;
  l.a = pointers[0], l.out = pointers[1], l.a_stride_m = strides[0], l.a_stride_k = strides[1];
  return by_dtype(dtype, [&](auto of) {
    using X = decltype(of);
    const gguf::QuantizeParams p = gguf::quantize_params<X>(l);
    return gguf::for_format<X>(format, rule, [&](auto quantize) { run_quantize(quantize, p); }) ? p.x.vectors + 2 * p.aligned : -1;
  });
}
