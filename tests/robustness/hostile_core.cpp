// Hostile calls of the public C interface, for a build with sanitizers: malformed descriptors, tables, names and pointers, objects of the
// wrong kind or destroyed, a host without memory, eight threads at once.
//
//   hostile_core KERNELS ROUNDS [SECTION]     KERNELS: the library of hostile_kernels.cpp; SECTION: of main's, default: all of them;
//                                             libcuda.so.1 is tests/core/fake_driver.c
//
// What must hold: no call crashes; each answers with a status of the header; a failure has a message of its own that starts with the
// name of an argument; a failed create leaves a null pointer. Kernels get allocations of exactly the bytes that the tensors span.
// Exit status 0: all of it held.
#include <cmath>
#include <scaled_mm/scaled_mm.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

std::atomic<int> failures{0};
std::atomic<long> calls{0};
thread_local std::string context; // what is being tried, for messages

void require(int line, bool holds, const char* what) {
  if (holds || ++failures > 20) return;
  fprintf(stderr, "line %d: %s: %s; last error: %s\n", line, context.c_str(), what, scaledMMGetLastErrorMessage());
}
#define REQUIRE(condition) require(__LINE__, condition, #condition)

// ---- every answer ---------------------------------------------------------------------------------------------------------

constexpr const char* kStale = "stale";

bool names_an_argument(const std::string& message) {
  // Arguments that are no operands. The names of operands are the core's; test_core_products.py compares them with Python's.
  static const char* const kNames[] = {"mode",
                                       "function",
                                       "output",
                                       "epsilon",
                                       "kernel",
                                       "handle",
                                       "descriptor",
                                       "device",
                                       "device_type",
                                       "arch",
                                       "path",
                                       "workspace",
                                       "bytes",
                                       "choice",
                                       "info",
                                       "product",
                                       "operands",
                                       "option",
                                       "device_type, device_id",
                                       "kernel provider",
                                       "host memory",
                                       "table"};
  const std::string name = message.substr(0, message.find(':'));
  for (const char* known : kNames) {
    if (name == known) return true;
  }
  for (int product = 0; scaledMMGetOperandName(product, 0) != nullptr; ++product) {
    for (int i = 0; const char* known = scaledMMGetOperandName(product, i); ++i) {
      if (name == known) return true;
    }
  }
  return message.compare(0, 6, "table ") == 0; // with its source
}

// Of a call that came after SetLastError(kStale).
bool is_typed(scaledMMStatus_t status) {
  ++calls;
  if (status == SCALED_MM_STATUS_SUCCESS) return true;
  const std::string message = scaledMMGetLastErrorMessage();
  return strcmp(scaledMMGetStatusName(status), "UNKNOWN_STATUS") != 0 && message != kStale && names_an_argument(message);
}

scaledMMStatus_t checked(int line, scaledMMStatus_t status) {
  require(line, is_typed(status), "a typed status and a message that names an argument");
  return status;
}
#define CALL(call) (scaledMMSetLastError(SCALED_MM_STATUS_SUCCESS, kStale), checked(__LINE__, call))
#define EXPECT(call, status) REQUIRE(CALL(call) == SCALED_MM_STATUS_##status)
#define EXPECT_MESSAGE(call, status, text)                                                                                                           \
  do {                                                                                                                                               \
    EXPECT(call, status);                                                                                                                            \
    REQUIRE(strstr(scaledMMGetLastErrorMessage(), text) != nullptr);                                                                                 \
  } while (0)

// ---- the kinds of product -------------------------------------------------------------------------------------------------

enum Kind { kGemm, kGrouped, kBlockScaled, kBlock, kGroupedBlockScaled, kKinds }; // those that have tables
constexpr int32_t kProducts[] = {SCALED_MM_GEMM, SCALED_MM_GROUPED_GEMM, SCALED_MM_BLOCK_SCALED_GEMM, SCALED_MM_GGUF_GEMM,
                                 SCALED_MM_GROUPED_BLOCK_SCALED_GEMM};
constexpr int32_t kRowwiseProducts[] = {SCALED_MM_ROWWISE_QUANTIZE, SCALED_MM_ROWWISE_NORM, SCALED_MM_ROWWISE_ACTIVATION};
constexpr int kRowwiseKinds = std::size(kRowwiseProducts);
constexpr int kTensors[] = {10, 11, 6, 4, 7}; // operands, out included
constexpr const char* kGot[] = {"got a GEMM descriptor", "got a grouped GEMM descriptor", "got a block-scaled GEMM descriptor",
                                "got a GGUF GEMM descriptor", "got a grouped block-scaled GEMM descriptor"}; // in a refusal of the wrong kind
static_assert(std::size(kProducts) == kKinds && std::size(kTensors) == kKinds && std::size(kGot) == kKinds, "each kind has an entry in each list");
constexpr int kMost = SCALED_MM_MAX_OPERANDS;
std::atomic<long> launches[kKinds]{}; // of products that are not empty

struct Product {
  Kind kind;
  scaledMMTensorDesc_t tensors[kMost];
  bool present[kMost];
  int32_t mode = SCALED_MM_GGUF_AUTO;
  const char* kernel = nullptr;
};

struct Descs {
  const scaledMMTensorDesc_t* t[kMost];
  explicit Descs(const Product& p) {
    for (int i = 0; i < kMost; ++i) t[i] = i < kTensors[p.kind] && p.present[i] ? &p.tensors[i] : nullptr;
  }
};

// The header's typed functions take as many operands as the kind has.
template <size_t... I, class Function, class... Last>
scaledMMStatus_t create_typed(std::index_sequence<I...>, Function* function, scaledMMHandle_t handle, scaledMMDescriptor_t* made, const Descs& s,
                              Last... last) {
  return function(handle, made, s.t[I]..., last...);
}
template <size_t... I, class Function>
scaledMMStatus_t calculate_typed(std::index_sequence<I...>, Function* function, scaledMMDescriptor_t d, void* workspace, size_t size,
                                 void* const (&p)[kMost]) {
  return function(d, workspace, size, p[I]..., nullptr);
}
template <Kind kind>
using OperandsOf = std::make_index_sequence<kTensors[kind]>;

// Descriptors are void*: tests hand over other objects too. Both ways to create and to calculate, the typed and the general one, in turn.
scaledMMStatus_t create(scaledMMHandle_t handle, void** d, const Product& p) {
  const Descs s(p);
  auto* made = reinterpret_cast<scaledMMDescriptor_t*>(d);
  static std::atomic<unsigned> turn{0};
  if (turn++ % 2) return scaledMMCreateDescriptor(handle, made, kProducts[p.kind], s.t, kTensors[p.kind], p.kind == kBlock ? p.mode : 0, p.kernel);
  switch (p.kind) {
  case kGemm: return create_typed(OperandsOf<kGemm>(), scaledMMCreateGemmDescriptor, handle, made, s, p.kernel);
  case kGrouped: return create_typed(OperandsOf<kGrouped>(), scaledMMCreateGroupedGemmDescriptor, handle, made, s, p.kernel);
  case kBlockScaled: return create_typed(OperandsOf<kBlockScaled>(), scaledMMCreateBlockScaledGemmDescriptor, handle, made, s, p.kernel);
  case kBlock: return create_typed(OperandsOf<kBlock>(), scaledMMCreateGgufGemmDescriptor, handle, made, s, p.mode, p.kernel);
  case kGroupedBlockScaled:
    return create_typed(OperandsOf<kGroupedBlockScaled>(), scaledMMCreateGroupedBlockScaledGemmDescriptor, handle, made, s, p.kernel);
  case kKinds: break;
  }
  abort();
}

