// Good products of each kind: random ones, and one that is the same at every call.
#include "hostile.h"

namespace hostile {

scaledMMTensorDesc_t vector(int32_t dtype, int64_t length) { return {dtype, 1, {length, -1, -1}, {1, -1, -1}, 16, 0}; }
scaledMMTensorDesc_t matrix(int32_t dtype, int64_t rows, int64_t columns, bool by_rows, int64_t pad) {
  return {dtype, 2, {rows, columns, -1}, {by_rows ? columns + pad : 1, by_rows ? 1 : rows + pad, -1}, 16, 0};
}

void put(Product* p, int index, const scaledMMTensorDesc_t& t) {
  p->tensors[index] = t;
  p->present[index] = true;
}

namespace {

scaledMMTensorDesc_t batch(int64_t count, const scaledMMTensorDesc_t& t) {
  const int64_t span = (t.shape[0] > 0 ? t.shape[0] - 1 : 0) * t.strides[0] + (t.shape[1] > 0 ? t.shape[1] - 1 : 0) * t.strides[1] + 1;
  return {t.dtype, 3, {count, t.shape[0], t.shape[1]}, {(span + 15) / 16 * 16, t.strides[0], t.strides[1]}, t.alignment, t.flags};
}

int64_t block_bytes(int32_t dtype) { return scaledMMGetBlockBytes(dtype); }

Product good_gemm(Random& random, int64_t M, int64_t N, int64_t K, int32_t out) {
  Product p = {kGemm, {}, {}};
  const bool batched = below(random, 3) == 0;
  const int64_t B = 1 + below(random, 3);
  const auto maybe = [&](const scaledMMTensorDesc_t& t) { return batched ? batch(B, t) : t; };
  put(&p, 0, maybe(matrix(out, M, N, true, pick(random, {int64_t(0), int64_t(16)}))));
  put(&p, 1, maybe(matrix(kInt8, M, K, below(random, 4) > 0, pick(random, {int64_t(0), int64_t(5), int64_t(16)}))));
  put(&p, 2, below(random, 2) ? maybe(matrix(kInt8, K, N, below(random, 4) == 0)) : matrix(kInt8, K, N, false));
  if (below(random, 2)) p.tensors[2].flags = SCALED_MM_TENSOR_CONSTANT;
  if (out != kInt32) {
    put(&p, 3, below(random, 2) ? vector(kFloat, M) : maybe(matrix(kFloat, M, 1)));
    put(&p, 4, pick(random, {vector(kFloat, N), vector(kFloat, 1), matrix(kFloat, N, 1), maybe(matrix(kFloat, 1, N)), maybe(matrix(kFloat, N, 1))}));
    if (below(random, 2)) put(&p, 5, maybe(matrix(below(random, 2) ? out : kFloat, 1, N)));
  }
  if (below(random, 2)) put(&p, 6, vector(below(random, 2) ? kInt8 : kInt32, M));
  if (below(random, 2)) put(&p, 7, maybe(matrix(below(random, 2) ? kInt8 : kInt32, 1, N)));
  if (below(random, 4) == 0) put(&p, 8, vector(kInt32, M));
  if (below(random, 4) == 0) put(&p, 9, vector(kInt32, N));
  return p;
}

Product good_grouped(Random& random, int64_t M, int64_t N, int64_t K, int32_t out) {
  Product p = {kGrouped, {}, {}};
  const int64_t E = below(random, 5);
  put(&p, 0, matrix(out, M, N));
  put(&p, 1, matrix(kInt8, M, K, true, pick(random, {int64_t(0), int64_t(5), int64_t(16)})));
  put(&p, 2, batch(E, matrix(kInt8, K, N, below(random, 4) == 0)));
  if (out != kInt32) {
    put(&p, 3, vector(kFloat, below(random, 2) ? M : 1));
    put(&p, 4, pick(random, {matrix(kFloat, E, N), vector(kFloat, E), batch(E, matrix(kFloat, N, 1)), batch(E, matrix(kFloat, 1, N))}));
    if (below(random, 2)) put(&p, 5, matrix(kFloat, E, N));
  }
  put(&p, 6, vector(kInt32, E));
  if (below(random, 3) == 0) put(&p, 7, vector(kInt32, below(random, 2) ? M : 1));
  if (below(random, 3) == 0) put(&p, 8, pick(random, {matrix(kInt8, E, N), vector(kInt32, E), batch(E, matrix(kInt8, N, 1))}));
  if (below(random, 4) == 0) put(&p, 9, vector(kInt32, M));
  if (below(random, 4) == 0) put(&p, 10, matrix(kInt32, E, N));
  return p;
}

Product good_block_scaled(Random& random, int64_t M, int64_t N, int64_t K, int32_t out) {
  Product p = {kBlockScaled, {}, {}};
  put(&p, 0, matrix(out == kInt32 ? kFloat : out, M, N));
  put(&p, 1, matrix(kInt8, M, K, true, pick(random, {int64_t(0), int64_t(16)})));
  put(&p, 2, matrix(kInt8, K, N, below(random, 4) == 0));
  put(&p, 3, matrix(kFloat, M, (K + 127) / 128, below(random, 2)));
  put(&p, 4, matrix(kFloat, (K + 127) / 128, (N + 127) / 128, below(random, 2)));
  if (below(random, 2)) put(&p, 5, vector(kFloat, N));
  return p;
}

Product good_gguf(Random& random, int64_t M, int64_t N, int64_t K, int32_t out) {
  Product p = {kGguf, {}, {}};
  const int32_t format = pick(random, {SCALED_MM_DTYPE_Q4_0, SCALED_MM_DTYPE_Q4_1, SCALED_MM_DTYPE_Q5_1, SCALED_MM_DTYPE_Q8_0});
  const int32_t activation = pick(random, {SCALED_MM_DTYPE_Q8_1, SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32});
  K = K / 32 * 32;
  const auto blocks = [K](int32_t dtype, int64_t rows) {
    return scaledMMTensorDesc_t{dtype, 2, {rows, K, -1}, {K / 32 * block_bytes(dtype), 1, -1}, 16, 0};
  };
  put(&p, 0, matrix(out == kInt32 ? kFloat : out, M, N, below(random, 2)));
  put(&p, 1, blocks(format, M));
  if (below(random, 2)) p.tensors[1].flags = SCALED_MM_TENSOR_PACKED | SCALED_MM_TENSOR_CONSTANT;
  put(&p, 2, activation == SCALED_MM_DTYPE_Q8_1 ? blocks(activation, N) : matrix(activation, N, K, below(random, 4) > 0));
  if (below(random, 2)) put(&p, 3, vector(kFloat, M));
  return p;
}

Product good_grouped_block_scaled(Random& random, int64_t M, int64_t N, int64_t K, int32_t out) {
  Product p = {kGroupedBlockScaled, {}, {}};
  const int64_t E = below(random, 5);
  put(&p, 0, matrix(out == kInt32 ? kFloat : out, M, N));
  put(&p, 1, matrix(kInt8, M, K, true, pick(random, {int64_t(0), int64_t(16)})));
  put(&p, 2, batch(E, matrix(kInt8, K, N, below(random, 4) == 0)));
  put(&p, 3, matrix(kFloat, M, (K + 127) / 128, below(random, 2)));
  put(&p, 4, batch(E, matrix(kFloat, (K + 127) / 128, (N + 127) / 128, below(random, 2))));
  if (below(random, 2)) put(&p, 5, matrix(kFloat, E, N));
  put(&p, 6, vector(kInt32, E));
  return p;
}

constexpr Product (*kGood[])(Random& random, int64_t M, int64_t N, int64_t K, int32_t out) = {good_gemm, good_grouped, good_block_scaled, good_gguf,
                                                                                              good_grouped_block_scaled};
static_assert(std::size(kGood) == kKinds, "each kind has a function that makes a good product");

} // namespace

Product good(Random& random, Kind kind) {
  const int64_t kSizes[] = {0, 1, 2, 5, 16, 17, 32, 48, 64}, kDepths[] = {0, 1, 16, 32, 48, 64, 160, 288};
  const int64_t M = pick(random, kSizes), N = pick(random, kSizes), K = pick(random, kDepths);
  const int32_t out =
      pick(random, {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32, SCALED_MM_DTYPE_FLOAT32, SCALED_MM_DTYPE_INT32});
  return kGood[kind](random, M, N, K, out);
}

Product plain(Kind kind) {
  Random random(5);
  Product p = kGood[kind](random, 5, 16, kind == kGguf ? 64 : 48, kFloat);
  if (kind == kGemm || kind == kGrouped) put(&p, 4, vector(kFloat, 1));
  return p;
}

} // namespace hostile
