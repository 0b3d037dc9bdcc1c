// The interface between the core and a library of kernels. Plain C data: nvcc builds a library with its own static CUDA runtime, any C++ compiler
// builds the core, and they may come from different machines.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "scaled_mm/scaled_mm.h"

#define SCALED_MM_KERNEL_ABI_VERSION 21

namespace scaled_mm {

// A descriptor's memory for the tensor maps that a kernel encoded for its last launch. A launch with the same pointers need not encode again.
// One launch uses it at a time.
struct LaunchCache {
  static constexpr size_t kBytes = 4096, kAlignment = 128;
  const void* pointers[8]; // a, b, out, a_scale, b_scale, bias, row_terms, col_terms for which `bytes` was encoded
  bool filled;
  alignas(kAlignment) unsigned char bytes[kBytes];
};

// The operands of a grouped product besides those of GemmLaunch. In GemmLaunch, M is the number of tokens, and b, b_scale and bias are those of
// expert 0, as are b's zero points and sums, whose strides to the next expert are those of BatchStrides. Strides in elements.
struct Groups {
  int64_t experts;
  int64_t b_stride, b_scale_stride, bias_stride; // from one expert to the next
  bool zero_unassigned;                          // whether rows of out that belong to no expert become zero; else they may have any values
};

// The operands of a GGUF product besides those of GemmLaunch. In GemmLaunch, a is the activation [M, K] with M tokens, and b the weight [N, K]:
//   out[m,n] = cast( sum_k a[m,k] * w[n,k] + bias[n] ),   any out strides; K may be 0
// Strides of float activations are in elements. q8_1 activations: a_stride_m is the bytes between rows, a_stride_k the bytes of a GGUF block.
// An unpacked weight: b_stride_n is the bytes between rows, b_stride_k the bytes of a GGUF block. A packed weight: both are 0.
struct BlockOperands {
  int32_t format;     // scaledMMDtype_t of the weight: SCALED_MM_DTYPE_Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0
  int32_t activation; // scaledMMDtype_t of a: FLOAT16, BFLOAT16, FLOAT32 or Q8_1
  bool quantize;      // float activations are quantized to q8_1 first
  bool round;         // a kernel may round values of a packed weight to 16 bits, and rounds float32 activations to float16
  bool packed;        // b is tiles (docs/design/gguf-formats.md), aligned to 16 bytes; else GGUF blocks as in files
  int32_t out_dtype;  // FLOAT16, BFLOAT16 or FLOAT32, decided at run time: one kernel serves all three
};

struct RowwiseStrides {
  int64_t row, k;
};

// A row-wise operator besides the fields of GemmLaunch. There, M is the number of rows and N the elements of a row of out, a is x and out the first
// output. Strides in elements; 0 along a dimension of size 1, and of a single value.
struct RowwiseOperands {
  int32_t function, output; // scaledMMRowwise_t, scaledMMRowwiseOutput_t
  double epsilon;
  RowwiseStrides x, residual, total, out;
  int64_t vector_stride, offset_stride; // of [N]
  int64_t scale_stride, zero_point_stride;
  int32_t vector_dtype, zero_point_dtype; // scaledMMDtype_t
  int64_t num_experts;                    // of expert_offsets
};

// Their pointers; nullptr for absent ones.
struct RowwisePointers {
  const void *residual, *vector, *offset, *scale, *zero_point;
  const void *out_scale, *out_zero_point, *out_row_sums, *total; // written
  const void* expert_offsets;                                    // int32; rows from the last one on are not computed. Or nullptr
};

// The rotary position embedding besides the fields of GemmLaunch. There, M is the number of tokens and N the elements of a head, a is query and out
// the rotated query. Strides in elements; 0 along a dimension of size 1.
struct HeadStrides {
  int64_t token, head, k;
};
struct RopeOperands {
  bool interleaved; // pairs (2 i, 2 i + 1); else (i, i + N / 2)
  int64_t query_heads, key_heads;
  int64_t angles; // of a token: N, or N / 2 for pairs that share an angle
  HeadStrides query, key, out_query, out_key;
  RowwiseStrides cos, sin;
  int32_t cos_dtype, sin_dtype; // scaledMMDtype_t
};
struct RopePointers {
  const void *key, *cos, *sin;
  const void* out_key; // written
};

// What surrounds the products of a mixture of experts, besides the fields of GemmLaunch. There, M is the number of tokens and N the elements of
// a row. Sort: a is topk_ids, out is order. Quantize: a is x. Combine: a is y. Router: a is logits, out is the weights, M x choices.
struct MoeOperands {
  int64_t choices, experts, mapped; // experts of a token; all; [mapped] of expert_map, -1 without one
  bool wide_ids;                    // topk_ids is int64, else int32
  bool block_scales;                // Quantize: a scale for each 128 elements, else one for each token
  bool renormalize;                 // Router: the weights of a token are divided by their sum
  int64_t map_stride;
  int64_t rows; // of all experts
  RowwiseStrides ids, x, y, out, out_scale, weights;
  int32_t weights_dtype; // scaledMMDtype_t
};
struct MoePointers {
  const void *expert_map, *weights, *rows; // rows: [M, choices], of each token among those of the experts
  const void *ends, *inverse, *out_scale;  // written
  const void* ids;                         // Router: int32 [M, choices], written
};

// Strides from one product of a batch to the next, in elements; 0: shared by all products.
struct BatchStrides {
  int64_t a, b, out, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums;
};

// Everything that a kernel needs to launch a batch of products of one shape. One launch computes all of them. Strides in elements. A plain product
// has batch = 1 and batch_strides = 0.
struct GemmLaunch {
  int64_t M, N, K, batch;
  BatchStrides batch_strides;
  const void* a;
  const void* b;
  void* out;
  int64_t a_stride_m, a_stride_k;
  int64_t b_stride_k, b_stride_n;
  int64_t out_stride_m, out_stride_n;
  bool constant_b; // SCALED_MM_TENSOR_CONSTANT: may be read before the preceding kernel of the stream has ended