scaledMMStatus_t check(Kind kind, void* d, const Product& p) {
  return scaledMMCheckTensors(static_cast<scaledMMDescriptor_t>(d), kProducts[kind], Descs(p).t, kTensors[kind]);
}

scaledMMStatus_t calculate(Kind kind, void* object, void* workspace, size_t size, void* const (&p)[kMost]) {
  auto* d = static_cast<scaledMMDescriptor_t>(object);
  static std::atomic<unsigned> turn{0};
  if (turn++ % 2) return scaledMMCalculate(d, kProducts[kind], workspace, size, p, kTensors[kind], nullptr);
  switch (kind) {
  case kGemm: return calculate_typed(OperandsOf<kGemm>(), scaledMMCalculateGemm, d, workspace, size, p);
  case kGrouped: return calculate_typed(OperandsOf<kGrouped>(), scaledMMCalculateGroupedGemm, d, workspace, size, p);
  case kBlockScaled: return calculate_typed(OperandsOf<kBlockScaled>(), scaledMMCalculateBlockScaledGemm, d, workspace, size, p);
  case kBlock: return calculate_typed(OperandsOf<kBlock>(), scaledMMCalculateGgufGemm, d, workspace, size, p);
  case kGroupedBlockScaled: return calculate_typed(OperandsOf<kGroupedBlockScaled>(), scaledMMCalculateGroupedBlockScaledGemm, d, workspace, size, p);
  case kKinds: break;
  }
  abort();
}

scaledMMStatus_t get_workspace_size(void* d, size_t* bytes) { return scaledMMGetWorkspaceSize(static_cast<scaledMMDescriptor_t>(d), bytes); }

scaledMMStatus_t get_device(void* d, int32_t* type, int32_t* id) { return scaledMMGetDevice(static_cast<scaledMMDescriptor_t>(d), type, id); }

scaledMMStatus_t get_kernel(void* d, scaledMMKernelChoice_t* choice) { return scaledMMGetKernel(static_cast<scaledMMDescriptor_t>(d), choice); }

scaledMMStatus_t destroy(void* d) { return scaledMMDestroyDescriptor(static_cast<scaledMMDescriptor_t>(d)); }

// ---- good products --------------------------------------------------------------------------------------------------------

using Random = std::mt19937_64;
int64_t below(Random& random, int64_t limit) { return int64_t(random() % uint64_t(limit)); }
template <class T, size_t kCount>
T pick(Random& random, const T (&values)[kCount]) {
  return values[random() % kCount];
}

scaledMMTensorDesc_t vector(int32_t dtype, int64_t length) { return {dtype, 1, {length, -1, -1}, {1, -1, -1}, 16, 0}; }
// The fast dimension is contiguous, the other steps over `pad` elements more.
scaledMMTensorDesc_t matrix(int32_t dtype, int64_t rows, int64_t columns, bool by_rows = true, int64_t pad = 0) {
  return {dtype, 2, {rows, columns, -1}, {by_rows ? columns + pad : 1, by_rows ? 1 : rows + pad, -1}, 16, 0};
}
scaledMMTensorDesc_t batch(int64_t count, const scaledMMTensorDesc_t& t) {
  const int64_t span = (t.shape[0] > 0 ? t.shape[0] - 1 : 0) * t.strides[0] + (t.shape[1] > 0 ? t.shape[1] - 1 : 0) * t.strides[1] + 1;
  return {t.dtype, 3, {count, t.shape[0], t.shape[1]}, {(span + 15) / 16 * 16, t.strides[0], t.strides[1]}, t.alignment, t.flags};
}

void put(Product* p, int index, const scaledMMTensorDesc_t& t) {
  p->tensors[index] = t;
  p->present[index] = true;
}

int64_t block_bytes(int32_t dtype) { return scaledMMGetBlockBytes(dtype); }

constexpr int32_t kInt8 = SCALED_MM_DTYPE_INT8, kInt32 = SCALED_MM_DTYPE_INT32, kFloat = SCALED_MM_DTYPE_FLOAT32;

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

Product good_block(Random& random, int64_t M, int64_t N, int64_t K, int32_t out) {
  Product p = {kBlock, {}, {}};
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

constexpr Product (*kGood[])(Random& random, int64_t M, int64_t N, int64_t K, int32_t out) = {good_gemm, good_grouped, good_block_scaled, good_block,
                                                                                              good_grouped_block_scaled};
static_assert(std::size(kGood) == kKinds, "each kind has a function that makes a good product");

Product good(Random& random, Kind kind) {
  const int64_t kSizes[] = {0, 1, 2, 5, 16, 17, 32, 48, 64}, kDepths[] = {0, 1, 16, 32, 48, 64, 160, 288};
  const int64_t M = pick(random, kSizes), N = pick(random, kSizes), K = pick(random, kDepths);
  const int32_t out =
      pick(random, {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32, SCALED_MM_DTYPE_FLOAT32, SCALED_MM_DTYPE_INT32});
  return kGood[kind](random, M, N, K, out);
}

// ---- what a created descriptor goes through --------------------------------------------------------------------------------

constexpr int64_t kMostBytes = 1 << 20;

// Bytes from the data pointer to the end of the last element; more than kMostBytes: far too many to allocate.
int64_t span_of(const scaledMMTensorDesc_t& t) {
  const __int128 bytes = block_bytes(t.dtype);
  __int128 last = 0;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return 0;
    last += __int128(t.shape[i] - 1) * t.strides[i];
  }
  __int128 span = last + 1;
  if (bytes == 0)
    span *= t.dtype == kInt8 ? 1 : t.dtype == SCALED_MM_DTYPE_FLOAT16 || t.dtype == SCALED_MM_DTYPE_BFLOAT16 ? 2 : 4;
  else if (t.flags & SCALED_MM_TENSOR_PACKED)
    span = __int128((t.shape[0] + 63) / 64) * ((t.shape[1] + 255) / 256) * (512 * bytes + 128);
  else
    span = __int128(t.shape[0] - 1) * t.strides[0] + t.shape[1] / 32 * bytes;
  return span > kMostBytes ? kMostBytes + 1 : int64_t(span);
}

