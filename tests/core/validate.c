/* The public C interface on a machine without a GPU: no Python, no torch, no CUDA.
 *
 * A CPU handle validates descriptors and answers calculate with DEVICE_NOT_SUPPORTED. Every wrong argument gets its status
 * and a message that names it. Exit status 0: all of it held. */
#include <scaled_mm/scaled_mm.h>

#include <limits.h>
#include <stdio.h>
#include <string.h>

static int failures = 0;

/* The status, and a piece of the message that must be in it (NULL: the call succeeds). */
static void expect(int line, scaledMMStatus_t got, scaledMMStatus_t expected, const char* message) {
  const char* text = scaledMMGetLastErrorMessage();
  if (got == expected && (message == NULL || strstr(text, message) != NULL)) return;
  fprintf(stderr, "line %d: expected %s \"%s\", got %s \"%s\"\n", line, scaledMMGetStatusName(expected), message ? message : "",
          scaledMMGetStatusName(got), text);
  ++failures;
}
#define EXPECT(call, status, message) expect(__LINE__, call, SCALED_MM_STATUS_##status, message)
#define EXPECT_SUCCESS(call) EXPECT(call, SUCCESS, NULL)

static void require(int line, int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "line %d: %s\n", line, what);
  ++failures;
}
#define REQUIRE(condition) require(__LINE__, condition, #condition)

static scaledMMTensorDesc_t matrix(scaledMMDtype_t dtype, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  scaledMMTensorDesc_t t = {dtype, 2, {rows, columns, 0}, {row_stride, column_stride, 0}, 16, 0};
  return t;
}

static scaledMMTensorDesc_t vector(scaledMMDtype_t dtype, int64_t length) {
  scaledMMTensorDesc_t t = {dtype, 1, {length, 0, 0}, {1, 0, 0}, 16, 0};
  return t;
}

enum { M = 5, N = 24, K = 48 };

typedef struct {
  scaledMMTensorDesc_t out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point;
} Product;

static Product good(void) {
  Product p;
  p.out = matrix(SCALED_MM_DTYPE_BFLOAT16, M, N, N, 1);
  p.a = matrix(SCALED_MM_DTYPE_INT8, M, K, K, 1);
  p.b = matrix(SCALED_MM_DTYPE_INT8, K, N, 1, K);
  p.a_scale = vector(SCALED_MM_DTYPE_FLOAT32, M);
  p.b_scale = vector(SCALED_MM_DTYPE_FLOAT32, N);
  p.bias = vector(SCALED_MM_DTYPE_BFLOAT16, N);
  p.a_zero_point = vector(SCALED_MM_DTYPE_INT32, M);
  p.b_zero_point = vector(SCALED_MM_DTYPE_INT8, N);
  return p;
}

static scaledMMStatus_t create(scaledMMHandle_t handle, scaledMMDescriptor_t* d, const Product* p) {
  return scaledMMCreateGemmDescriptor(handle, d, &p->out, &p->a, &p->b, &p->a_scale, &p->b_scale, &p->bias, &p->a_zero_point, &p->b_zero_point, NULL,
                                      NULL, NULL);
}

/* One field of a good product changed: the status, and a message that names the argument. */
#define EXPECT_REFUSED(change, status, message)                                                                                                      \
  do {                                                                                                                                               \
    Product p = good();                                                                                                                              \
    scaledMMDescriptor_t d = NULL;                                                                                                                   \
    change;                                                                                                                                          \
    EXPECT(create(handle, &d, &p), status, message);                                                                                                 \
    REQUIRE(d == NULL);                                                                                                                              \
  } while (0)

