/* scaled_mm: quantized matrix multiplication with fused scales, bias and zero points.
 *
 * The public C interface. It needs neither Python nor torch. The life of a product is
 *
 *   create handle -> create descriptor -> get workspace size -> calculate (as often as wanted) -> destroy
 *
 * `create` validates everything that does not depend on data and picks the kernel; `calculate` takes pointers
 * and a stream, allocates nothing, never synchronises, may be captured in a CUDA graph, and returns the status
 * of the launch. Every function returns a scaledMMStatus_t; scaledMMGetLastErrorMessage() then says, for the
 * calling thread, which argument was wrong, what was expected and what came.
 *
 * Functions may be called from any thread at any time, with one exception: an object may not be destroyed while another call uses it.
 * A handle or descriptor that was destroyed, or one of another kind, is refused with BAD_PARAM, until an object of the same kind is
 * created: it may be given the address of the destroyed one. Undefined: a pointer that no create function wrote, and an array or a
 * string that is shorter than it says.
 *
 * What is computed (docs/design/numerics.md), each float operation rounded to nearest even, none contracted:
 *
 *   acc[m,n] = sum_k (a[m,k] - a_zero_point[m]) * (b[k,n] - b_zero_point[n])       exact, 32-bit integer
 *   out[m,n] = cast( (f32(acc) * b_scale[n]) * a_scale[m] + bias[n] )              or acc itself, for an int32 out
 */
#ifndef SCALED_MM_H_
#define SCALED_MM_H_

#include <stddef.h>
#include <stdint.h>

#include "scaled_mm/gguf_formats.h"

#if defined(__cplusplus)
extern "C" {
#endif

#define SCALED_MM_API __attribute__((visibility("default")))

/* In C++ an enumeration holds any int: a number that is none of its values is answered with a status. */
#if defined(__cplusplus)
#define SCALED_MM_ENUM_BASE : int32_t
#else
#define SCALED_MM_ENUM_BASE
#endif

/* Changes whenever a struct or a signature below changes. */
#define SCALED_MM_ABI_VERSION 14

typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_STATUS_SUCCESS = 0,
  SCALED_MM_STATUS_INTERNAL_ERROR = 1,
  SCALED_MM_STATUS_NULL_POINTER = 2,
  SCALED_MM_STATUS_BAD_PARAM = 3,
  SCALED_MM_STATUS_BAD_TENSOR_DTYPE = 4,
  SCALED_MM_STATUS_BAD_TENSOR_SHAPE = 5,
  SCALED_MM_STATUS_BAD_TENSOR_STRIDES = 6,
  SCALED_MM_STATUS_BAD_TENSOR_ALIGNMENT = 7,
  SCALED_MM_STATUS_BAD_TENSOR_DEVICE = 8,
  SCALED_MM_STATUS_INSUFFICIENT_WORKSPACE = 9,
  SCALED_MM_STATUS_DEVICE_NOT_SUPPORTED = 10,       /* no such device, no driver, or a CPU asked to launch */
  SCALED_MM_STATUS_ARCHITECTURE_NOT_SUPPORTED = 11, /* a GPU below compute capability 7.5, or without a tile table */
  SCALED_MM_STATUS_KERNEL_NOT_FOUND = 12,           /* the name is in no tile table */
  SCALED_MM_STATUS_KERNEL_NOT_BUILT = 13,           /* the row exists, its binary does not, and nothing could build it */
  SCALED_MM_STATUS_OVERFLOW = 14,                   /* K beyond what a 32-bit accumulator holds exactly */
  SCALED_MM_STATUS_CUDA_ERROR = 15,                 /* the driver or the launch failed; the message has its text */
} scaledMMStatus_t;

typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_DEVICE_CPU = 0, /* descriptors validate; calculate answers DEVICE_NOT_SUPPORTED (the CPU backend is in the Python package) */
  SCALED_MM_DEVICE_CUDA = 1,
} scaledMMDeviceType_t;

typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_DTYPE_INT8 = 0,
  SCALED_MM_DTYPE_INT32 = 1,
  SCALED_MM_DTYPE_FLOAT16 = 2,
  SCALED_MM_DTYPE_BFLOAT16 = 3,
  SCALED_MM_DTYPE_FLOAT32 = 4,
/* SCALED_MM_DTYPE_Q4_0 = 5 and so on: the GGUF formats of gguf_formats.h, of weights and, SCALED_MM_DTYPE_Q8_1 = 10, of activations.
 * Their blocks hold 32 values of a row (docs/design/gguf-formats.md). Only GGUF products take them. */
#define SCALED_MM_DTYPE_OF_FORMAT_(NAME, name, code, bytes, bits, zero, has_minimum) SCALED_MM_DTYPE_##NAME = code,
  SCALED_MM_GGUF_FORMATS(SCALED_MM_DTYPE_OF_FORMAT_)
#undef SCALED_MM_DTYPE_OF_FORMAT_
      SCALED_MM_DTYPE_INT64 = 64, /* of the ids of experts only */
} scaledMMDtype_t;

#define SCALED_MM_MAX_DIMS 3

/* Of a weight (b): nothing that is in flight writes it, and nothing will while a product with it is in flight. Kernels may then read
 * it before the stream's preceding kernel has ended (programmatic dependent launch). Looked at when a descriptor is created. */
#define SCALED_MM_TENSOR_CONSTANT 1
/* Of a weight of a GGUF product: its data are the tiles of docs/design/gguf-formats.md, whatever its strides say. */
#define SCALED_MM_TENSOR_PACKED 2

