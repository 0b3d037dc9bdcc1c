/* A product on a GPU through the public C interface: no Python, no torch, and of CUDA only the driver, found at run time.
 *
 *   multiply <arch> <row> <alignment> <fallback row> <M> <N> <K> <kernel library> ...
 *
 * Loads libraries that `scaled-mm build` made, registers a table of the two rows, and compares every output with plain loops
 * that follow docs/design/numerics.md. Exit status 0: the same bits. 77: there is no GPU. 2: too few arguments. */
#include <scaled_mm/scaled_mm.h>

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(call)                                                                                                                                  \
  do {                                                                                                                                               \
    scaledMMStatus_t status_ = (call);                                                                                                               \
    if (status_ != SCALED_MM_STATUS_SUCCESS) {                                                                                                       \
      fprintf(stderr, "%s: %s: %s\n", #call, scaledMMGetStatusName(status_), scaledMMGetLastErrorMessage());                                         \
      exit(1);                                                                                                                                       \
    }                                                                                                                                                \
  } while (0)

/* ---- the driver ------------------------------------------------------------------------------------------------- */

typedef unsigned long long DevicePointer;

static int (*cuInit)(unsigned);
static int (*cuDevicePrimaryCtxRetain)(void**, int);
static int (*cuCtxSetCurrent)(void*);
static int (*cuCtxSynchronize)(void);
static int (*cuMemAlloc)(DevicePointer*, size_t);
static int (*cuMemcpyHtoD)(DevicePointer, const void*, size_t);
static int (*cuMemcpyDtoH)(void*, DevicePointer, size_t);
static int (*cuStreamCreate)(void**, unsigned);
static int (*cuStreamSynchronize)(void*);

static void cuda(int error, const char* what) {
  if (error == 0) return;
  fprintf(stderr, "%s: CUDA driver error %d\n", what, error);
  exit(1);
}

/* ISO C has no cast from an object pointer to a function pointer: the bytes are copied. */
static void find(void* library, const char* name, void* function) {
  void* symbol = dlsym(library, name);
  if (symbol == NULL) {
    fprintf(stderr, "the driver has no %s\n", name);
    exit(1);
  }
  memcpy(function, &symbol, sizeof(symbol));
}

static int open_driver(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  void* context = NULL;
  if (library == NULL) return 0;
  find(library, "cuInit", &cuInit);
  find(library, "cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain);
  find(library, "cuCtxSetCurrent", &cuCtxSetCurrent);
  find(library, "cuCtxSynchronize", &cuCtxSynchronize);
  find(library, "cuMemAlloc_v2", &cuMemAlloc);
  find(library, "cuMemcpyHtoD_v2", &cuMemcpyHtoD);
  find(library, "cuMemcpyDtoH_v2", &cuMemcpyDtoH);
  find(library, "cuStreamCreate", &cuStreamCreate);
  find(library, "cuStreamSynchronize", &cuStreamSynchronize);
  if (cuInit(0) != 0) return 0;
  cuda(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
  cuda(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  return 1;
}

static void* on_device(const void* host, size_t bytes) {
  DevicePointer pointer = 0;
  cuda(cuMemAlloc(&pointer, bytes), "cuMemAlloc");
  if (host != NULL) cuda(cuMemcpyHtoD(pointer, host, bytes), "cuMemcpyHtoD");
  return (void*)(size_t)pointer;
}

/* ---- a product -------------------------------------------------------------------------------------------------- */

static uint32_t state = 12345;
static uint32_t next_random(void) {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

static void* allocate(size_t count, size_t size) {
  void* memory = calloc(count ? count : 1, size);
  if (memory == NULL) exit(1);
  return memory;
}

static scaledMMTensorDesc_t matrix(scaledMMDtype_t dtype, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  scaledMMTensorDesc_t t = {dtype, 2, {rows, columns, 0}, {row_stride, column_stride, 0}, 16, 0};
  return t;
}

/* B tensors of up to two dimensions, one after the other; B = 0: the tensor as it is. */
static scaledMMTensorDesc_t batched(int64_t B, scaledMMTensorDesc_t t, int64_t stride) {
  const scaledMMTensorDesc_t b = {t.dtype, 3, {B, t.shape[0], t.shape[1]}, {stride, t.strides[0], t.strides[1]}, t.alignment, 0};
  return B > 0 ? b : t;
}

static scaledMMTensorDesc_t vector(scaledMMDtype_t dtype, int64_t length) {
  scaledMMTensorDesc_t t = {dtype, 1, {length, 0, 0}, {1, 0, 0}, 16, 0};
  return t;
}

/* acc exact, then three float32 operations, each rounded by itself: the compiler is told not to contract them. */
static float expected(const int8_t* a, const int8_t* b, int64_t K, float a_scale, float b_scale, float bias, int za, int zb) {
  int32_t acc = 0;
  float value;
  for (int64_t k = 0; k < K; ++k) acc += (a[k] - za) * (b[k] - zb);
  value = (float)acc;
  value = value * b_scale;
  value = value * a_scale;
  return value + bias;
}

/* B: products in the batch, each with a weight, row scales, bias and row zero points of its own; 0: a plain product. */
static void run(scaledMMHandle_t handle, const char* row, int64_t B, int64_t M, int64_t N, int64_t K, int zero_points, void* stream) {
  const int64_t products = B > 0 ? B : 1, rows = products * M;
  int8_t* a = allocate(rows * K, 1);
  int8_t* b = allocate(products * N * K, 1); /* [N][K]: b [K, N] with K contiguous */
  float *a_scale = allocate(rows, 4), *b_scale = allocate(N, 4), *bias = allocate(products * N, 4), *out = allocate(rows * N, 4);
  int32_t* za = allocate(rows, 4);
  int8_t* zb = allocate(N, 1);
  const scaledMMTensorDesc_t out_desc = batched(B, matrix(SCALED_MM_DTYPE_FLOAT32, M, N, N, 1), M * N);
  const scaledMMTensorDesc_t a_desc = batched(B, matrix(SCALED_MM_DTYPE_INT8, M, K, K, 1), M * K);
  const scaledMMTensorDesc_t b_desc = batched(B, matrix(SCALED_MM_DTYPE_INT8, K, N, 1, K), N * K);
  const scaledMMTensorDesc_t a_scale_desc = batched(B, matrix(SCALED_MM_DTYPE_FLOAT32, M, 1, 1, 1), M);
  const scaledMMTensorDesc_t b_scale_desc = vector(SCALED_MM_DTYPE_FLOAT32, N);
  const scaledMMTensorDesc_t bias_desc = batched(B, matrix(SCALED_MM_DTYPE_FLOAT32, 1, N, N, 1), N);
  const scaledMMTensorDesc_t za_desc = batched(B, matrix(SCALED_MM_DTYPE_INT32, M, 1, 1, 1), M);
  const scaledMMTensorDesc_t zb_desc = vector(SCALED_MM_DTYPE_INT8, N);
  scaledMMDescriptor_t d = NULL;
  scaledMMKernelChoice_t choice;
  size_t bytes = 0;
  int64_t different = 0;

  for (int64_t i = 0; i < rows * K; ++i) a[i] = (int8_t)next_random();
  for (int64_t i = 0; i < products * N * K; ++i) b[i] = (int8_t)next_random();
  for (int64_t m = 0; m < rows; ++m) a_scale[m] = (float)(next_random() % 1000 + 1) * 1e-5f, za[m] = (int8_t)next_random();
  for (int64_t n = 0; n < N; ++n) b_scale[n] = ((float)(next_random() % 2000) - 999.5f) * 1e-5f, zb[n] = (int8_t)next_random();
  for (int64_t n = 0; n < products * N; ++n) bias[n] = (float)(next_random() % 4000) - 2000.0f;
  memset(out, 0xff, (size_t)(rows * N) * 4); /* NaN: an element that is not written shows */

  CHECK(scaledMMCreateGemmDescriptor(handle, &d, &out_desc, &a_desc, &b_desc, &a_scale_desc, &b_scale_desc, &bias_desc, zero_points ? &za_desc : NULL,
                                     zero_points ? &zb_desc : NULL, NULL, NULL, row));
  CHECK(scaledMMGetKernel(d, &choice));
  CHECK(scaledMMGetWorkspaceSize(d, &bytes));
  {
    void *device_out = on_device(out, (size_t)(rows * N) * 4), *device_a = on_device(a, (size_t)(rows * K));
    void* device_b = on_device(b, (size_t)(products * N * K));
    void *device_a_scale = on_device(a_scale, (size_t)rows * 4), *device_b_scale = on_device(b_scale, (size_t)N * 4);
    void *device_bias = on_device(bias, (size_t)(products * N) * 4), *workspace = bytes ? on_device(NULL, bytes) : NULL;
    void *device_za = zero_points ? on_device(za, (size_t)rows * 4) : NULL, *device_zb = zero_points ? on_device(zb, (size_t)N) : NULL;
    cuda(cuCtxSynchronize(), "cuCtxSynchronize");
    if (bytes) {
      scaledMMStatus_t status = scaledMMCalculateGemm(d, workspace, bytes - 1, device_out, device_a, device_b, device_a_scale, device_b_scale,
                                                      device_bias, device_za, device_zb, NULL, NULL, stream);
      if (status != SCALED_MM_STATUS_INSUFFICIENT_WORKSPACE) {
        fprintf(stderr, "a workspace that is too small: got %s\n", scaledMMGetStatusName(status));
        exit(1);
      }
    }
    CHECK(scaledMMCalculateGemm(d, workspace, bytes, device_out, device_a, device_b, device_a_scale, device_b_scale, device_bias, device_za,
                                device_zb, NULL, NULL, stream));
    cuda(cuStreamSynchronize(stream), "cuStreamSynchronize");
    cuda(cuMemcpyDtoH(out, (DevicePointer)(size_t)device_out, (size_t)(rows * N) * 4), "cuMemcpyDtoH");
  }
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t first = m / M * N; /* of the product's weight and bias */
    for (int64_t n = 0; n < N; ++n) {
      const float want =
          expected(a + m * K, b + (first + n) * K, K, a_scale[m], b_scale[n], bias[first + n], zero_points ? za[m] : 0, zero_points ? zb[n] : 0);
      if (memcmp(&want, &out[m * N + n], 4) == 0) continue;
      if (different++ == 0) fprintf(stderr, "[%ld, %ld]: expected %.9g, got %.9g\n", (long)m, (long)n, (double)want, (double)out[m * N + n]);
    }
  }
  printf("%s (%s): %ld of %ld elements differ\n", choice.row, choice.reason, (long)different, (long)(rows * N));
  CHECK(scaledMMDestroyDescriptor(d));
  if (different) exit(1);
  free(a), free(b), free(a_scale), free(b_scale), free(bias), free(out), free(za), free(zb);
}

int main(int argc, char** argv) {
  scaledMMHandle_t handle = NULL;
  void* stream = NULL;
  if (argc < 9) {
    fprintf(stderr, "usage: %s <arch> <row> <alignment> <fallback row> <M> <N> <K> <kernel library> ...\n", argv[0]);
    return 2;
  }
  if (!open_driver()) {
    fprintf(stderr, "%s: there is no GPU\n", argv[0]);
    return 77;
  }
  {
    const char *arch = argv[1], *row = argv[2], *fallback = argv[4];
    const int32_t alignment = atoi(argv[3]);
    const int64_t M = atoll(argv[5]), N = atoll(argv[6]), K = atoll(argv[7]);
    const scaledMMTableRow_t rows[2] = {{row, alignment, alignment, alignment, alignment, {0}, 0, 0}, {fallback, 1, 1, 1, 1, {0}, 0, 0}};
    const scaledMMTableBucket_t bucket = {INT64_MAX, INT64_MAX, INT64_MAX, 0, 0, 0, 0, 0};
    const scaledMMTable_t table = {arch, "multiply.c", rows, 2, &bucket, 1, 1, 0, SCALED_MM_TABLE_GEMM, 0, NULL, 0};
    for (int i = 8; i < argc; ++i) CHECK(scaledMMLoadKernels(argv[i]));
    CHECK(scaledMMRegisterTable(&table));
    CHECK(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, 0, arch));
    cuda(cuStreamCreate(&stream, 1 /* does not wait for the default stream */), "cuStreamCreate");
    for (int zero_points = 0; zero_points < 2; ++zero_points) {
      for (int64_t B = 0; B < 4; B += 3) {
        run(handle, NULL, B, M, N, K, zero_points, stream);             /* the bucket's row */
        run(handle, NULL, B, M + 1, N + 3, K + 5, zero_points, stream); /* unaligned: the fallback */
        run(handle, fallback, B, M, N, K, zero_points, stream);         /* forced */
      }
    }
    CHECK(scaledMMDestroyHandle(handle));
  }
  return 0;
}