static void check_refusals(scaledMMHandle_t handle) {
  EXPECT_REFUSED(p.a.dtype = SCALED_MM_DTYPE_FLOAT16, BAD_TENSOR_DTYPE, "a: expected int8, got float16");
  EXPECT_REFUSED(p.b.dtype = SCALED_MM_DTYPE_INT32, BAD_TENSOR_DTYPE, "b: expected int8, got int32");
  EXPECT_REFUSED(p.out.dtype = SCALED_MM_DTYPE_INT8, BAD_TENSOR_DTYPE, "out: expected float16, bfloat16, float32 or int32, got int8");
  EXPECT_REFUSED(p.out.dtype = 77, BAD_TENSOR_DTYPE, "out: expected float16, bfloat16, float32 or int32, got an unknown dtype");
  EXPECT_REFUSED(p.a.dtype = -1, BAD_TENSOR_DTYPE, "a: expected int8, got an unknown dtype");
  EXPECT_REFUSED(p.a_scale.dtype = SCALED_MM_DTYPE_BFLOAT16, BAD_TENSOR_DTYPE, "a_scale: expected float32, got bfloat16");
  EXPECT_REFUSED(p.bias.dtype = SCALED_MM_DTYPE_FLOAT16, BAD_TENSOR_DTYPE, "bias: expected out's dtype bfloat16 or float32");
  EXPECT_REFUSED(p.b_zero_point.dtype = SCALED_MM_DTYPE_FLOAT32, BAD_TENSOR_DTYPE, "b_zero_point: expected int32 or int8");

  EXPECT_REFUSED(p.b.shape[0] = K + 1, BAD_TENSOR_SHAPE, "b: expected [K, N] with K = 48");
  EXPECT_REFUSED(p.out.shape[1] = N - 1, BAD_TENSOR_SHAPE, "out: expected [M, N] = [5, 24], got [5, 23]");
  EXPECT_REFUSED(p.a.ndim = 1, BAD_TENSOR_SHAPE, "a: expected 2 dimensions [M, K] or 3 [B, M, K], got 1: [5]");
  EXPECT_REFUSED(p.a.ndim = 4, BAD_TENSOR_SHAPE, "a: expected 0 to 3 dimensions, got 4");
  EXPECT_REFUSED(p.a.ndim = -1, BAD_TENSOR_SHAPE, "a: expected 0 to 3 dimensions, got -1");
  EXPECT_REFUSED(p.a.shape[0] = -1, BAD_TENSOR_SHAPE, "a: expected sizes from 0");
  EXPECT_REFUSED(p.a_scale.shape[0] = M + 1, BAD_TENSOR_SHAPE, "a_scale: expected one value, [5] or [5, 1] (M = 5), got [6]");
  EXPECT_REFUSED(p.bias.shape[0] = 1, BAD_TENSOR_SHAPE, "bias: expected [24] or [1, 24] (N = 24), got [1]");

  EXPECT_REFUSED(p.out.strides[0] = 1, BAD_TENSOR_STRIDES, "out: expected strides under which no two elements overlap");
  EXPECT_REFUSED(p.a.strides[0] = -K, BAD_TENSOR_STRIDES, "a: expected strides of 0 or more");
  EXPECT_REFUSED(p.a.strides[0] = INT64_MAX, BAD_TENSOR_STRIDES, "a: shape [5, 48] with stride");
  EXPECT_REFUSED(p.a.alignment = 3, BAD_PARAM, "a: expected an alignment that is a power of two, got 3");
  EXPECT_REFUSED(p.a.flags = SCALED_MM_TENSOR_CONSTANT, BAD_PARAM, "a: expected flags 0, got 1");
  EXPECT_REFUSED(p.b.flags = 3, BAD_PARAM, "b: expected flags 0 or SCALED_MM_TENSOR_CONSTANT, got 3");
  EXPECT_REFUSED(p.a_scale.alignment = 2, BAD_TENSOR_ALIGNMENT, "a_scale: expected an alignment of at least 4 bytes");
}

static scaledMMTensorDesc_t batched(scaledMMTensorDesc_t t, int64_t batch, int64_t stride) {
  const scaledMMTensorDesc_t b = {t.dtype, 3, {batch, t.shape[0], t.shape[1]}, {stride, t.strides[0], t.strides[1]}, t.alignment, 0};
  return b;
}

enum { B = 3 };