/* A strided tensor without its data. Strides and alignment: elements and bytes respectively. With a GGUF format as dtype the shape
 * is in values, [rows, K]; strides[0] is in bytes, from row to row, and strides[1] is 1: the blocks of a row lie one after the other. */
typedef struct {
  int32_t dtype; /* scaledMMDtype_t */
  int32_t ndim;  /* 0 .. SCALED_MM_MAX_DIMS */
  int64_t shape[SCALED_MM_MAX_DIMS];
  int64_t strides[SCALED_MM_MAX_DIMS];
  int64_t alignment; /* what every data pointer will be a multiple of, in bytes; a power of two, 16 is enough for every kernel */
  int64_t flags;     /* SCALED_MM_TENSOR_CONSTANT (b or a GGUF weight), SCALED_MM_TENSOR_PACKED (a GGUF weight), both, or 0 */
} scaledMMTensorDesc_t;

typedef struct scaledMMHandle* scaledMMHandle_t;
typedef struct scaledMMDescriptor* scaledMMDescriptor_t;

SCALED_MM_API int32_t scaledMMGetAbiVersion(void);
SCALED_MM_API const char* scaledMMGetStatusName(scaledMMStatus_t status);
/* The message of the last call on this thread that failed; "" if none did. Valid until the next failing call. */
SCALED_MM_API const char* scaledMMGetLastErrorMessage(void);
/* For kernel providers and bindings: stores the message for the calling thread and returns the status. */
SCALED_MM_API scaledMMStatus_t scaledMMSetLastError(scaledMMStatus_t status, const char* message);

/* ---- handle: one device ------------------------------------------------------------------------------------ */

/* `arch`: NULL for the device's own tile table, or that which the environment's SCALED_MM_ARCH names; or the name of another
 * one to force it: "sm80" runs the kernels of compute capability 8.0 on any newer GPU, compiled by the driver from their PTX. */
SCALED_MM_API scaledMMStatus_t scaledMMCreateHandle(scaledMMHandle_t* handle, scaledMMDeviceType_t device_type, int32_t device_id, const char* arch);
SCALED_MM_API scaledMMStatus_t scaledMMDestroyHandle(scaledMMHandle_t handle);

typedef struct {
  int32_t device_type;
  int32_t device_id;
  int32_t compute_capability; /* 90 for 9.0; 0 on a CPU */
  int32_t multiprocessors;
  int32_t max_shared_memory; /* bytes that one block may opt in to */
  int32_t padding_;
  double memory_bandwidth; /* bytes per second of device memory, at its peak */
  char arch[16];           /* the tile table in force: "sm90"; "cpu" on a CPU */
} scaledMMHandleInfo_t;

SCALED_MM_API scaledMMStatus_t scaledMMGetHandleInfo(scaledMMHandle_t handle, scaledMMHandleInfo_t* info);

/* ---- kernels and tile tables ------------------------------------------------------------------------------- */

/* Loads a library of kernels made by `scaled-mm build`, and registers its tile tables for kinds of product that have none yet. Descriptors that
 * wait for one of its kernels take it from their next calculate on, unless it needs a larger workspace than they announced. If such a kernel
 * cannot run on their device, its error is returned (ARCHITECTURE_NOT_SUPPORTED, CUDA_ERROR, ...), and they keep the one they have. */
SCALED_MM_API scaledMMStatus_t scaledMMLoadKernels(const char* path);

/* The predicted time of a row's kernel, in microseconds. A unit is a cluster, or the thread blocks that share a tile's K:
 *   start_us + sqrt(compute^2 + memory^2 + l2^2)     + wait_us if b is not SCALED_MM_TENSOR_CONSTANT
 *   compute = steps * step_us + waves * tile_us, or the root of the squares of the two if epilogue_overlaps
 *   waves   = ceil(units / units that run at a time)
 *   steps   = waves * ceil(K / unit_k). If least_steps > 0 and a unit has at least twice as many, the steps of all units are divided evenly
 *             among those that run at a time, least_steps or more for each.
 *   memory  = the bytes of a, b and a 16-bit out, over `memory` times the device's bandwidth
 *   l2      = the bytes that all units load, over `l2` times the number of SMs
 * If most_parts > 0, thread blocks share the tiles that remain after whole waves, and the time depends on no bandwidth; memory and l2 are not used:
 *   start_us + compute                               + wait_us if b is not SCALED_MM_TENSOR_CONSTANT
 *   compute = steps * step_us + waves * tile_us + (sharing_us if tiles are shared) + (two_tiles_us if a thread block then has parts of two tiles)
 *   steps   = whole waves * ceil(K / unit_k) + ceil(steps of the shared tiles / thread blocks that share them)
 * If in addition cluster > 1, a cluster of 2 to `cluster` thread blocks, as suits the product, shares the K of every tile:
 *   compute = waves * (ceil(ceil(K / unit_k) / thread blocks of a cluster) * step_us + tile_us)
 * All 0: absent; the row is then not chosen by time. */
typedef struct {
  int64_t unit_m, unit_n, unit_k; /* rows and columns of out that a unit computes, elements of K in a step of all its parts */
  int32_t blocks;                 /* thread blocks of a unit */
  int32_t cluster;                /* of these, those in one cluster; of the third formula, the most of a cluster */
  int32_t resident;               /* thread blocks on an SM at a time */
  int32_t least_steps;            /* the fewest of a part of a unit; 0: units are not divided */
  int32_t epilogue_overlaps;      /* 1: a tile's epilogue runs beside the steps of another; 0: after its own */
  int32_t most_parts;             /* of the second formula: the most thread blocks for a shared tile, on average; 1 for the third, 0 for the first */
  double start_us, step_us, tile_us, memory, wait_us;
  double l2; /* bytes per microsecond that an SM receives from L2 */
  double sharing_us, two_tiles_us;
} scaledMMTimeModel_t;