  const float* a_scale; // [M], stride 0 broadcasts one value; nullptr for an int32 out
  const float* b_scale; // [N]
  const void* bias;     // [N] or nullptr
  int64_t a_scale_stride, b_scale_stride, bias_stride;
  int32_t bias_dtype; // scaledMMDtype_t

  // Zero points in two steps: the kernel zero_point_terms writes the pairs below into the workspace, the epilogue subtracts
  //   row_terms[m].x * col_terms[n].x + col_terms[n].y * row_terms[m].y   =   za*(colsum - K*zb) + zb*rowsum
  // from the accumulator, modulo 2^32, which is exact because the true result fits.
  const void* a_zero_point;
  const void* b_zero_point;
  int64_t a_zero_point_stride, b_zero_point_stride;
  int32_t a_zero_point_dtype, b_zero_point_dtype;
  const int32_t* a_row_sums;    // sums over K that the caller provides, so that zero_point_terms does not read the operand;
  const int32_t* b_column_sums; // or nullptr
  int64_t a_row_sums_stride, b_column_sums_stride;
  int32_t* row_terms;                                     // [M][2] = {za, rowsum(a)}; nullptr when there is no zero point
  int32_t* col_terms;                                     // [N][2] = {colsum(b) - K*zb, zb}
  int32_t row_terms_batch_stride, col_terms_batch_stride; // in pairs: M and N, or 0 if all products share the terms

  void* workspace; // of the size that the Kernel's workspace function returned, aligned to 16 bytes, uninitialized; nullptr if that is 0

  int32_t device;
  int32_t multiprocessors;
  void* stream;                  // cudaStream_t
  LaunchCache* cache;            // or nullptr
  const Groups* groups;          // nullptr except for grouped products
  const int32_t* expert_offsets; // [experts] on the device: one past each expert's last row. Unchecked; kernels clamp them, see int8/grouped

  // Block-scaled products only, else 0: strides of a_scale and b_scale from one block of K to the next. a_scale_stride is from row to row, as in
  // other products; b_scale_stride is from one block of N to the next.
  int64_t a_scale_stride_k, b_scale_stride_k;
  int32_t block_size; // elements of K, and of N, in a block: 64 or 128

  const BlockOperands* blocks; // nullptr except for GGUF products

  const RowwiseOperands* rowwise; // nullptr except for row-wise operators
  RowwisePointers rowwise_pointers;

  const RopeOperands* rope; // nullptr except for the rotary position embedding
  RopePointers rope_pointers;

  const MoeOperands* moe; // nullptr except for SCALED_MM_MOE_*
  MoePointers moe_pointers;
};

// One kernel of a library. prepare and launch write a message of at most `size` bytes on failure.
struct Kernel {
  const char* row;
  int32_t out_dtype;     // scaledMMDtype_t of out; GGUF: of the weight; row-wise: of the float input, INT32 for moe_sort; -1: any (zero_point_terms)
  int32_t shared_memory; // bytes per thread block
  // Called once per device before the first launch: raises the shared-memory limit and checks that the device can run the kernel.
  scaledMMStatus_t (*prepare)(int32_t device, char* message, size_t size);
  scaledMMStatus_t (*launch)(const GemmLaunch& args, char* message, size_t size);
  // The bytes of workspace that a launch of this size needs; nullptr: none.
  int64_t (*workspace_size)(int64_t M, int64_t N, int64_t batch) = nullptr;
  // The same for grouped kernels.
  int64_t (*grouped_workspace_size)(int64_t experts, int32_t multiprocessors) = nullptr;
  // The same for GGUF kernels.
  int64_t (*block_workspace_size)(int64_t M, int64_t N, int64_t K, const BlockOperands& blocks, int32_t multiprocessors) = nullptr;
};

struct KernelLibrary {
  int32_t abi_version;
  const char* arch; // of the tile table that contains its kernel configs: "sm90"
  const Kernel* const* kernels;
  int64_t num_kernels;
  const scaledMMTable_t* const* tables; // one per kind of product in the library of an architecture; none in the library of a single kernel
  int64_t num_tables;
};

// The name of the kernel that fills row_terms and col_terms. No table lists it.
constexpr char kZeroPointTermsRow[] = "zero_point_terms";
// The names of the kernels of row-wise operators, each built for the dtypes of x. No table lists them.
constexpr const char* kRowwiseKernels[] = {"rowwise_quantize", "rowwise_norm", "rowwise_activation", "rowwise_rope", "rowwise_int8_block",
                                           "gguf_quantize",    "moe_sort",     "moe_quantize",       "moe_combine",  "topk_softmax"};
// The most elements of a row of theirs. They count past its end by less than 2^14, in 32 bits.
constexpr int32_t kMostRowElements = INT32_MAX - (1 << 14);
// The most experts of SCALED_MM_MOE_SORT, which counts them in shared memory, and of SCALED_MM_TOPK_SOFTMAX, where a warp holds their logits.
constexpr int32_t kMostExperts = 1024;
// The most choices of SCALED_MM_TOPK_SOFTMAX: each is held by a thread of a warp.
constexpr int32_t kMostChoices = 32;

} // namespace scaled_mm

// The one symbol that a kernel library exports.
extern "C" SCALED_MM_API const scaled_mm::KernelLibrary* scaled_mm_kernel_library(void);