// A launch, with what it needs and not a byte more. Skipped where the product is too large for a loop.
void launch(const Product& p, void* d, size_t workspace_size, Random& random) {
  double work = 1;
  for (int i = 0; i < p.tensors[0].ndim; ++i) work *= double(p.tensors[0].shape[i]);
  work *= double(p.tensors[p.kind == kBlock ? 2 : 1].shape[p.tensors[p.kind == kBlock ? 2 : 1].ndim - 1]);
  void* pointers[kMost] = {};
  std::vector<void*> allocated;
  bool fits = work < 20000 && workspace_size < size_t(kMostBytes);
  for (int i = 0; i < kTensors[p.kind] && fits; ++i) {
    if (!p.present[i]) continue;
    const int64_t bytes = span_of(p.tensors[i]);
    fits = bytes <= kMostBytes;
    if (!fits) break;
    allocated.push_back(pointers[i] = malloc(size_t(bytes)));
    for (int64_t at = 0; at < bytes; ++at) static_cast<uint8_t*>(pointers[i])[at] = uint8_t(random() & 0x3f); // floats stay small
    if ((p.kind == kGrouped || p.kind == kGroupedBlockScaled) && i == 6 && bytes >= 4)
      memset(pointers[i], pick(random, {0, 0x80, 0xff, 0x7f}), 4); // offsets are not believed
  }
  if (fits) {
    void* workspace = malloc(workspace_size);
    EXPECT(calculate(p.kind, d, workspace, workspace_size, pointers), SUCCESS);
    if (work > 0) ++launches[p.kind];
    if (workspace_size > 0 && work > 0) EXPECT(calculate(p.kind, d, workspace, workspace_size - 1, pointers), INSUFFICIENT_WORKSPACE);
    EXPECT(calculate(p.kind, d, workspace, workspace_size, pointers), SUCCESS);
    for (int i = 0; i < kTensors[p.kind]; ++i) {
      if (p.present[i] && i > 0) continue;
      void* kept = pointers[i];
      pointers[i] = static_cast<char*>(kept) + 1; // out is misaligned, or an absent tensor has a pointer
      REQUIRE(CALL(calculate(p.kind, d, workspace, workspace_size, pointers)) != SCALED_MM_STATUS_SUCCESS);
      pointers[i] = kept;
    }
    free(workspace);
  }
  for (void* pointer : allocated) free(pointer);
}

void use(const Product& p, void* d, bool on_gpu, const Product& other, Random& random) {
  size_t bytes = 0;
  int32_t type = -1, id = -1;
  scaledMMKernelChoice_t choice = {};
  EXPECT(get_workspace_size(d, &bytes), SUCCESS);
  EXPECT(get_device(d, &type, &id), SUCCESS);
  EXPECT(get_kernel(d, &choice), SUCCESS);
  REQUIRE(type == (on_gpu ? SCALED_MM_DEVICE_CUDA : SCALED_MM_DEVICE_CPU) && id == 0);
  REQUIRE(choice.row != nullptr && strlen(choice.row) > 0 && strlen(choice.reason) > 0 && bytes < size_t(1) << 62);
  EXPECT(check(p.kind, d, p), SUCCESS);
  CALL(check(p.kind, d, other));
  void* const none[kMost] = {};
  const scaledMMStatus_t status = CALL(calculate(p.kind, d, nullptr, 0, none));
  REQUIRE(on_gpu || status != SCALED_MM_STATUS_SUCCESS);
  void* wild[kMost];
  for (void*& pointer : wild) pointer = reinterpret_cast<void*>(pick(random, {uintptr_t(1), uintptr_t(4096), UINTPTR_MAX, UINTPTR_MAX - 15}));
  if (!on_gpu) REQUIRE(CALL(calculate(p.kind, d, wild[0], SIZE_MAX, wild)) != SCALED_MM_STATUS_SUCCESS);
  if (on_gpu) launch(p, d, bytes, random);
}

void try_product(scaledMMHandle_t handle, bool on_gpu, const Product& p, const Product& other, Random& random) {
  void* d = reinterpret_cast<void*>(1);
  if (CALL(create(handle, &d, p)) != SCALED_MM_STATUS_SUCCESS) {
    REQUIRE(d == nullptr);
    return;
  }
  use(p, d, on_gpu, other, random);
  EXPECT(destroy(d), SUCCESS);
}

// ---- malformed tensors ----------------------------------------------------------------------------------------------------

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

void set_field(scaledMMTensorDesc_t* t, int field, int64_t value) {
  switch (field) {
  case 0: t->dtype = int32_t(value); break;
  case 1: t->ndim = int32_t(value); break;
  case 8: t->alignment = value; break;
  case 9: t->flags = value; break;
  default: (field < 5 ? t->shape[field - 2] : t->strides[field - 5]) = value;
  }
}

// Each field of each tensor of a product at each of the values, and each tensor left out.
void one_field_at_a_time(scaledMMHandle_t handle, bool on_gpu) {
  Random random(1);
  for (int kind = 0; kind < kKinds; ++kind) {
    for (int sample = 0; sample < 3; ++sample) {
      const Product base = good(random, Kind(kind));
      for (int tensor = 0; tensor < kTensors[kind]; ++tensor) {
        Product p = base;
        p.present[tensor] = !base.present[tensor];
        context = "kind " + std::to_string(kind) + ", tensor " + std::to_string(tensor);
        try_product(handle, on_gpu, p, base, random);
        if (p.present[tensor]) continue;
        for (int field = 0; field < kFields; ++field) {
          for (int64_t value : kValues) {
            context = "kind " + std::to_string(kind) + ", tensor " + std::to_string(tensor) + ", field " + std::to_string(field) + " = " +
                      std::to_string(value);
            p = base;
            set_field(&p.tensors[tensor], field, value);
            try_product(handle, on_gpu, p, base, random);
          }
        }
      }
    }
  }
}

void random_fields(scaledMMHandle_t handle, bool on_gpu, uint64_t seed, int rounds) {
  Random random(seed);
  const std::string long_name(100000, 'k');
  for (int round = 0; round < rounds; ++round) {
    context = "seed " + std::to_string(seed) + ", round " + std::to_string(round);
    const Kind kind = Kind(below(random, kKinds));
    const Product base = good(random, kind);
    Product p = base;
    for (int64_t changes = below(random, 4); changes > 0; --changes) {
      const int tensor = int(below(random, kTensors[kind]));
      set_field(&p.tensors[tensor], int(below(random, kFields)), below(random, 8) ? pick(random, kValues) : int64_t(random()));
      if (below(random, 16) == 0) p.present[tensor] = !p.present[tensor];
    }
    if (below(random, 4) == 0) p.mode = int32_t(pick(random, kValues));
    if (below(random, 16) == 0) p.kernel = pick(random, {"any", "fast", "split", "blocks", "", "\xff\xfe", "caf\xc3\xa9", "%s%n", long_name.c_str()});
    try_product(handle, on_gpu, p, base, random);
  }
}