typedef struct {
  const char* name;         /* of the kernel row */
  int32_t align_a, align_b; /* bytes: data pointers and row strides of a, b, out must be multiples; 1: any, and any strides */
  int32_t align_out;
  int32_t store_bytes; /* the kernel writes a row of out in whole pieces of these, which N has to fill; 1: any N */
  scaledMMTimeModel_t time;
  int32_t block_size; /* of block-scaled products: the kernel takes blocks of at least so many elements of K; 0: of any size */
  int32_t padding_;
} scaledMMTableRow_t;

typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_TABLE_GEMM = 0,
  SCALED_MM_TABLE_GROUPED_GEMM = 1, /* m_max of its buckets bounds ceil(rows / experts); rows: min(expected rows of the option, tokens) */
  SCALED_MM_TABLE_BLOCK_SCALED_GEMM = 2,
  SCALED_MM_TABLE_GGUF_GEMM = 3,                 /* m_max of its buckets and modes bounds the tokens, n_max the rows of the weight */
  SCALED_MM_TABLE_GROUPED_BLOCK_SCALED_GEMM = 4, /* m_max as of SCALED_MM_TABLE_GROUPED_GEMM */
} scaledMMTableKind_t;

/* A flag of scaledMMTableBucket_t: it serves no product but those whose b is SCALED_MM_TENSOR_CONSTANT. */
#define SCALED_MM_BUCKET_CONSTANT_B 1
/* The same, in a SCALED_MM_TABLE_GGUF_GEMM: none but those of this mode, where AUTO is replaced by the mode that it stands for. */
#define SCALED_MM_BUCKET_W4A8 2
#define SCALED_MM_BUCKET_W4A16 4
#define SCALED_MM_BUCKET_W16A16 8
/* Flag of a bucket of a SCALED_MM_TABLE_GGUF_GEMM, with one of these or alone: it serves only formats with minima (Q4_1, Q5_1). */
#define SCALED_MM_BUCKET_MINIMA 16

/* Instead of a row, in a bucket: the row with the least predicted time of those that have a time model and can take the product, the fallback not
 * counted. In a SCALED_MM_TABLE_GGUF_GEMM, whose rows do not have the same bits, all time models must have most_parts > 0: the choice then is the
 * same on all GPUs with equally many SMs. */
#define SCALED_MM_FASTEST (-1)

/* Serves m_min <= M <= m_max, and so N and K; the first bucket that fits wins; INT64_MAX is open above, 0 below. */
typedef struct {
  int64_t m_max, n_max, k_max;
  int32_t row; /* index into rows, or SCALED_MM_FASTEST */
  /* SCALED_MM_TABLE_GEMM: 0 or SCALED_MM_BUCKET_CONSTANT_B. SCALED_MM_TABLE_GGUF_GEMM: at most one of SCALED_MM_BUCKET_W4A8, _W4A16 and _W16A16,
   * and SCALED_MM_BUCKET_MINIMA or not. Others: 0. */
  int32_t flags;
  int64_t m_min, n_min, k_min;
} scaledMMTableBucket_t;

/* How the float activations of a GGUF product are multiplied; the names are for every format, whatever its bits. */
typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_GGUF_AUTO = 0,   /* float32: W16A16; float16 and bfloat16: as the table says for this many tokens, but W4A16 if out is float32 */
  SCALED_MM_GGUF_W4A8 = 1,   /* quantized to q8_1 first */
  SCALED_MM_GGUF_W4A16 = 2,  /* as they are; float16 and bfloat16 alone */
  SCALED_MM_GGUF_W16A16 = 3, /* as they are, float32 rounded to float16 with a power of two for each token; a kernel may round the values of a
                                packed weight to 16 bits */
} scaledMMGgufMode_t;

/* What AUTO is for at most m_max tokens; the first that fits decides, INT64_MAX is open. */
typedef struct {
  int64_t m_max;
  int32_t mode; /* a scaledMMGgufMode_t but AUTO */
  int32_t padding_;
} scaledMMTableMode_t;

typedef struct {
  const char* arch;   /* "sm90" */
  const char* source; /* where it came from, for messages */
  const scaledMMTableRow_t* rows;
  int64_t num_rows;
  const scaledMMTableBucket_t* buckets;
  int64_t num_buckets;
  int32_t fallback_row; /* takes what no other row can: unaligned or strided operands, K = 0 */
  int32_t tuned;        /* 1: measured on one GPU model by the autotuner */
  int32_t kind;         /* scaledMMTableKind_t: an architecture has one table of each */
  int32_t padding_;
  const scaledMMTableMode_t* modes; /* of SCALED_MM_TABLE_GGUF_GEMM, the last one open; NULL and 0 of any other */
  int64_t num_modes;
} scaledMMTable_t;

/* Copies the table; a second one of its kind for the same arch replaces the first. */
SCALED_MM_API scaledMMStatus_t scaledMMRegisterTable(const scaledMMTable_t* table);

/* What a provider is asked to do about a kernel that no library holds. */
typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_PROVIDE_NOW = 0,   /* load it, and build it first if it is not built: nothing else can run */
  SCALED_MM_PROVIDE_LATER = 1, /* load it if it is built; else it may be built beside the program, and loaded when it is */
  SCALED_MM_PROVIDE_BUILT = 2, /* load it if it is built; build nothing */
} scaledMMProvide_t;