static Product good_batch(void) {
  Product p = good();
  p.out = batched(p.out, B, M * N);
  p.a = batched(p.a, B, M * K);
  p.b = batched(p.b, B, N * K);
  p.a_scale = batched(matrix(SCALED_MM_DTYPE_FLOAT32, M, 1, 1, 1), B, M);
  p.a_zero_point = batched(matrix(SCALED_MM_DTYPE_INT32, 1, 1, 1, 1), B, 1);
  p.b_zero_point = batched(matrix(SCALED_MM_DTYPE_INT8, 1, N, N, 1), 1, N);
  return p;
}

#define EXPECT_BATCH(change, status, message)                                                                                                        \
  do {                                                                                                                                               \
    Product p = good_batch();                                                                                                                        \
    scaledMMDescriptor_t d = NULL;                                                                                                                   \
    change;                                                                                                                                          \
    EXPECT(create(handle, &d, &p), status, message);                                                                                                 \
    if (d != NULL) EXPECT_SUCCESS(scaledMMDestroyDescriptor(d));                                                                                     \
  } while (0)

static void check_batches(scaledMMHandle_t handle) {
  EXPECT_BATCH(, SUCCESS, NULL);
  EXPECT_BATCH(p.a.strides[0] = 0; p.b.strides[0] = 1, SUCCESS, NULL); /* inputs may overlap */
  EXPECT_BATCH(p.b = good().b, SUCCESS, NULL);
  EXPECT_BATCH(p.a.shape[0] = 1, SUCCESS, NULL);
  EXPECT_BATCH(p.out.strides[0] = N; p.out.strides[1] = B * N, SUCCESS, NULL); /* rows of all products in turn */
  EXPECT_BATCH(p.b.shape[0] = 2, BAD_TENSOR_SHAPE, "b: expected [B, K, N] with B = 3 as in a [B, M, K], or 1, got [2, 48, 24]");
  EXPECT_BATCH(p.out = good().out, BAD_TENSOR_SHAPE, "out: expected [B, M, N] = [3, 5, 24], got [5, 24]");
  EXPECT_BATCH(p.out.shape[0] = 4, BAD_TENSOR_SHAPE, "out: expected [B, M, N] = [3, 5, 24], got [4, 5, 24]");
  EXPECT_BATCH(p.out.strides[0] = 0, BAD_TENSOR_STRIDES,
               "out: expected strides under which no two elements overlap, each larger than all that the smaller ones reach, got [0, 24, 1]");
  EXPECT_BATCH(p.out.strides[0] = M * N - 1, BAD_TENSOR_STRIDES, "out: expected strides under which no two elements overlap");
  EXPECT_BATCH(p.a_scale.shape[0] = 2, BAD_TENSOR_SHAPE,
               "a_scale: expected one value, [5], [5, 1] or [3, 5, 1] with 1 in any place (B = 3, M = 5), got [2, 5, 1]");
  EXPECT_BATCH(p.bias = batched(matrix(SCALED_MM_DTYPE_FLOAT32, 1, 1, 1, 1), B, 1), BAD_TENSOR_SHAPE,
               "bias: expected [24], [1, 24] or [3, 1, 24] with 1 for B (B = 3, N = 24), got [3, 1, 1]");
  EXPECT_REFUSED(p.a_scale = batched(matrix(SCALED_MM_DTYPE_FLOAT32, M, 1, 1, 1), 1, M), BAD_TENSOR_SHAPE,
                 "a_scale: expected one value, [5] or [5, 1]");
}