// The largest sizes that a shape may have, over strides of 0: what is reckoned from them must not overflow.
void broadcast_giants(scaledMMHandle_t handle, bool on_gpu) {
  context = "giants";
  Random random(2);
  const int64_t most = INT32_MAX / 32 * 32;
  for (int32_t activation : {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_FLOAT32, SCALED_MM_DTYPE_Q8_1}) {
    Product p = {kBlock, {}, {}};
    put(&p, 0, {kFloat, 2, {1, most, -1}, {most, 1, -1}, 16, 0});
    put(&p, 1, {SCALED_MM_DTYPE_Q4_0, 2, {1, most, -1}, {0, 1, -1}, 16, 0});
    put(&p, 2, {activation, 2, {most, most, -1}, {0, activation == SCALED_MM_DTYPE_Q8_1, -1}, 16, 0});
    try_product(handle, on_gpu, p, p, random);
    put(&p, 1, {SCALED_MM_DTYPE_Q8_0, 2, {most, most, -1}, {0, 1, -1}, 16, SCALED_MM_TENSOR_PACKED});
    put(&p, 0, {kFloat, 2, {most, 1, -1}, {1, 1, -1}, 16, 0});
    p.tensors[2].shape[0] = 1;
    try_product(handle, on_gpu, p, p, random);
  }
  Product p = {kGemm, {}, {}};
  put(&p, 0, matrix(kFloat, 1 << 30, 1 << 30));
  put(&p, 1, matrix(kInt8, 1 << 30, 16));
  put(&p, 2, matrix(kInt8, 16, 1 << 30, false));
  put(&p, 3, vector(kFloat, 1));
  put(&p, 4, vector(kFloat, 1));
  try_product(handle, on_gpu, p, p, random);
  p.kernel = on_gpu ? "split" : nullptr; // a row that asks for eight bytes for each element of out
  void* d = nullptr;
  if (on_gpu) EXPECT_MESSAGE(create(handle, &d, p), BAD_TENSOR_SHAPE, "kernel: row split has a workspace for at most 2^48 elements");
}

// ---- null pointers, wrong kinds, destroyed objects ------------------------------------------------------------------------

Product plain(Kind kind) {
  Random random(5);
  Product p = kGood[kind](random, 5, 16, kind == kBlock ? 64 : 48, kFloat);
  if (kind == kGemm || kind == kGrouped) put(&p, 4, vector(kFloat, 1));
  return p;
}

void null_pointers(scaledMMHandle_t handle) {
  context = "null pointers";
  scaledMMHandleInfo_t info;
  EXPECT(scaledMMCreateHandle(nullptr, SCALED_MM_DEVICE_CPU, 0, nullptr), NULL_POINTER);
  EXPECT(scaledMMDestroyHandle(nullptr), NULL_POINTER);
  EXPECT(scaledMMGetHandleInfo(nullptr, &info), NULL_POINTER);
  EXPECT(scaledMMGetHandleInfo(handle, nullptr), NULL_POINTER);
  for (int k = 0; k < kKinds; ++k) {
    const Kind kind = Kind(k);
    const Product p = plain(kind);
    void* d = nullptr;
    void* const none[kMost] = {};
    size_t bytes;
    int32_t type, id;
    scaledMMKernelChoice_t choice;
    EXPECT(create(nullptr, &d, p), NULL_POINTER);
    EXPECT(create(handle, nullptr, p), NULL_POINTER);
    Product missing = p;
    for (bool& present : missing.present) present = false;
    EXPECT(create(handle, &d, missing), NULL_POINTER);
    EXPECT(create(handle, &d, p), SUCCESS);
    EXPECT_MESSAGE(get_workspace_size(d, nullptr), NULL_POINTER, "bytes: expected");
    EXPECT_MESSAGE(get_kernel(d, nullptr), NULL_POINTER, "choice: expected");
    EXPECT(get_device(d, nullptr, &id), NULL_POINTER);
    EXPECT(get_device(d, &type, nullptr), NULL_POINTER);
    EXPECT(calculate(kind, d, nullptr, 0, none), NULL_POINTER);
    EXPECT(check(kind, d, missing), BAD_PARAM);
    EXPECT(get_workspace_size(nullptr, &bytes), NULL_POINTER);
    EXPECT(get_kernel(nullptr, &choice), NULL_POINTER);
    EXPECT(get_device(nullptr, &type, &id), NULL_POINTER);
    EXPECT(calculate(kind, nullptr, nullptr, 0, none), NULL_POINTER);
    EXPECT(check(kind, nullptr, p), NULL_POINTER);
    EXPECT(destroy(d), SUCCESS);
    EXPECT(destroy(nullptr), NULL_POINTER);
  }
}

// What is told the kind refuses the object, and names what came.
void refuse_kind(Kind kind, void* object, const char* got) {
  const Product p = plain(kind);
  void* const none[kMost] = {};
  EXPECT_MESSAGE(check(kind, object, p), BAD_PARAM, got);
  EXPECT_MESSAGE(calculate(kind, object, nullptr, 0, none), BAD_PARAM, got);
}

// Every function of descriptors does.
void refuse_object(Kind kind, void* object, const char* got) {
  size_t bytes;
  int32_t type, id;
  scaledMMKernelChoice_t choice;
  EXPECT_MESSAGE(get_workspace_size(object, &bytes), BAD_PARAM, got);
  EXPECT_MESSAGE(get_device(object, &type, &id), BAD_PARAM, got);
  EXPECT_MESSAGE(get_kernel(object, &choice), BAD_PARAM, got);
  refuse_kind(kind, object, got);
  EXPECT_MESSAGE(destroy(object), BAD_PARAM, got);
}

void refuse_as_handle(void* object, const char* got) {
  const auto handle = static_cast<scaledMMHandle_t>(object);
  scaledMMHandleInfo_t info;
  void* d = nullptr;
  EXPECT_MESSAGE(scaledMMGetHandleInfo(handle, &info), BAD_PARAM, got);
  for (int kind = 0; kind < kKinds; ++kind) EXPECT_MESSAGE(create(handle, &d, plain(Kind(kind))), BAD_PARAM, got);
  EXPECT_MESSAGE(scaledMMDestroyHandle(handle), BAD_PARAM, got);
}