/* Called when a descriptor needs a kernel that no library holds: load it (scaledMMLoadKernels) as `when`, a scaledMMProvide_t, says, and return
 * SUCCESS, for LATER and BUILT also without the kernel; with row NULL when a handle's architecture has no tile table yet: register those
 * it has. out_dtype -1: a kernel for every dtype; of a row of a SCALED_MM_TABLE_GGUF_GEMM it is the format of the weight.
 * A row that is named when a descriptor is created is asked for NOW. The row of a bucket is asked for LATER, once in a process. Until it is
 * loaded, another row of the table that can take the product runs: the fastest by prediction that is loaded or BUILT, else the fallback, NOW.
 * On failure call scaledMMSetLastError. Called on the thread that creates the descriptor; several threads may call at once.
 * NULL takes the provider away. */
typedef scaledMMStatus_t (*scaledMMKernelProvider_t)(const char* arch, const char* row, int32_t out_dtype, int32_t when, void* user);
SCALED_MM_API scaledMMStatus_t scaledMMSetKernelProvider(scaledMMKernelProvider_t provider, void* user);

/* ---- products: one life cycle for every kind ---------------------------------------------------------------- */

/* A kind of product. The sections below say what each computes and what its operands are, in their order, out first. */
typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_GEMM = 0,
  SCALED_MM_GROUPED_GEMM = 1,
  SCALED_MM_BLOCK_SCALED_GEMM = 2,
  SCALED_MM_GGUF_GEMM = 3,
  SCALED_MM_GROUPED_BLOCK_SCALED_GEMM = 4,
  SCALED_MM_ROWWISE_QUANTIZE = 5,
  SCALED_MM_ROWWISE_NORM = 6,
  SCALED_MM_ROWWISE_ACTIVATION = 7,
  SCALED_MM_ROPE = 8,
  SCALED_MM_INT8_BLOCK_QUANTIZE = 9,
  SCALED_MM_GGUF_QUANTIZE = 10,
  SCALED_MM_MOE_SORT = 11,
  SCALED_MM_MOE_QUANTIZE = 12,
  SCALED_MM_MOE_COMBINE = 13,
  SCALED_MM_TOPK_SOFTMAX = 14,
} scaledMMProduct_t;

#define SCALED_MM_MAX_OPERANDS 11

/* The name of an operand of a kind; NULL past the last. */
SCALED_MM_API const char* scaledMMGetOperandName(int32_t product, int32_t index);

/* Validates a product and picks its kernel; not of kinds that scaledMMCreateRowwiseDescriptor creates, see below. operands: one pointer for each
 * operand of the kind, NULL for an absent one. option: 0, or what the kind's section says. kernel: NULL, or the name of a row of the kind's
 * table to use whatever the buckets say. */
SCALED_MM_API scaledMMStatus_t scaledMMCreateDescriptor(scaledMMHandle_t handle, scaledMMDescriptor_t* descriptor, int32_t product,
                                                        const scaledMMTensorDesc_t* const* operands, int32_t num_operands, int32_t option,
                                                        const char* kernel);

/* The device of the handle that it was created with. */
SCALED_MM_API scaledMMStatus_t scaledMMGetDevice(scaledMMDescriptor_t descriptor, int32_t* device_type, int32_t* device_id);

SCALED_MM_API scaledMMStatus_t scaledMMGetWorkspaceSize(scaledMMDescriptor_t descriptor, size_t* bytes);

typedef struct {
  const char* row;    /* the kernel row that the next calculate runs; lives as long as the descriptor */
  const char* reason; /* why: the bucket and the table, "forced", or what kept the faster rows out */
  int32_t bucket;     /* index of the bucket; -1 when none was used */
  int32_t tuned;
  const char* better; /* the row that takes over from `row` once a library with its kernel is loaded; NULL: none */
} scaledMMKernelChoice_t;

SCALED_MM_API scaledMMStatus_t scaledMMGetKernel(scaledMMDescriptor_t descriptor, scaledMMKernelChoice_t* choice);

/* Compares tensors with the ones the descriptor was created with (dtype, shape, strides; not the alignment): SUCCESS, or
 * which one differs and how. For bindings that hold tensors; calculate itself sees pointers only. */
SCALED_MM_API scaledMMStatus_t scaledMMCheckTensors(scaledMMDescriptor_t descriptor, int32_t product, const scaledMMTensorDesc_t* const* operands,
                                                    int32_t num_operands);

/* `stream` is a cudaStream_t. pointers: of device memory, one for each operand of the kind; NULL for those that the descriptor was
 * created without. Only the first, out, is written to, and what else a row-wise operator computes. */
SCALED_MM_API scaledMMStatus_t scaledMMCalculate(scaledMMDescriptor_t descriptor, int32_t product, void* workspace, size_t workspace_size,
                                                 const void* const* pointers, int32_t num_operands, void* stream);

SCALED_MM_API scaledMMStatus_t scaledMMDestroyDescriptor(scaledMMDescriptor_t descriptor);

/* ---- INT8 GEMM --------------------------------------------------------------------------------------------- */

