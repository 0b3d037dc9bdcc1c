// Hostile calls of the public C interface, for a build with sanitizers: malformed descriptors, tables, names and pointers, objects of the
// wrong kind or destroyed, a host without memory, eight threads at once.
//
//   hostile_core KERNELS ROUNDS [SECTION]     KERNELS: the library of ../hostile_kernels.cpp; SECTION: of main.cpp, default: all of them;
//                                             libcuda.so.1 is tests/core/fake_driver.c
//
// What must hold: no call crashes; each answers with a status of the header; a failure has a message of its own that starts with the
// name of an argument or of what failed; a failed create leaves a null pointer. Kernels get allocations of exactly the bytes that the tensors span.
// Exit status 0: all of it held.
#pragma once

#include <scaled_mm/scaled_mm.h>

#include <atomic>
#include <cstring>
#include <iterator>
#include <random>
#include <string>

namespace hostile {

// ---- answers.cpp

extern std::atomic<int> failures;
extern std::atomic<long> calls;
extern thread_local std::string context; // what is being tried, for messages

void require(const char* file, int line, bool holds, const char* what);
#define REQUIRE(condition) require(__FILE__, __LINE__, condition, #condition)

constexpr const char* kStale = "stale";

// Counts the call. Its status must be one of scaled_mm.h, and a failure must set a message that starts with the name of an argument.
scaledMMStatus_t checked(const char* file, int line, scaledMMStatus_t status);
#define CALL(call) (scaledMMSetLastError(SCALED_MM_STATUS_SUCCESS, kStale), checked(__FILE__, __LINE__, call))
#define EXPECT(call, status) REQUIRE(CALL(call) == SCALED_MM_STATUS_##status)
#define EXPECT_MESSAGE(call, status, text)                                                                                                           \
  do {                                                                                                                                               \
    EXPECT(call, status);                                                                                                                            \
    REQUIRE(strstr(scaledMMGetLastErrorMessage(), text) != nullptr);                                                                                 \
  } while (0)

// ---- the kinds of product

enum Kind { kGemm, kGrouped, kBlockScaled, kGguf, kGroupedBlockScaled, kKinds }; // kinds of product that have a table
constexpr int32_t kProducts[] = {SCALED_MM_GEMM, SCALED_MM_GROUPED_GEMM, SCALED_MM_BLOCK_SCALED_GEMM, SCALED_MM_GGUF_GEMM,
                                 SCALED_MM_GROUPED_BLOCK_SCALED_GEMM};
constexpr int kTensors[] = {10, 11, 6, 4, 7}; // operands, out included
constexpr const char* kGot[] = {"got a GEMM descriptor", "got a grouped GEMM descriptor", "got a block-scaled GEMM descriptor",
                                "got a GGUF GEMM descriptor", "got a grouped block-scaled GEMM descriptor"}; // in a refusal of the wrong kind
static_assert(std::size(kProducts) == kKinds && std::size(kTensors) == kKinds && std::size(kGot) == kKinds, "each kind has an entry in each list");
constexpr int kMost = SCALED_MM_MAX_OPERANDS;
extern std::atomic<long> launches[kKinds]; // launches of products that are not empty

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

// ---- products.cpp

using Random = std::mt19937_64;
inline int64_t below(Random& random, int64_t limit) { return int64_t(random() % uint64_t(limit)); }
template <class T, size_t kCount>
T pick(Random& random, const T (&values)[kCount]) {
  return values[random() % kCount];
}

constexpr int32_t kInt8 = SCALED_MM_DTYPE_INT8, kInt32 = SCALED_MM_DTYPE_INT32, kFloat = SCALED_MM_DTYPE_FLOAT32;

scaledMMTensorDesc_t vector(int32_t dtype, int64_t length);
// One dimension is contiguous: columns if `by_rows`, else rows. The other one's stride is padded by `pad` elements.
scaledMMTensorDesc_t matrix(int32_t dtype, int64_t rows, int64_t columns, bool by_rows = true, int64_t pad = 0);
void put(Product* p, int index, const scaledMMTensorDesc_t& t);

Product good(Random& random, Kind kind); // random sizes, layouts and optional operands
Product plain(Kind kind);                // the same at every call

// ---- calls.cpp

// Descriptors are void*, because sections also pass other objects. `create` and `calculate` alternate between the typed function of the kind
// and the general function.
scaledMMStatus_t create(scaledMMHandle_t handle, void** d, const Product& p);
scaledMMStatus_t check(Kind kind, void* d, const Product& p);
scaledMMStatus_t calculate(Kind kind, void* object, void* workspace, size_t size, void* const (&p)[kMost]);
scaledMMStatus_t get_workspace_size(void* d, size_t* bytes);
scaledMMStatus_t get_device(void* d, int32_t* type, int32_t* id);
scaledMMStatus_t get_kernel(void* d, scaledMMKernelChoice_t* choice);
scaledMMStatus_t destroy(void* d);

// ---- launch.cpp

// Calls every function of the descriptor; on a GPU, launches. `other`: tensors that it was not created for.
void use(const Product& p, void* d, bool on_gpu, const Product& other, Random& random);
// Creates, uses and destroys a descriptor of `p`, which may be malformed.
void try_product(scaledMMHandle_t handle, bool on_gpu, const Product& p, const Product& other, Random& random);

// ---- the functions of the sections, by file

// fields.cpp
void one_field_at_a_time(scaledMMHandle_t handle, bool on_gpu);
void random_fields(scaledMMHandle_t handle, bool on_gpu, uint64_t seed, int rounds);
void broadcast_giants(scaledMMHandle_t handle, bool on_gpu);
// objects.cpp
void null_pointers(scaledMMHandle_t handle);
void wrong_objects();
// names_and_messages.cpp
void names_and_numbers(scaledMMHandle_t cpu, scaledMMHandle_t gpu, const char* program);
void misaligned_out(scaledMMHandle_t cpu);
void unknown_out_dtype(scaledMMHandle_t cpu);
// tables.cpp
void tables();
// rowwise_operators.cpp
void rowwise(scaledMMHandle_t handle, bool on_gpu, int rounds);
// providers.cpp
void providers();
scaledMMStatus_t provider(const char* arch, const char*, int32_t, int32_t, void* user); // counts its calls in `user`, an int
// memory.cpp
void no_host_memory(scaledMMHandle_t cpu, scaledMMHandle_t gpu, const char* kernels);
// threads.cpp
void all_at_once(const char* kernels, int rounds);

} // namespace hostile