void wrong_objects() {
  scaledMMHandle_t handle = nullptr;
  void* objects[kKinds] = {};
  EXPECT(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CPU, 0, nullptr), SUCCESS);
  for (int kind = 0; kind < kKinds; ++kind) EXPECT(create(handle, &objects[kind], plain(Kind(kind))), SUCCESS);
  for (int kind = 0; kind < kKinds; ++kind) {
    context = "wrong kind " + std::to_string(kind);
    refuse_object(Kind(kind), handle, "got a handle");
    refuse_as_handle(objects[kind], "got a descriptor");
    for (int other = 0; other < kKinds; ++other) {
      if (other != kind) refuse_kind(Kind(kind), objects[other], kGot[other]);
    }
    const auto d = static_cast<scaledMMDescriptor_t>(objects[kind]);
    const Descs descs(plain(Kind(kind)));
    const int32_t own = kProducts[kind];
    void* const none[kMost] = {};
    int unknown = 0; // the first number that is none
    while (scaledMMGetOperandName(unknown, 0) != nullptr) ++unknown;
    for (int product : {-1, unknown, INT_MAX, INT_MIN}) {
      EXPECT_MESSAGE(scaledMMCheckTensors(d, product, descs.t, kMost), BAD_PARAM, "product: expected a scaledMMProduct_t");
      EXPECT_MESSAGE(scaledMMCalculate(d, product, nullptr, 0, none, kMost, nullptr), BAD_PARAM, "product: expected a scaledMMProduct_t");
      REQUIRE(scaledMMGetOperandName(product, 0) == nullptr);
    }
    for (int count : {-1, 0, kTensors[kind] - 1, kTensors[kind] + 1, INT_MAX}) {
      EXPECT_MESSAGE(scaledMMCheckTensors(d, own, descs.t, count), BAD_PARAM, "operands: expected");
      EXPECT_MESSAGE(scaledMMCalculate(d, own, nullptr, 0, none, count, nullptr), BAD_PARAM, "operands: expected");
      REQUIRE(count < kTensors[kind] || scaledMMGetOperandName(own, count) == nullptr);
    }
    EXPECT_MESSAGE(scaledMMCheckTensors(d, own, nullptr, kTensors[kind]), NULL_POINTER, "operands: expected");
    EXPECT_MESSAGE(scaledMMCalculate(d, own, nullptr, 0, nullptr, kTensors[kind], nullptr), NULL_POINTER, "operands: expected");
  }
  alignas(16) static char memory[8192] = {};
  for (int kind = 0; kind < kKinds; ++kind) refuse_object(Kind(kind), memory + 64, "got a pointer that no create function wrote");

  for (int kind = 0; kind < kKinds; ++kind) {
    context = "destroyed " + std::to_string(kind);
    EXPECT(destroy(objects[kind]), SUCCESS);
    refuse_object(Kind(kind), objects[kind], "got a destroyed descriptor");
  }
  EXPECT(scaledMMDestroyHandle(handle), SUCCESS);
  refuse_as_handle(handle, "got a destroyed handle");
  refuse_object(kGemm, handle, "got a destroyed handle");

  context = "a descriptor outlives its handle";
  void* d = nullptr;
  scaledMMHandle_t second = nullptr;
  EXPECT(scaledMMCreateHandle(&second, SCALED_MM_DEVICE_CPU, 0, nullptr), SUCCESS);
  EXPECT(create(second, &d, plain(kGemm)), SUCCESS);
  EXPECT(scaledMMDestroyHandle(second), SUCCESS);
  EXPECT(check(kGemm, d, plain(kGemm)), SUCCESS);
  EXPECT(destroy(d), SUCCESS);
}

// ---- handles, names, libraries --------------------------------------------------------------------------------------------

bool is_utf8(const char* text) {
  for (const auto* p = reinterpret_cast<const unsigned char*>(text); *p;) {
    const int more = *p < 0x80 ? 0 : *p >> 5 == 6 ? 1 : *p >> 4 == 14 ? 2 : *p >> 3 == 30 ? 3 : -1;
    ++p;
    if (more < 0) return false;
    for (int i = 0; i < more; ++i, ++p) {
      if ((*p & 0xc0) != 0x80) return false;
    }
  }
  return true;
}

void names_and_numbers(scaledMMHandle_t cpu, scaledMMHandle_t gpu, const char* program) {
  context = "names and numbers";
  const std::string huge(1 << 20, 'x');
  std::string accents;
  while (accents.size() < 4096) accents += "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80";
  scaledMMHandle_t handle = nullptr;
  for (int type : {-1, 2, 7, INT_MAX, INT_MIN}) EXPECT(scaledMMCreateHandle(&handle, scaledMMDeviceType_t(type), 0, nullptr), BAD_PARAM);
  for (int id : {-1, 1, 64, INT_MAX, INT_MIN}) EXPECT(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, id, nullptr), DEVICE_NOT_SUPPORTED);
  for (const char* arch : {"", huge.c_str(), accents.c_str(), "sm90_and_much_more"}) {
    EXPECT(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CPU, 0, arch), BAD_PARAM);
    EXPECT(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, 0, arch), BAD_PARAM);
  }
  EXPECT(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, 0, "sm999999999999999999999"), BAD_PARAM);
  REQUIRE(handle == nullptr);
  for (int status : {-1, 16, INT_MAX, INT_MIN}) REQUIRE(strcmp(scaledMMGetStatusName(scaledMMStatus_t(status)), "UNKNOWN_STATUS") == 0);
  for (int32_t dtype : {-1, 0, 4, 11, INT_MAX, INT_MIN}) REQUIRE(scaledMMGetBlockBytes(dtype) == 0);

  // A message that is too long ends with a whole character, wherever it is cut.
  for (int kind = 0; kind < kKinds; ++kind) {
    Product p = plain(Kind(kind));
    void* d = nullptr;
    for (size_t from = 0; from < 9; from += 1) {
      const std::string shifted = std::string(from, 'x') + accents;
      p.kernel = shifted.c_str();
      EXPECT(create(cpu, &d, p), BAD_PARAM);
      REQUIRE(is_utf8(scaledMMGetLastErrorMessage()));
      EXPECT(create(gpu, &d, p), KERNEL_NOT_FOUND);
      REQUIRE(is_utf8(scaledMMGetLastErrorMessage()));
    }
    for (const char* name : {"", "\xff\xfe", "%s%n%s", huge.c_str()}) {
      p.kernel = name;
      EXPECT(create(cpu, &d, p), BAD_PARAM);
      EXPECT(create(gpu, &d, p), KERNEL_NOT_FOUND);
    }
    p.kernel = nullptr;
  }
  EXPECT(scaledMMLoadKernels(nullptr), NULL_POINTER);
  for (const char* path : {"", "/", "/dev/null", "/no/such/library.so", "libcuda.so.1", "\xff\xfe", "%s%n", program, huge.c_str(), accents.c_str()}) {
    EXPECT(scaledMMLoadKernels(path), BAD_PARAM);
  }
  EXPECT(scaledMMSetLastError(SCALED_MM_STATUS_BAD_PARAM, "table: of the caller"), BAD_PARAM);
  scaledMMSetLastError(SCALED_MM_STATUS_BAD_PARAM, accents.c_str());
  REQUIRE(is_utf8(scaledMMGetLastErrorMessage()));
  scaledMMSetLastError(SCALED_MM_STATUS_BAD_PARAM, scaledMMGetLastErrorMessage());
  scaledMMSetLastError(SCALED_MM_STATUS_BAD_PARAM, huge.c_str());
  scaledMMSetLastError(SCALED_MM_STATUS_BAD_PARAM, nullptr);
}

// An address that is no multiple of the dtype's bytes: the message says the number that it must be a multiple of.
void misaligned_out(scaledMMHandle_t cpu) {
  context = "misaligned out";
  for (int k = 0; k < kKinds; ++k) {
    const Kind kind = Kind(k);
    void* d = nullptr;
    void* wild[kMost];
    for (void*& pointer : wild) pointer = reinterpret_cast<void*>(1 << 20);
    wild[0] = reinterpret_cast<void*>(4098);
    EXPECT(create(cpu, &d, plain(kind)), SUCCESS);
    EXPECT_MESSAGE(calculate(kind, d, nullptr, 0, wild), BAD_TENSOR_ALIGNMENT, "out: expected a data pointer aligned to 4 bytes");
    EXPECT(destroy(d), SUCCESS);
  }
}

// What came first is wrong: it is what the message names.
void unknown_out_dtype(scaledMMHandle_t cpu) {
  for (int kind = 0; kind < kKinds; ++kind) {
    context = "unknown out dtype, kind " + std::to_string(kind);
    Product p = plain(Kind(kind));
    void* d = nullptr;
    p.tensors[0].dtype = 77;
    if (kind != kBlock) put(&p, 5, vector(77, 16));
    EXPECT_MESSAGE(create(cpu, &d, p), BAD_TENSOR_DTYPE, "out: expected");
  }
}

