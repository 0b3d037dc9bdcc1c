// Handles, names and libraries that do not exist, and messages: UTF-8, alignment in bytes, the first wrong argument.
#include "hostile.h"

#include <climits>
#include <cstring>

namespace hostile {

namespace {

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

} // namespace

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

  // A message that is cut ends with a whole character.
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

// The message says how many bytes the address must be a multiple of.
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

// Two operands are wrong: the message names the first.
void unknown_out_dtype(scaledMMHandle_t cpu) {
  for (int kind = 0; kind < kKinds; ++kind) {
    context = "unknown out dtype, kind " + std::to_string(kind);
    Product p = plain(Kind(kind));
    void* d = nullptr;
    p.tensors[0].dtype = 77;
    if (kind != kGguf) put(&p, 5, vector(77, 16));
    EXPECT_MESSAGE(create(cpu, &d, p), BAD_TENSOR_DTYPE, "out: expected");
  }
}

} // namespace hostile