static void check_sums(scaledMMHandle_t handle) {
  Product p = good();
  scaledMMTensorDesc_t rows = vector(SCALED_MM_DTYPE_INT32, M), columns = vector(SCALED_MM_DTYPE_INT32, N);
  scaledMMDescriptor_t d = NULL;
#define CREATE(a_row_sums, b_column_sums)                                                                                                            \
  scaledMMCreateGemmDescriptor(handle, &d, &p.out, &p.a, &p.b, &p.a_scale, &p.b_scale, NULL, &p.a_zero_point, &p.b_zero_point, a_row_sums,           \
                               b_column_sums, NULL)
  EXPECT_SUCCESS(CREATE(&rows, &columns));
  EXPECT(scaledMMCheckTensors(d, SCALED_MM_GEMM,
                              (const scaledMMTensorDesc_t* const[]){&p.out, &p.a, &p.b, &p.a_scale, &p.b_scale, NULL, &p.a_zero_point,
                                                                    &p.b_zero_point, NULL, &columns},
                              10),
         BAD_PARAM, "a_row_sums: expected a tensor as the descriptor was created, got none");
  EXPECT_SUCCESS(scaledMMDestroyDescriptor(d));
  EXPECT(CREATE(&columns, &columns), BAD_TENSOR_SHAPE, "a_row_sums: expected [5] or [5, 1] (M = 5), got [24]");
  EXPECT(CREATE(NULL, &rows), BAD_TENSOR_SHAPE, "b_column_sums: expected [24] or [1, 24] (N = 24), got [5]");
  rows.dtype = SCALED_MM_DTYPE_INT8;
  EXPECT(CREATE(&rows, NULL), BAD_TENSOR_DTYPE, "a_row_sums: expected int32, got int8");
#undef CREATE
}

/* The longest K whose accumulator is exact, and one more: without, with one and with both zero points. */
static void check_overflow(scaledMMHandle_t handle) {
  static const int64_t longest[4] = {131071, 65793, 65793, 33025};
  for (int kind = 0; kind < 4; ++kind) {
    for (int more = 0; more < 2; ++more) {
      Product p = good();
      scaledMMDescriptor_t d = NULL;
      const int64_t k = longest[kind] + more;
      p.a = matrix(SCALED_MM_DTYPE_INT8, M, k, k, 1);
      p.b = matrix(SCALED_MM_DTYPE_INT8, k, N, 1, k);
      scaledMMStatus_t status = scaledMMCreateGemmDescriptor(handle, &d, &p.out, &p.a, &p.b, &p.a_scale, &p.b_scale, NULL,
                                                             kind & 1 ? &p.a_zero_point : NULL, kind & 2 ? &p.b_zero_point : NULL, NULL, NULL, NULL);
      if (more)
        EXPECT(status, OVERFLOW, "a: expected K <= ");
      else
        EXPECT_SUCCESS(status);
      if (d != NULL) EXPECT_SUCCESS(scaledMMDestroyDescriptor(d));
    }
  }
}

static void check_null_pointers(scaledMMHandle_t handle) {
  Product p = good();
  scaledMMDescriptor_t d = NULL;
  scaledMMHandleInfo_t info;
  size_t bytes;
  EXPECT(scaledMMCreateHandle(NULL, SCALED_MM_DEVICE_CPU, 0, NULL), NULL_POINTER, "handle: expected a place to write to");
  EXPECT(scaledMMDestroyHandle(NULL), NULL_POINTER, "handle");
  EXPECT(scaledMMGetHandleInfo(NULL, &info), NULL_POINTER, "handle");
  EXPECT(scaledMMGetHandleInfo(handle, NULL), NULL_POINTER, "info");
  EXPECT(create(NULL, &d, &p), NULL_POINTER, "handle: expected a handle");
  EXPECT(create(handle, NULL, &p), NULL_POINTER, "descriptor: expected a place to write to");
  EXPECT(scaledMMCreateGemmDescriptor(handle, &d, &p.out, NULL, &p.b, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL), NULL_POINTER,
         "a: expected a tensor");
  EXPECT(scaledMMCreateGemmDescriptor(handle, &d, &p.out, &p.a, &p.b, NULL, &p.b_scale, NULL, NULL, NULL, NULL, NULL, NULL), NULL_POINTER,
         "a_scale: expected float32 scales");
  EXPECT(scaledMMGetWorkspaceSize(NULL, &bytes), NULL_POINTER, "descriptor");
  EXPECT(scaledMMGetKernel(NULL, NULL), NULL_POINTER, "descriptor");
  EXPECT(scaledMMDestroyDescriptor(NULL), NULL_POINTER, "descriptor");
  EXPECT(scaledMMCalculateGemm(NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL), NULL_POINTER, "descriptor");
  EXPECT(scaledMMLoadKernels(NULL), NULL_POINTER, "path");
  EXPECT(scaledMMRegisterTable(NULL), NULL_POINTER, "table");
}