/* out [M,N] int32 | float16 | bfloat16 | float32; a [M,K] int8; b [K,N] int8, any strides (fast when K is contiguous).
 * a_scale float32: one value, [M] or [M,1]; b_scale: one value, [N], [1,N] or [N,1]; both NULL for an int32 out.
 * bias [N] or [1,N], float32 or out's dtype, or NULL. Zero points int32 or int8, or NULL: a's as a_scale's shape,
 * b's one value, [N] or [1,N]; values from -128 to 127 keep the K bound exact.
 * a_row_sums [M] or [M,1], b_column_sums [N] or [1,N], int32, or NULL: the sums over K of a and b, not verified. a's are
 * needed only if b has zero points and b's only if a has; needed sums that are NULL are computed, which reads the operand once more.
 *
 * A batch: a [B,M,K], b [B,K,N], out [B,M,N], in one launch. An a or b of two dimensions, or with a batch of 1, serves every
 * product; batch strides are free (0 too, except out's, whose elements may not overlap). What goes with a may then also be
 * [B,M,1], what goes with b [B,1,N]; B may be 1 there, and so may M and N of scales and zero points. Vectors of one or two
 * dimensions are those of every product.
 * kernel: NULL, or the name of a row of the table to use whatever the buckets say. */
static inline scaledMMStatus_t scaledMMCreateGemmDescriptor(scaledMMHandle_t handle, scaledMMDescriptor_t* descriptor,
                                                            const scaledMMTensorDesc_t* out, const scaledMMTensorDesc_t* a,
                                                            const scaledMMTensorDesc_t* b, const scaledMMTensorDesc_t* a_scale,
                                                            const scaledMMTensorDesc_t* b_scale, const scaledMMTensorDesc_t* bias,
                                                            const scaledMMTensorDesc_t* a_zero_point, const scaledMMTensorDesc_t* b_zero_point,
                                                            const scaledMMTensorDesc_t* a_row_sums, const scaledMMTensorDesc_t* b_column_sums,
                                                            const char* kernel) {
  const scaledMMTensorDesc_t* const operands[10] = {out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums};
  return scaledMMCreateDescriptor(handle, descriptor, SCALED_MM_GEMM, operands, 10, 0, kernel);
}

static inline scaledMMStatus_t scaledMMCalculateGemm(scaledMMDescriptor_t descriptor, void* workspace, size_t workspace_size, void* out,
                                                     const void* a, const void* b, const void* a_scale, const void* b_scale, const void* bias,
                                                     const void* a_zero_point, const void* b_zero_point, const void* a_row_sums,
                                                     const void* b_column_sums, void* stream) {
  const void* const pointers[10] = {out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums};
  return scaledMMCalculate(descriptor, SCALED_MM_GEMM, workspace, workspace_size, pointers, 10, stream);
}

/* ---- grouped INT8 GEMM: a mixture of experts ---------------------------------------------------------------- */

/* Rows of a that lie together go to one expert e, whose weight is b[e]:
 *
 *   out[t,n] = cast( (f32(sum_k a[t,k] * b[e,k,n]) * b_scale[e,n]) * a_scale[t] + bias[e,n] )    begin[e] <= t < end[e]
 *   out[t,n] = 0                                                                      t past the last expert's rows
 *
 * with end[e] = max(end[e-1], min(expert_offsets[e], tokens)), begin[e] = end[e-1], end[-1] = 0: offsets that decrease, are
 * negative or exceed the tokens give empty or shortened experts, never an access outside of a tensor.
 *
 * out [tokens,N] int32 | float16 | bfloat16 | float32; a [tokens,K] int8; b [E,K,N] int8, any strides (fast when K is
 * contiguous). a_scale float32: one value, [tokens] or [tokens,1]; b_scale: one value, [E], [E,1,1], [E,N], [E,1,N] or [E,N,1]; both
 * NULL for an int32 out. bias [E,N], float32 or out's dtype, or NULL. expert_offsets: int32 [E], contiguous, in device
 * memory; read by the kernel, so its contents may change between launches and between replays of a graph. Zero points and sums as
 * of the plain product, or NULL: a_zero_point one value, [tokens] or [tokens,1]; b_zero_point like b_scale; a_row_sums int32
 * [tokens] or [tokens,1]; b_column_sums int32 [E,N] or [E,1,N]. If a has a zero point and b_column_sums is
 * NULL, each launch reads all of b once more.
 * kernel: NULL, or the name of a grouped row of the table.
 * option of scaledMMCreateDescriptor, 0 in the function below: the number of rows that are expected to belong to experts, below 2^30, if the others
 * are many, as on an expert-parallel rank; 0: all. The selection of the kernel depends on it, the result does not. SCALED_MM_UNASSIGNED_ROWS_ANY
 * may be added: rows of out that belong to no expert may then have any values, and are not written on a GPU. */
#define SCALED_MM_UNASSIGNED_ROWS_ANY 0x40000000
static inline scaledMMStatus_t
scaledMMCreateGroupedGemmDescriptor(scaledMMHandle_t handle, scaledMMDescriptor_t* descriptor, const scaledMMTensorDesc_t* out,
                                    const scaledMMTensorDesc_t* a, const scaledMMTensorDesc_t* b, const scaledMMTensorDesc_t* a_scale,
                                    const scaledMMTensorDesc_t* b_scale, const scaledMMTensorDesc_t* bias, const scaledMMTensorDesc_t* expert_offsets,
                                    const scaledMMTensorDesc_t* a_zero_point, const scaledMMTensorDesc_t* b_zero_point,
                                    const scaledMMTensorDesc_t* a_row_sums, const scaledMMTensorDesc_t* b_column_sums, const char* kernel) {
  const scaledMMTensorDesc_t* const operands[11] = {
      out, a, b, a_scale, b_scale, bias, expert_offsets, a_zero_point, b_zero_point, a_row_sums, b_column_sums};
  return scaledMMCreateDescriptor(handle, descriptor, SCALED_MM_GROUPED_GEMM, operands, 11, 0, kernel);
}