// ---- tables and providers -------------------------------------------------------------------------------------------------

struct Table {
  scaledMMTableRow_t rows[2] = {{"any", 1, 1, 1, 1, {}}, {"fast", 16, 16, 16, 16, {}}};
  scaledMMTableBucket_t buckets[2] = {{16, 16, 16, 1, 0}, {INT64_MAX, INT64_MAX, INT64_MAX, 0, 0}};
  scaledMMTableMode_t modes[2] = {{8, SCALED_MM_GGUF_W4A8, 0}, {INT64_MAX, SCALED_MM_GGUF_W4A16, 0}};
  scaledMMTable_t table = {"sm75", "hostile table", rows, 2, buckets, 2, 0, 0, SCALED_MM_TABLE_GEMM, 0, nullptr, 0};

  Table() = default;
  Table(const Table&) = delete;
  void of_blocks() {
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

void tables() {
  context = "tables";
  const std::string huge(1 << 20, 'x');
  EXPECT(scaledMMRegisterTable(nullptr), NULL_POINTER);
  EXPECT_TABLE(, SUCCESS);
  EXPECT_TABLE(t.of_blocks(), SUCCESS);
  EXPECT_TABLE(t.table.arch = nullptr, NULL_POINTER);
  EXPECT_TABLE(t.table.source = nullptr, NULL_POINTER);
  EXPECT_TABLE(t.table.rows = nullptr, NULL_POINTER);
  EXPECT_TABLE(t.table.buckets = nullptr, NULL_POINTER);
  EXPECT_TABLE(t.of_blocks(); t.table.modes = nullptr, BAD_PARAM);
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
    EXPECT_TABLE(t.of_blocks(); t.table.num_modes = count, BAD_PARAM);
    if (count != 0) EXPECT_TABLE(t.table.num_modes = count, BAD_PARAM);
  }
  for (int32_t value : {INT_MIN, -1, 2, INT_MAX}) EXPECT_TABLE(t.table.fallback_row = value, BAD_PARAM);
  for (int32_t value : {INT_MIN, -2, 2, INT_MAX}) {
    EXPECT_TABLE(t.buckets[0].row = value, BAD_PARAM);
    EXPECT_TABLE(t.buckets[1].row = value, BAD_PARAM);
  }
  EXPECT_TABLE(t.buckets[1].row = SCALED_MM_FASTEST, SUCCESS);
  EXPECT_TABLE(t.of_blocks(); t.buckets[1].row = SCALED_MM_FASTEST, BAD_PARAM);
  const scaledMMTimeModel_t model = {64, 64, 128, 1, 1, 1, 0, 1, 0, 2, 0.1, 1, 1, 0, 6e4};
  EXPECT_TABLE(t.rows[1].time = model, SUCCESS);
  for (int64_t size : {INT64_MIN, int64_t(-1), int64_t(1) << 40, INT64_MAX}) {
    EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.unit_m = size, BAD_PARAM);
    EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.unit_k = size, BAD_PARAM);
  }
  EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.blocks = 0, BAD_PARAM);
  EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.least_steps = 8, SUCCESS);
  for (int32_t steps : {INT_MIN, -1}) EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.least_steps = steps, BAD_PARAM);
  for (int32_t overlaps : {INT_MIN, -1, 2, INT_MAX}) EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.epilogue_overlaps = overlaps, BAD_PARAM);
  for (double us : {-1.0, double(NAN), double(INFINITY)}) EXPECT_TABLE(t.rows[1].time = model; t.rows[1].time.step_us = us, BAD_PARAM);
  EXPECT_TABLE(t.table.fallback_row = 1, BAD_PARAM);
  for (int32_t kind : {INT_MIN, -1, int(kKinds), INT_MAX}) EXPECT_TABLE(t.table.kind = kind, BAD_PARAM);
  for (int32_t flags : {INT_MIN, -1, 4, INT_MAX}) {
    EXPECT_TABLE(t.buckets[0].flags = flags, BAD_PARAM);
    EXPECT_TABLE(t.of_blocks(); t.buckets[0].flags = flags, BAD_PARAM);
  }
  for (int32_t value : {INT_MIN, -16, -1, 0, 3, 24, INT_MAX}) {
    EXPECT_TABLE(t.rows[1].align_a = value, BAD_PARAM);
    EXPECT_TABLE(t.rows[1].align_b = value, BAD_PARAM);
    EXPECT_TABLE(t.rows[1].align_out = value, BAD_PARAM);
    if (value < 1) EXPECT_TABLE(t.rows[1].store_bytes = value, BAD_PARAM);
    if (value < 0) EXPECT_TABLE(t.rows[1].block_size = value, BAD_PARAM);
  }
  for (int32_t mode : {INT_MIN, -1, 0, 4, INT_MAX}) EXPECT_TABLE(t.of_blocks(); t.modes[0].mode = mode, BAD_PARAM);
  EXPECT_TABLE(t.of_blocks(); t.modes[1].m_max = 8, BAD_PARAM);
  EXPECT_TABLE(t.buckets[1].m_max = INT64_MAX - 1, BAD_PARAM);
  EXPECT_TABLE(t.buckets[0].m_max = INT64_MIN; t.buckets[0].n_max = -1, SUCCESS);
  EXPECT_TABLE(t.buckets[0].m_min = INT64_MAX; t.buckets[0].k_min = INT64_MIN, SUCCESS);
  EXPECT_TABLE(t.buckets[1].n_min = 1, BAD_PARAM);
}