static void check_calculate(scaledMMHandle_t handle) {
  static int8_t a[M * K], b[K * N], zero_points_b[N];
  static uint16_t out[M * N], bias[N];
  static float a_scale[M], b_scale[N];
  static int32_t zero_points_a[M];
  Product p = good(), other;
  scaledMMDescriptor_t d = NULL;
  scaledMMKernelChoice_t choice;
  size_t bytes = 1;
  int32_t device_type = -1, device_id = -1;
  EXPECT_SUCCESS(create(handle, &d, &p));
  EXPECT_SUCCESS(scaledMMGetWorkspaceSize(d, &bytes));
  REQUIRE(bytes == 0); /* nothing will be launched */
  EXPECT_SUCCESS(scaledMMGetDevice(d, &device_type, &device_id));
  REQUIRE(device_type == SCALED_MM_DEVICE_CPU && device_id == 0);
  EXPECT_SUCCESS(scaledMMGetKernel(d, &choice));
  REQUIRE(strcmp(choice.row, "cpu") == 0 && choice.bucket == -1);
  EXPECT_SUCCESS(scaledMMCheckTensors(
      d, SCALED_MM_GEMM,
      (const scaledMMTensorDesc_t* const[]){&p.out, &p.a, &p.b, &p.a_scale, &p.b_scale, &p.bias, &p.a_zero_point, &p.b_zero_point, NULL, NULL}, 10));
  other = good();
  other.a.strides[0] = 2 * K;
  EXPECT(scaledMMCheckTensors(d, SCALED_MM_GEMM,
                              (const scaledMMTensorDesc_t* const[]){&p.out, &other.a, &p.b, &p.a_scale, &p.b_scale, &p.bias, &p.a_zero_point,
                                                                    &p.b_zero_point, NULL, NULL},
                              10),
         BAD_TENSOR_STRIDES, "a: expected strides [48, 1] as the descriptor was created");

#define CALCULATE(out, a, bias) scaledMMCalculateGemm(d, NULL, 0, out, a, b, a_scale, b_scale, bias, zero_points_a, zero_points_b, NULL, NULL, NULL)
  EXPECT(CALCULATE(NULL, a, bias), NULL_POINTER, "out: expected a data pointer");
  EXPECT(CALCULATE(out, NULL, bias), NULL_POINTER, "a: expected a data pointer");
  EXPECT(CALCULATE((char*)out + 1, a, bias), BAD_TENSOR_ALIGNMENT, "out: expected a data pointer aligned");
  EXPECT(CALCULATE(out, out, bias), BAD_PARAM, "out: expected memory apart from every input, got an overlap with a");
  EXPECT(CALCULATE(out, a, NULL), NULL_POINTER, "bias: expected a data pointer");
  EXPECT(CALCULATE(out, a, bias), DEVICE_NOT_SUPPORTED, "the C library launches on CUDA devices");
#undef CALCULATE
  EXPECT_SUCCESS(scaledMMDestroyDescriptor(d));

  EXPECT(scaledMMCreateGemmDescriptor(handle, &d, &p.out, &p.a, &p.b, &p.a_scale, &p.b_scale, NULL, NULL, NULL, NULL, NULL, "any"), BAD_PARAM,
         "kernel: expected none on a CPU, got any");
}