static inline scaledMMStatus_t scaledMMCalculateGroupedGemm(scaledMMDescriptor_t descriptor, void* workspace, size_t workspace_size, void* out,
                                                            const void* a, const void* b, const void* a_scale, const void* b_scale, const void* bias,
                                                            const void* expert_offsets, const void* a_zero_point, const void* b_zero_point,
                                                            const void* a_row_sums, const void* b_column_sums, void* stream) {
  const void* const pointers[11] = {out, a, b, a_scale, b_scale, bias, expert_offsets, a_zero_point, b_zero_point, a_row_sums, b_column_sums};
  return scaledMMCalculate(descriptor, SCALED_MM_GROUPED_GEMM, workspace, workspace_size, pointers, 11, stream);
}

/* ---- block-scaled INT8 GEMM -------------------------------------------------------------------------------- */

/* Scales of a for one row and B k, of b for B k and B columns; B is 128 or 64. Every float operation rounds by itself, blocks of K in order:
 *
 *   sum = 0
 *   for kb = 0, 1, ...:   sum = sum + f32(sum_{k of block kb} a[m,k] * b[k,n]) * (a_scale[m,kb] * b_scale[kb,n/B])
 *   out[m,n] = cast( sum + bias[n] )
 *
 * out [M,N] float16 | bfloat16 | float32; a [M,K] int8; b [K,N] int8, any strides (fast when K is contiguous). K and N need not be
 * multiples of B: the last blocks are then smaller. a_scale float32 [M,ceil(K/B)], b_scale float32 [ceil(K/B),ceil(N/B)], whose shapes
 * determine B, any strides. bias [N] or [1,N], float32 or out's dtype, or NULL. K is not bounded: a block's sum is exact.
 * kernel: NULL, or the name of a block-scaled row of the table. */
static inline scaledMMStatus_t scaledMMCreateBlockScaledGemmDescriptor(scaledMMHandle_t handle, scaledMMDescriptor_t* descriptor,
                                                                       const scaledMMTensorDesc_t* out, const scaledMMTensorDesc_t* a,
                                                                       const scaledMMTensorDesc_t* b, const scaledMMTensorDesc_t* a_scale,
                                                                       const scaledMMTensorDesc_t* b_scale, const scaledMMTensorDesc_t* bias,
                                                                       const char* kernel) {
  const scaledMMTensorDesc_t* const operands[6] = {out, a, b, a_scale, b_scale, bias};
  return scaledMMCreateDescriptor(handle, descriptor, SCALED_MM_BLOCK_SCALED_GEMM, operands, 6, 0, kernel);
}

static inline scaledMMStatus_t scaledMMCalculateBlockScaledGemm(scaledMMDescriptor_t descriptor, void* workspace, size_t workspace_size, void* out,
                                                                const void* a, const void* b, const void* a_scale, const void* b_scale,
                                                                const void* bias, void* stream) {
  const void* const pointers[6] = {out, a, b, a_scale, b_scale, bias};
  return scaledMMCalculate(descriptor, SCALED_MM_BLOCK_SCALED_GEMM, workspace, workspace_size, pointers, 6, stream);
}

/* ---- grouped block-scaled INT8 GEMM ------------------------------------------------------------------------- */

/* The two above in one: rows begin[e] <= t < end[e] of out are the block-scaled product of those of a and a_scale with b[e], b_scale[e] and bias[e];
 * rows past the last expert's are 0.
 *
 * out [tokens,N] float16 | bfloat16 | float32; a [tokens,K] int8; b [E,K,N] int8, any strides (fast when K is contiguous). a_scale float32
 * [tokens,ceil(K/B)], b_scale float32 [E,ceil(K/B),ceil(N/B)], any strides. bias [E,N], float32 or out's dtype, or NULL. expert_offsets as
 * above. kernel: NULL, or the name of a row of the table's section of this kind. option: as of grouped products. */
static inline scaledMMStatus_t scaledMMCreateGroupedBlockScaledGemmDescriptor(scaledMMHandle_t handle, scaledMMDescriptor_t* descriptor,
                                                                              const scaledMMTensorDesc_t* out, const scaledMMTensorDesc_t* a,
                                                                              const scaledMMTensorDesc_t* b, const scaledMMTensorDesc_t* a_scale,
                                                                              const scaledMMTensorDesc_t* b_scale, const scaledMMTensorDesc_t* bias,
                                                                              const scaledMMTensorDesc_t* expert_offsets, const char* kernel) {
  const scaledMMTensorDesc_t* const operands[7] = {out, a, b, a_scale, b_scale, bias, expert_offsets};
  return scaledMMCreateDescriptor(handle, descriptor, SCALED_MM_GROUPED_BLOCK_SCALED_GEMM, operands, 7, 0, kernel);
}

static inline scaledMMStatus_t scaledMMCalculateGroupedBlockScaledGemm(scaledMMDescriptor_t descriptor, void* workspace, size_t workspace_size,
                                                                       void* out, const void* a, const void* b, const void* a_scale,
                                                                       const void* b_scale, const void* bias, const void* expert_offsets,
                                                                       void* stream) {
  const void* const pointers[7] = {out, a, b, a_scale, b_scale, bias, expert_offsets};
  return scaledMMCalculate(descriptor, SCALED_MM_GROUPED_BLOCK_SCALED_GEMM, workspace, workspace_size, pointers, 7, stream);
}