// Row-wise operators, with and without a change of their operands, functions and outputs. There are no kernels of them here.
void rowwise(scaledMMHandle_t handle, bool on_gpu, int rounds) {
  constexpr int kOperands[] = {9, 8, 6}, kBytes = 1 << 16;
  alignas(16) static char memory[kBytes];
  Random random(7);
  int made[kRowwiseKinds] = {};
  for (int round = 0; round < rounds; ++round) {
    context = "row-wise, round " + std::to_string(round);
    const int kind = int(below(random, kRowwiseKinds)), product = kRowwiseProducts[kind];
    int32_t function = int32_t(kind == 0 ? 0 : kind == 1 ? 1 + below(random, 2) : 3 + below(random, 3));
    int32_t output = int32_t(kind == 0 ? 1 + below(random, 4) : below(random, 2) ? SCALED_MM_ROWWISE_STATIC : below(random, 2));
    double epsilon = kind == 1 ? 1e-6 : 0;
    const int64_t M = pick(random, {0, 1, 5}), N = pick(random, {0, 1, 8, 33});
    const int32_t x = pick(random, {SCALED_MM_DTYPE_FLOAT16, SCALED_MM_DTYPE_BFLOAT16, SCALED_MM_DTYPE_FLOAT32});
    const auto of_kind = [&](std::initializer_list<int> places) { return places.begin()[kind]; }; // -1: it has none
    scaledMMTensorDesc_t t[SCALED_MM_MAX_OPERANDS];
    bool present[SCALED_MM_MAX_OPERANDS] = {};
    const auto place = [&](int i, const scaledMMTensorDesc_t& desc) {
      if (i < 0) return;
      t[i] = desc;
      present[i] = true;
    };
    for (scaledMMTensorDesc_t& one : t) one = vector(kFloat, 1);
    place(0, matrix(output == SCALED_MM_ROWWISE_CAST ? x : kInt8, M, N, below(random, 2), 3));
    place(1, matrix(x, M, kind == 2 ? 2 * N : N, below(random, 2), 1));
    if (kind == 1) place(3, vector(x, N));
    if (kind == 2 && below(random, 2)) place(5, vector(kInt32, pick(random, {1, 3})));
    if (function == SCALED_MM_ADD_RMS_NORM) place(2, matrix(x, M, N)), place(7, t[1]);
    if (kind == 0 && below(random, 2)) place(2, vector(x, N)), place(3, vector(x, N));
    if (output == SCALED_MM_ROWWISE_STATIC) place(of_kind({4, 4, 2}), vector(kFloat, M)), place(of_kind({5, 5, 3}), vector(kInt32, 1));
    if (output == SCALED_MM_ROWWISE_TOKEN || output == SCALED_MM_ROWWISE_TOKEN_ASYMMETRIC) place(of_kind({6, 6, 4}), vector(kFloat, M));
    if (output == SCALED_MM_ROWWISE_TOKEN_ASYMMETRIC) place(7, vector(kInt32, M)), place(8, vector(kInt32, M));
    for (int64_t changes = below(random, 3); changes > 0; --changes) {
      const int i = int(below(random, kOperands[kind]));
      set_field(&t[i], int(below(random, kFields)), below(random, 8) ? pick(random, kValues) : int64_t(random()));
      if (below(random, 8) == 0) present[i] = !present[i];
    }
    if (below(random, 16) == 0) function = int32_t(pick(random, kValues));
    if (below(random, 16) == 0) output = int32_t(pick(random, kValues));
    if (below(random, 16) == 0) epsilon = pick(random, {-1.0, 0.0, 1e300, 1.0 / 0.0, 0.0 / 0.0});
    const scaledMMTensorDesc_t* descs[SCALED_MM_MAX_OPERANDS] = {};
    for (int i = 0; i < kOperands[kind]; ++i) descs[i] = present[i] ? &t[i] : nullptr;
    auto d = reinterpret_cast<scaledMMDescriptor_t>(1);
    const scaledMMStatus_t status = CALL(scaledMMCreateRowwiseDescriptor(handle, &d, product, function, output, epsilon, descs, kOperands[kind]));
    auto none = reinterpret_cast<scaledMMDescriptor_t>(1);
    EXPECT_MESSAGE(scaledMMCreateRowwiseDescriptor(handle, &none, kProducts[kind], 0, 0, 0, descs, kOperands[kind]), BAD_PARAM,
                   "product: expected a row-wise");
    EXPECT_MESSAGE(scaledMMCreateDescriptor(handle, &none, product, descs, kOperands[kind], function, nullptr), BAD_PARAM, "CreateRowwiseDescriptor");
    REQUIRE(none == nullptr && (d == nullptr) == (status != SCALED_MM_STATUS_SUCCESS));
    if (d == nullptr) continue;
    ++made[kind];
    EXPECT(scaledMMCheckTensors(d, product, descs, kOperands[kind]), SUCCESS);
    const void* pointers[SCALED_MM_MAX_OPERANDS] = {};
    for (int i = 0; i < kOperands[kind]; ++i) {
      if (present[i] || below(random, 16) == 0) pointers[i] = below(random, 16) ? memory + below(random, kBytes) / 16 * 16 : nullptr;
    }
    const scaledMMStatus_t calculated = CALL(scaledMMCalculate(d, product, nullptr, 0, pointers, kOperands[kind], nullptr));
    REQUIRE((calculated == SCALED_MM_STATUS_SUCCESS) <= on_gpu); // on a GPU only empty ones are made
    EXPECT(scaledMMDestroyDescriptor(d), SUCCESS);
  }
  for (int of_kind : made) REQUIRE(of_kind > rounds / 60);
}

int provider_answer = 0;
scaledMMStatus_t provider(const char* arch, const char*, int32_t, int32_t, void* user) {
  if (user != nullptr) ++*static_cast<int*>(user);
  return arch == nullptr ? SCALED_MM_STATUS_INTERNAL_ERROR : scaledMMStatus_t(provider_answer);
}

// A handle whose architecture has no kernels, and at first no tables.
void providers() {
  context = "providers";
  scaledMMHandle_t handle = nullptr;
  int asked = 0;
  void* d = nullptr;
  Product p = plain(kGrouped);
  EXPECT(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, 0, "sm75"), SUCCESS);
  EXPECT(scaledMMSetKernelProvider(provider, &asked), SUCCESS);
  EXPECT(create(handle, &d, p), ARCHITECTURE_NOT_SUPPORTED);
  for (int answer : {-1, 16, INT_MAX, INT_MIN}) {
    provider_answer = answer;
    EXPECT_MESSAGE(create(handle, &d, p), INTERNAL_ERROR, "kernel provider: expected a scaledMMStatus_t");
  }
  REQUIRE(asked == 5 && d == nullptr);
  EXPECT(scaledMMSetKernelProvider(nullptr, nullptr), SUCCESS);
  EXPECT(create(handle, &d, p), ARCHITECTURE_NOT_SUPPORTED);
  EXPECT_TABLE(, SUCCESS);
  EXPECT(create(handle, &d, plain(kGemm)), KERNEL_NOT_BUILT);
  EXPECT(scaledMMDestroyHandle(handle), SUCCESS);
}

// ---- a host without memory ------------------------------------------------------------------------------------------------

thread_local long allocations_left = -1; // then operator new fails; -1: never
thread_local bool allocation_failed = false;

// The call with every one of its allocations failing in turn, until it has all that it asks for.
template <class Call>
void without_memory(const char* what, scaledMMStatus_t last, const Call& call) {
  context = std::string("without memory: ") + what;
  for (long allowed = 0; allowed < 1000; ++allowed) {
    const scaledMMStatus_t status = CALL([&] {
      allocation_failed = false;
      allocations_left = allowed;
      const scaledMMStatus_t answer = call();
      allocations_left = -1;
      return answer;
    }());
    if (!allocation_failed) {
      REQUIRE(status == last);
      return;
    }
    REQUIRE(status == SCALED_MM_STATUS_INTERNAL_ERROR);
  }
  REQUIRE(!"an end to its allocations");
}