static void check_blocks(scaledMMHandle_t handle) {
  enum { ROWS = 65, TOKENS = 9, VALUES = 288 };
  const scaledMMTensorDesc_t blocks = {SCALED_MM_DTYPE_Q4_0, 2, {ROWS, VALUES}, {VALUES / 32 * 18, 1}, 1, 0};
  const scaledMMTensorDesc_t packed = {SCALED_MM_DTYPE_Q4_0,           2,  {ROWS, VALUES},
                                       {-1, INT64_MAX} /* not read */, 16, SCALED_MM_TENSOR_PACKED | SCALED_MM_TENSOR_CONSTANT};
  const scaledMMTensorDesc_t activation = {SCALED_MM_DTYPE_Q8_1, 2, {TOKENS, VALUES}, {VALUES / 32 * 36, 1}, 1, 0};
  const scaledMMTensorDesc_t floats = {SCALED_MM_DTYPE_FLOAT16, 2, {TOKENS, VALUES}, {VALUES, 1}, 16, 0};
  const scaledMMTensorDesc_t out = {SCALED_MM_DTYPE_FLOAT32, 2, {ROWS, TOKENS}, {1, ROWS}, 16, 0};
  scaledMMDescriptor_t d = NULL;
  scaledMMKernelChoice_t choice;
  size_t bytes = 1;
  int32_t device_type = -1, device_id = -1;
  REQUIRE(scaledMMGetBlockBytes(SCALED_MM_DTYPE_Q5_1) == 24 && scaledMMGetBlockBytes(SCALED_MM_DTYPE_FLOAT16) == 0);
  EXPECT(scaledMMCreateGgufGemmDescriptor(NULL, &d, &out, &blocks, &activation, NULL, SCALED_MM_GGUF_AUTO, NULL), NULL_POINTER, "handle: expected");
  EXPECT(scaledMMCreateGgufGemmDescriptor(handle, NULL, &out, &blocks, &activation, NULL, SCALED_MM_GGUF_AUTO, NULL), NULL_POINTER, "descriptor: ");
  EXPECT(scaledMMCreateGgufGemmDescriptor(handle, &d, &out, &floats, &activation, NULL, SCALED_MM_GGUF_AUTO, NULL), BAD_TENSOR_DTYPE,
         "weight: expected q4_0, q4_1, ");
  EXPECT(scaledMMCreateGgufGemmDescriptor(handle, &d, &out, &floats, &activation, NULL, SCALED_MM_GGUF_AUTO, NULL), BAD_TENSOR_DTYPE,
         ", got float16");
  EXPECT(scaledMMCreateGgufGemmDescriptor(handle, &d, &out, &blocks, &activation, NULL, SCALED_MM_GGUF_W4A16, NULL), BAD_PARAM,
         "mode: expected auto or w4a8 with q8_1 activations, got w4a16");
  EXPECT(scaledMMCreateGgufGemmDescriptor(handle, &d, &out, &blocks, &floats, NULL, 4, NULL), BAD_PARAM,
         "mode: expected a scaledMMGgufMode_t, got 4");
  EXPECT(scaledMMCreateGgufGemmDescriptor(handle, &d, &out, &blocks, &floats, NULL, SCALED_MM_GGUF_AUTO, "any"), BAD_PARAM,
         "kernel: expected none on a CPU");
  REQUIRE(d == NULL);
  EXPECT_SUCCESS(scaledMMCreateGgufGemmDescriptor(handle, &d, &out, &packed, &floats, NULL, SCALED_MM_GGUF_W4A16, NULL));
  EXPECT_SUCCESS(scaledMMGetWorkspaceSize(d, &bytes));
  EXPECT_SUCCESS(scaledMMGetDevice(d, &device_type, &device_id));
  EXPECT_SUCCESS(scaledMMGetKernel(d, &choice));
  REQUIRE(bytes == 0 && device_type == SCALED_MM_DEVICE_CPU && device_id == 0 && strcmp(choice.row, "cpu") == 0);
  EXPECT_SUCCESS(scaledMMCheckTensors(d, SCALED_MM_GGUF_GEMM, (const scaledMMTensorDesc_t* const[]){&out, &packed, &floats, NULL}, 4));
  EXPECT(scaledMMCheckTensors(d, SCALED_MM_GGUF_GEMM, (const scaledMMTensorDesc_t* const[]){&out, &blocks, &floats, NULL}, 4), BAD_PARAM,
         "weight: expected packed tiles");
  EXPECT(scaledMMCheckTensors(d, SCALED_MM_GGUF_GEMM, (const scaledMMTensorDesc_t* const[]){&out, NULL, &floats, NULL}, 4), BAD_PARAM,
         "weight: expected a tensor as the descriptor was created, got none");
  EXPECT(scaledMMCalculateGgufGemm(d, NULL, 0, NULL, NULL, NULL, NULL, NULL), NULL_POINTER, "out: expected a data pointer, got null");
  EXPECT(scaledMMCalculateGgufGemm(d, NULL, 0, (void*)4096, (void*)65544, (void*)1048576, NULL, NULL), BAD_TENSOR_ALIGNMENT,
         "weight: expected a data pointer aligned to 16 bytes");
  EXPECT(scaledMMCalculateGgufGemm(d, NULL, 0, (void*)4096, (void*)65536, (void*)1048576, NULL, NULL), DEVICE_NOT_SUPPORTED,
         "handle: the C library launches on CUDA devices");
  EXPECT_SUCCESS(scaledMMDestroyDescriptor(d));
}

