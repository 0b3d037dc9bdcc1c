// The interface between the life cycle of a descriptor (core/descriptor.cpp) and a kind of product. Each kind is one file in csrc/problems.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <new>

#include "core/kernel_abi.h"
#include "core/registry.h"
#include "core/time_model.h"

namespace scaled_mm {

constexpr int kMaxOperands = SCALED_MM_MAX_OPERANDS;

// Which alignment of a kernel config an operand must have. kWritten: an output besides out.
enum class Role { kOut, kA, kB, kOther, kWritten };

struct OperandSpec {
  const char* name;
  size_t pointer; // offset of its data pointer in GemmLaunch
  Role role = Role::kOther;
  uint32_t may_be = 0; // of kWritten: a bit for each operand that it may be, by its index; it is apart from every other
};

// A validated product: a launch without pointers. Sizes are those after folding a batch (gemm.cpp).
struct ProductInfo : GemmLaunch {
  int32_t out_dtype;
  bool has_scales, has_bias, has_a_zero_point, has_b_zero_point, has_a_row_sums, has_b_column_sums;
  int64_t a_alignment, b_alignment, out_alignment; // bytes, of the data pointers

  bool empty() const { return M == 0 || N == 0 || batch == 0; }
};

// The key for the bucket lookup. serves: the bucket flags (SCALED_MM_BUCKET_*) whose condition the product meets.
struct BucketKey {
  int64_t M, N, K;
  int32_t serves;
};

// Why a kernel config with these needs cannot take the product; nullptr if it can.
const char* misfit(const ProductInfo& info, const RowNeeds& needs);

// What a create function says besides the operands.
struct Options {
  int32_t option = 0; // the mode of a GGUF product, the scaledMMRowwise_t of a row-wise operator
  int32_t output = 0; // scaledMMRowwiseOutput_t
  double epsilon = 0;
};

// Refuses an option, for kinds that have none.
scaledMMStatus_t check_no_option(const Options& options);
// Refuses sizes (elements) for which a kernel could not compute its workspace in 64 bits. row: the kernel config's name.
scaledMMStatus_t check_workspace_room(const char* row, std::initializer_list<int64_t> sizes);

class Problem {
public:
  virtual ~Problem() = default;

  // Checks the operands, in the order of the kind (nullptr: absent), and fills in the fields below.
  virtual scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* tensors, const Options& options) = 0;
  // The kernel of a kind that has no table, and its slot; nullptr: a table names the kernel.
  virtual const char* own_kernel() const { return nullptr; }
  virtual KernelSlot* own_slot(Arch*) const { return nullptr; }
  // Settles what depends on the device's table. Called before `bucket`.
  virtual void settle(const Table&) {}
  virtual BucketKey bucket() const = 0;
  // For the predicted time.
  virtual ProductSize size() const { return {info.M, info.N, info.K, info.batch, info.constant_b, false}; }
  virtual const char* misfit(const RowNeeds& needs) const { return scaled_mm::misfit(info, needs); }
  // The bytes of workspace that the kernel needs.
  virtual scaledMMStatus_t workspace(const Kernel&, size_t* bytes) const {
    *bytes = 0;
    return SCALED_MM_STATUS_SUCCESS;
  }
  // Whether nothing is to be written.
  virtual bool empty() const { return info.empty(); }
  // The bytes of workspace that a plan announces for a kernel that is not loaded yet, given that kernel's time model, so that its workspace is
  // large enough for it. 0: unknown.
  virtual size_t workspace_in_advance(const scaledMMTimeModel_t&) const { return 0; }
  // The mode, for kinds that have several: part of the reason in scaledMMKernelChoice_t.
  virtual const char* mode() const { return ""; }

  ProductInfo info{};
  int32_t variant = 0; // selects one of the kernels of a config or operator: see Kernel::out_dtype
  // Zero-point terms: their bytes at the start of the workspace, and the offset of the column terms, in int32s.
  size_t terms_bytes = 0;
  int64_t column_terms_offset = 0;
};

// What a kind's section of the tile table may contain.
struct TableRules {
  int32_t number;           // scaledMMTableKind_t
  const char* noun;         // in messages: "", " of grouped products"
  int32_t bucket_flags;     // SCALED_MM_BUCKET_*
  const char* flags_text;   // in messages: the flags that are expected
  const char* open_operand; // in messages: what else the last bucket must not restrict
  bool has_modes;
};

// A kind of product: one entry of kProblemKinds (problems/kinds.cpp).
struct ProblemKind {
  const char* name;  // in messages: "GEMM", "grouped GEMM"
  const char* label; // before "row" and "bucket": "", "grouped "
  int32_t num_operands;
  const OperandSpec* operands;
  bool keeps_launches;            // its kernels may use a LaunchCache
  Problem* (*make)(void* memory); // in kProblemBytes of memory
  TableRules table;               // noun is nullptr: the kind has no table
};

constexpr size_t kProblemBytes = 864;

extern const ProblemKind* const kProblemKinds[]; // by scaledMMProduct_t
extern const int32_t kNumProblemKinds;

// The scaledMMProduct_t of the kind whose tables have this scaledMMTableKind_t; -1 if there is none.
int32_t product_of_table(int32_t number);

template <class T>
Problem* make_problem(void* memory) {
  static_assert(sizeof(T) <= kProblemBytes && alignof(T) <= alignof(std::max_align_t), "raise kProblemBytes");
  return new (memory) T;
}

} // namespace scaled_mm