void no_host_memory(scaledMMHandle_t cpu, scaledMMHandle_t gpu, const char* kernels) {
#if defined(HOSTILE_UNDER_THREAD_SANITIZER)
  return; // its pthread_once knows no exceptions
#endif
  const std::string name(100, 'n');
  without_memory("tables", SCALED_MM_STATUS_SUCCESS, [&] {
    Table t;
    t.of_blocks();
    t.rows[1].name = t.table.source = name.c_str();
    return scaledMMRegisterTable(&t.table);
  });
  without_memory("libraries", SCALED_MM_STATUS_SUCCESS, [&] { return scaledMMLoadKernels(kernels); });
  scaledMMHandle_t handle = nullptr;
  without_memory("handles", SCALED_MM_STATUS_SUCCESS, [&] { return scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, 0, "sm_of_memory"); });
  EXPECT(scaledMMDestroyHandle(handle), SUCCESS);
  for (int k = 0; k < kKinds; ++k) {
    const Kind kind = Kind(k);
    const Product p = plain(kind);
    Product wrong = p;
    wrong.tensors[0].shape[0] += 1;
    for (scaledMMHandle_t on : {cpu, gpu}) {
      void *first = nullptr, *d = nullptr, *unused = nullptr;
      scaledMMKernelChoice_t choice;
      EXPECT(create(on, &first, p), SUCCESS); // takes the memory of a destroyed one
      without_memory("descriptors", SCALED_MM_STATUS_SUCCESS, [&] { return create(on, &d, p); });
      without_memory("wrong descriptors", SCALED_MM_STATUS_BAD_TENSOR_SHAPE, [&] { return create(on, &unused, wrong); });
      without_memory("reasons", SCALED_MM_STATUS_SUCCESS, [&] { return get_kernel(d, &choice); });
      without_memory("checks", SCALED_MM_STATUS_BAD_TENSOR_SHAPE, [&] { return check(kind, d, wrong); });
      EXPECT(destroy(d), SUCCESS);
      EXPECT(destroy(first), SUCCESS);
    }
  }
}

// ---- eight threads --------------------------------------------------------------------------------------------------------

constexpr int kThreads = 8;

template <class Work>
void in_threads(const Work& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back([&work, i] { work(i); });
  for (std::thread& thread : threads) thread.join();
}

void all_at_once(const char* kernels, int rounds) {
  static void* shared[kKinds];
  static std::atomic<int> destroyed[kKinds];
  scaledMMHandle_t gpu = nullptr;
  EXPECT(scaledMMCreateHandle(&gpu, SCALED_MM_DEVICE_CUDA, 0, nullptr), SUCCESS);
  for (int kind = 0; kind < kKinds; ++kind) EXPECT(create(gpu, &shared[kind], plain(Kind(kind))), SUCCESS);
  in_threads([&](int number) {
    Random random(uint64_t(100 + number));
    for (int round = 0; round < rounds; ++round) {
      context = "thread " + std::to_string(number) + ", round " + std::to_string(round);
      scaledMMHandle_t handle = nullptr;
      const bool on_gpu = below(random, 2);
      EXPECT(scaledMMCreateHandle(&handle, on_gpu ? SCALED_MM_DEVICE_CUDA : SCALED_MM_DEVICE_CPU, 0, nullptr), SUCCESS);
      const Kind kind = Kind(below(random, kKinds));
      const Product p = good(random, kind);
      try_product(handle, on_gpu, p, plain(kind), random);
      const std::string own = "handle: of " + context;
      scaledMMSetLastError(SCALED_MM_STATUS_BAD_PARAM, own.c_str());
      use(plain(kind), shared[kind], true, p, random); // several threads use one descriptor
      scaledMMSetLastError(SCALED_MM_STATUS_BAD_PARAM, own.c_str());
      std::this_thread::yield();
      REQUIRE(own == scaledMMGetLastErrorMessage());
      if (round % 8 == 0) {
        Table t;
        if (below(random, 2)) t.of_blocks();
        EXPECT(scaledMMRegisterTable(&t.table), SUCCESS);
        EXPECT(scaledMMLoadKernels(kernels), SUCCESS);
        EXPECT(scaledMMLoadKernels("/no/such/library.so"), BAD_PARAM);
        EXPECT(scaledMMSetKernelProvider(below(random, 2) ? provider : nullptr, nullptr), SUCCESS);
      }
      EXPECT(scaledMMDestroyHandle(handle), SUCCESS);
    }
  });
  in_threads([&](int) {
    for (int kind = 0; kind < kKinds; ++kind) destroyed[kind] += destroy(shared[kind]) == SCALED_MM_STATUS_SUCCESS;
  });
  context = "eight threads destroy one descriptor";
  for (std::atomic<int>& count : destroyed) REQUIRE(count == 1);
  EXPECT(scaledMMDestroyHandle(gpu), SUCCESS);
}

} // namespace

// The program's own, so that they can fail.
void* operator new(size_t size) {
  if (allocations_left == 0) {
    allocation_failed = true;
    throw std::bad_alloc();
  }
  if (allocations_left > 0) --allocations_left;
  if (void* memory = malloc(size)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](size_t size) { return operator new(size); }
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
void operator delete[](void* memory) noexcept { free(memory); }
void operator delete[](void* memory, size_t) noexcept { free(memory); }

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return fprintf(stderr, "usage: hostile_core KERNELS ROUNDS [SECTION]\n"), 2;
  const int rounds = atoi(argv[2]);
  scaledMMHandle_t cpu = nullptr, gpu = nullptr;
  void* d = nullptr;
  EXPECT(scaledMMCreateHandle(&cpu, SCALED_MM_DEVICE_CPU, 0, nullptr), SUCCESS);
  EXPECT(scaledMMCreateHandle(&gpu, SCALED_MM_DEVICE_CUDA, 0, nullptr), SUCCESS);
  EXPECT(create(gpu, &d, plain(kGemm)), ARCHITECTURE_NOT_SUPPORTED);
  EXPECT(scaledMMLoadKernels(argv[1]), SUCCESS);
  const std::pair<const char*, std::function<void()>> sections[] = {
      {"providers", [] { providers(); }},
      {"tables", [] { tables(); }},
      {"null", [&] { null_pointers(cpu); }},
      {"objects", [] { wrong_objects(); }},
      {"names", [&] { names_and_numbers(cpu, gpu, argv[0]); }},
      {"messages", [&] { misaligned_out(cpu), unknown_out_dtype(cpu); }},
      {"giants", [&] { broadcast_giants(cpu, false), broadcast_giants(gpu, true); }},
      {"fields", [&] { one_field_at_a_time(cpu, false), one_field_at_a_time(gpu, true); }},
      {"random",
       [&] {
         for (uint64_t seed : {11, 12, 13}) random_fields(cpu, false, seed, rounds), random_fields(gpu, true, seed, rounds);
         for (const std::atomic<long>& count : launches) REQUIRE(count > rounds / 50);
       }},
      {"rowwise", [&] { rowwise(cpu, false, rounds), rowwise(gpu, true, rounds); }},
      {"memory", [&] { no_host_memory(cpu, gpu, argv[1]); }},
      {"threads", [&] { all_at_once(argv[1], rounds / 20); }},
  };
  for (const auto& [name, run] : sections) {
    if (argc == 3 || strcmp(argv[3], name) == 0) run();
  }
  EXPECT(scaledMMDestroyHandle(cpu), SUCCESS);
  EXPECT(scaledMMDestroyHandle(gpu), SUCCESS);
  if (failures == 0) printf("hostile_core: %ld calls, everything held\n", calls.load());
  return failures != 0;
}