/* ---- GGUF formats: products with llama.cpp's quantized weights ----------------------------------------------- */

/* out = W A^T, summed in float32 (docs/design/gguf-formats.md has the formula of each format and the bound on the error):
 *
 *   out[n,m] = cast( sum_k w[n,k] * a[m,k] + bias[n] )
 *
 * M is the number of tokens. weight [N,K] of any weight format of gguf_formats.h, blocks as GGUF files have them at any address, or
 * SCALED_MM_TENSOR_PACKED: tiles, whose data pointer is a multiple of 16; SCALED_MM_TENSOR_CONSTANT too. activation [M,K] Q8_1, blocks at
 * any address, or float16 | bfloat16 | float32, any strides. K is a multiple of 32. out [N,M] float16 | bfloat16 | float32, any strides
 * under which no elements overlap: strides [1, N] are those of a linear layer's [M,N]. bias [N], float32 or out's dtype, or NULL; added in
 * float32.
 * mode: scaledMMGgufMode_t; Q8_1 activations take AUTO or W4A8, float32 not W4A16.
 * kernel: NULL, or the name of a GGUF row of the table. */

static inline scaledMMStatus_t scaledMMCreateGgufGemmDescriptor(scaledMMHandle_t handle, scaledMMDescriptor_t* descriptor,
                                                                const scaledMMTensorDesc_t* out, const scaledMMTensorDesc_t* weight,
                                                                const scaledMMTensorDesc_t* activation, const scaledMMTensorDesc_t* bias,
                                                                int32_t mode, const char* kernel) {
  const scaledMMTensorDesc_t* const operands[4] = {out, weight, activation, bias};
  return scaledMMCreateDescriptor(handle, descriptor, SCALED_MM_GGUF_GEMM, operands, 4, mode, kernel);
}

static inline scaledMMStatus_t scaledMMCalculateGgufGemm(scaledMMDescriptor_t descriptor, void* workspace, size_t workspace_size, void* out,
                                                         const void* weight, const void* activation, const void* bias, void* stream) {
  const void* const pointers[4] = {out, weight, activation, bias};
  return scaledMMCalculate(descriptor, SCALED_MM_GGUF_GEMM, workspace, workspace_size, pointers, 4, stream);
}

/* ---- row-wise operators: what stands between two products ---------------------------------------------------- */

/* y of each row of x, in float32; then out and the other outputs. docs/design/numerics.md has the formulas. */
typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_QUANTIZE_INT8 = 0, /* y = x, x * factor, or x * factor + offset */
  SCALED_MM_RMS_NORM = 1,
  SCALED_MM_ADD_RMS_NORM = 2, /* total = x + residual in x's dtype, y = the norm of total */
  SCALED_MM_SILU_AND_MUL = 3,
  SCALED_MM_GELU_AND_MUL = 4,
  SCALED_MM_GELU_TANH_AND_MUL = 5,
} scaledMMRowwise_t;

typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_ROWWISE_CAST = 0,             /* out = y in x's dtype */
  SCALED_MM_ROWWISE_TOKEN = 1,            /* int8 out; out_scale = max|y| / 127 of each row */
  SCALED_MM_ROWWISE_TOKEN_ASYMMETRIC = 2, /* int8 out; out_scale, out_zero_point and out_row_sums of each row */
  SCALED_MM_ROWWISE_STATIC = 3,           /* int8 out = clamp(round(y / scale) + zero_point), and out_row_sums if wanted */
  SCALED_MM_ROWWISE_ROUND = 4,            /* int8 out = clamp(round(y)) */
  SCALED_MM_ROWWISE_STATIC_COLUMNS = 5,   /* as STATIC, with scale and zero_point of each column */
} scaledMMRowwiseOutput_t;

/* Creates a descriptor of a kind without a table: of SCALED_MM_ROWWISE_*, and of the kinds below. M rows of N elements; x, residual, total and out
 * [M,N] with any strides, x of an activation [M,2N]: x float16 | bfloat16 | float32, residual and total of x's dtype. NULL for what the function or
 * the output does not use.
 *
 *   QUANTIZE    out, x, factor, offset, scale, zero_point, out_scale, out_zero_point, out_row_sums        all but CAST
 *   NORM        out, x, residual, weight, scale, zero_point, out_scale, total                             CAST, TOKEN, STATIC
 *   ACTIVATION  out, x, scale, zero_point, out_scale, expert_offsets                                      CAST, TOKEN, STATIC
 *
 * factor, offset, weight [N], float16 | bfloat16 | float32, offset of factor's dtype. scale float32 and zero_point int8 | int32: one value,
 * [M] or [M,1]; of STATIC_COLUMNS one value, [N] or [1,N]. out_scale float32, out_zero_point and out_row_sums int32: [M] or [M,1], contiguous.
 * expert_offsets int32 [E], contiguous, in device memory, or NULL: rows from its last value on belong to no expert, and are neither read nor
 * written. Its other values are not read: offsets of a grouped product that decrease need their maximum here.
 * total may be x or residual itself; every other output needs memory of its own. epsilon: of NORM, from 0 to the largest float32; else 0.
 * Calculate with scaledMMCalculate; there is no workspace. */
SCALED_MM_API scaledMMStatus_t scaledMMCreateRowwiseDescriptor(scaledMMHandle_t handle, scaledMMDescriptor_t* descriptor, int32_t product,
                                                               int32_t function, int32_t output, double epsilon,
                                                               const scaledMMTensorDesc_t* const* operands, int32_t num_operands);