static void check_devices(void) {
  scaledMMHandle_t handle = NULL;
  EXPECT(scaledMMCreateHandle(&handle, (scaledMMDeviceType_t)7, 0, NULL), BAD_PARAM, "device_type: expected");
  EXPECT(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CPU, 0, "sm90"), BAD_PARAM, "arch: expected none on a CPU");
  EXPECT(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, 1 << 20, NULL), DEVICE_NOT_SUPPORTED, "device: expected");
  EXPECT(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CUDA, -1, NULL), DEVICE_NOT_SUPPORTED, "device: expected");
  REQUIRE(handle == NULL);
  EXPECT(scaledMMLoadKernels(""), BAD_PARAM, "path: expected a kernel library, got an empty path");
  EXPECT(scaledMMLoadKernels("/nonexistent/kernels.so"), BAD_PARAM, "path: expected a kernel library");
}

static void check_statuses(void) {
  REQUIRE(scaledMMGetAbiVersion() == SCALED_MM_ABI_VERSION);
  REQUIRE(strcmp(scaledMMGetStatusName(SCALED_MM_STATUS_SUCCESS), "SUCCESS") == 0);
  for (int status = 0; status <= SCALED_MM_STATUS_CUDA_ERROR; ++status) {
    REQUIRE(strcmp(scaledMMGetStatusName((scaledMMStatus_t)status), "UNKNOWN_STATUS") != 0);
  }
  REQUIRE(strcmp(scaledMMGetStatusName((scaledMMStatus_t)999), "UNKNOWN_STATUS") == 0);
  EXPECT(scaledMMSetLastError(SCALED_MM_STATUS_CUDA_ERROR, "of a provider"), CUDA_ERROR, "of a provider");
  EXPECT(scaledMMSetLastError(SCALED_MM_STATUS_CUDA_ERROR, NULL), CUDA_ERROR, "");
}

int main(void) {
  scaledMMHandle_t handle = NULL;
  scaledMMHandleInfo_t info;
  REQUIRE(strcmp(scaledMMGetLastErrorMessage(), "") == 0);
  EXPECT_SUCCESS(scaledMMCreateHandle(&handle, SCALED_MM_DEVICE_CPU, 0, NULL));
  EXPECT_SUCCESS(scaledMMGetHandleInfo(handle, &info));
  REQUIRE(info.device_type == SCALED_MM_DEVICE_CPU && strcmp(info.arch, "cpu") == 0 && info.compute_capability == 0);
  check_statuses();
  check_devices();
  check_null_pointers(handle);
  check_refusals(handle);
  check_batches(handle);
  check_sums(handle);
  check_overflow(handle);
  check_calculate(handle);
  check_blocks(handle);
  EXPECT_SUCCESS(scaledMMDestroyHandle(handle));
  if (failures == 0) printf("validate: everything held\n");
  return failures != 0;
}