/* What follows is created with scaledMMCreateRowwiseDescriptor too: output and epsilon are 0. Strides are free unless stated; out and what else
 * is written need memory of their own. Floats are float16 | bfloat16 | float32.
 *
 *   ROPE                  out, query, key, cos, sin, out_key      function: a scaledMMRopePairs_t
 *   INT8_BLOCK_QUANTIZE   out, x, out_scale, expert_offsets       function: a scaledMMInt8BlockDim_t
 *   GGUF_QUANTIZE         out, x                                  function: a scaledMMGgufRule_t
 *   MOE_SORT              out, topk_ids, expert_map, ends, inverse   function: 0
 *   MOE_QUANTIZE          out, x, rows, out_scale                 function: a scaledMMMoeScales_t
 *   MOE_COMBINE           out, y, topk_weights, rows              function: 0
 *   TOPK_SOFTMAX          out, logits, ids                        function: a scaledMMTopkWeights_t
 *
 * ROPE: query [M,HQ,D], floats, D even, and key [M,HK,D] of its dtype are rotated to out and out_key of their shapes and dtype. cos, sin [M,D], or
 * [M,D/2] for pairs that share an angle: any floats.
 * INT8_BLOCK_QUANTIZE: floats to int8 out of x's shape. out_scale float32, max|x| / 127 of each block. TOKEN: x [M,K], blocks of 128 elements of a
 * row, out_scale [M,ceil(K/128)]. WEIGHT: x [N,K] or [B,N,K], blocks of 128 x 128, out_scale [ceil(N/128),ceil(K/128)] or [B,...]. SMALL: 64 for 128.
 * expert_offsets: as of ACTIVATION, for TOKEN.
 * GGUF_QUANTIZE: x [M,K], floats, K a multiple of 32, to GGUF blocks: out [M,K] of a SCALED_MM_DTYPE_Q*, one row's blocks after the other.
 * MOE_SORT: the stable order of the tokens' copies by expert, for a mixture of experts. topk_ids [M,choices] int32 | int64, at most 2^31 - 1
 * elements; expert_map [G] int32 or NULL: id i stands for expert expert_map[i]. Copy m * choices + j is that of token m for its choice j. Written,
 * int32, contiguous: ends [E], one past the last row of each expert, E from 1 to 1024; out [M*choices], the order: the copy of each row, -1 past the
 * last end; inverse [M,choices], the row of each copy, -1 if its expert is not from 0 to E - 1.
 * MOE_QUANTIZE: each row of x [M,K], floats, is quantized once, by the formulas of TOKEN above or, for BLOCK scales, of INT8_BLOCK_QUANTIZE, and
 * written to the rows of out [rows,K] int8 and out_scale [rows,1] or [rows,ceil(K/128)] float32 that rows [M,choices] names: int32, contiguous, -1:
 * none. A row that is not named is left as it is. Every value of rows must be less than the number of rows of out. This is
 * not checked: a larger one writes out of bounds.
 * MOE_COMBINE: out[m,n] = sum over j of topk_weights[m,j] * y[rows[m,j],n], in order of j, without the j whose row is -1. y [rows,N] and out [M,N]
 * are floats of one dtype, topk_weights [M,choices] any floats, rows as above, with values less than the number of rows of y: a larger one reads out
 * of bounds. Computed in float32, for float32 y in float64.
 * TOPK_SOFTMAX: the router of a mixture of experts. logits [M,E], floats, E from 1 to 1024. Of each row, the k largest logits, the largest first: ids
 * [M,k] int32, which expert each belongs to, and out [M,k] float32, its softmax over the row, for RENORMALIZED divided by the sum of the row of out.
 * k from 1 to 32, and at most E. Of equal logits the lower expert comes first; NaN counts as the largest. Computed in float32. */
typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_ROPE_HALVES = 0,      /* pairs (i, i + D/2) of a head, as Llama and GPT-NeoX */
  SCALED_MM_ROPE_INTERLEAVED = 1, /* pairs (2 i, 2 i + 1), as GPT-J */
} scaledMMRopePairs_t;

typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_INT8_BLOCK_TOKEN = 0,
  SCALED_MM_INT8_BLOCK_WEIGHT = 1,
  SCALED_MM_INT8_BLOCK_TRUNCATE = 2, /* added to one of the others: x / scale is rounded toward zero, not to the nearest integer */
  SCALED_MM_INT8_BLOCK_SMALL = 4,    /* added: blocks of 64 elements in place of 128 */
} scaledMMInt8BlockDim_t;

typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_MOE_TOKEN_SCALES = 0,
  SCALED_MM_MOE_BLOCK_SCALES = 1,
} scaledMMMoeScales_t;

typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_TOPK_PROBABILITIES = 0,
  SCALED_MM_TOPK_RENORMALIZED = 1,
} scaledMMTopkWeights_t;

/* docs/design/gguf-formats.md. The rule changes only Q4_0 and Q5_0. */
typedef enum SCALED_MM_ENUM_BASE {
  SCALED_MM_GGUF_RULE_ABSMAX = 0,
  SCALED_MM_GGUF_RULE_GGML = 1,
} scaledMMGgufRule_t;

/* Bytes of a block of 32 values: 18 for SCALED_MM_DTYPE_Q4_0; 0 for a dtype that is no GGUF format. A tile of a packed weight has the
 * bytes of its 64 x 8 blocks, and 128 more. */
SCALED_MM_API int64_t scaledMMGetBlockBytes(int32_t dtype);

#if defined(__cplusplus)
} /* extern "C" */
#endif

#endif /* SCALED_MM_H_ */
