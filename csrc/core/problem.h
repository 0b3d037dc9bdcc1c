// What the life cycle of a descriptor (core/descriptor.cpp) asks of a kind of product. One file a kind: csrc/problems.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <new>

#include "core/kernel_abi.h"
#include "core/registry.h"

namespace scaled_mm {

constexpr int kMaxOperands = SCALED_MM_MAX_OPERANDS;

// Which of a kernel row's alignments an operand has to have.
enum class Role { kOut, kA, kB, kOther };

struct OperandSpec {
  const char* name;
  size_t pointer; // where GemmLaunch has its data pointer
  Role role = Role::kOther;
};

// A validated product as a launch has it, without pointers; sizes after a batch was folded.
struct ProductInfo : GemmLaunch {
  int32_t out_dtype;
  bool has_scales, has_bias, has_a_zero_point, has_b_zero_point, has_a_row_sums, has_b_column_sums;
  int64_t a_alignment, b_alignment, out_alignment; // bytes, of the data pointers

  bool empty() const { return M == 0 || N == 0 || batch == 0; }
};

// What the buckets of a table are asked for. serves: flags of buckets (SCALED_MM_BUCKET_*) that the product answers.
struct BucketKey {
  int64_t M, N, K;
  int32_t serves;
};

// Why a row with these needs cannot take the product; nullptr when it can.
const char* misfit(const ProductInfo& info, const RowNeeds& needs);

// Refuses the option of a kind that has none.
scaledMMStatus_t check_no_option(int32_t option);
// Refuses sizes (elements) whose workspace a row could not compute in 64 bits.
scaledMMStatus_t check_workspace_room(const char* row, std::initializer_list<int64_t> sizes);

class Problem {
public:
  virtual ~Problem() = default;

  // Checks the operands, in the order of the kind (nullptr: absent), and fills in what stands below. option: of the create function.
  virtual scaledMMStatus_t validate(const scaledMMTensorDesc_t* const* tensors, int32_t option) = 0;
  // What the device's table decides; before `bucket` is asked.
  virtual void settle(const Table&) {}
  virtual BucketKey bucket() const = 0;
  virtual const char* misfit(const RowNeeds& needs) const { return scaled_mm::misfit(info, needs); }
  // Bytes that the kernel asks for.
  virtual scaledMMStatus_t workspace(const Kernel&, size_t* bytes) const {
    *bytes = 0;
    return SCALED_MM_STATUS_SUCCESS;
  }
  // How operands are multiplied, where a kind has several ways: part of why a bucket was chosen.
  virtual const char* mode() const { return ""; }

  ProductInfo info{};
  int32_t variant = 0; // which kernel of a row: scaledMMDtype_t of out, or of a GGUF weight its format
  // Of zero points: bytes at the start of the workspace, and where those of columns begin, in int32s.
  size_t terms_bytes = 0;
  int64_t column_terms_offset = 0;
};

// What a kind's tile table may say.
struct TableRules {
  const char* noun;         // in messages: "", " of grouped products"
  int32_t bucket_flags;     // SCALED_MM_BUCKET_*
  const char* flags_text;   // what is expected of them
  const char* open_operand; // which the last bucket takes any of
  bool has_modes;
};

// A kind of product: one entry of kProblemKinds (problems/kinds.cpp).
struct ProblemKind {
  const char* name;  // in messages: "GEMM", "grouped GEMM"
  const char* label; // before "row" and "bucket": "", "grouped "
  int32_t num_operands;
  const OperandSpec* operands;
  bool keeps_launches;            // its rows may use a LaunchCache
  Problem* (*make)(void* memory); // in kProblemBytes of memory
  TableRules table;
};

constexpr size_t kProblemBytes = 768;

extern const ProblemKind* const kProblemKinds[]; // by scaledMMProduct_t
extern const int32_t kNumProblemKinds;

template <class T>
Problem* make_problem(void* memory) {
  static_assert(sizeof(T) <= kProblemBytes && alignof(T) <= alignof(std::max_align_t), "raise kProblemBytes");
  return new (memory) T;
}

} // namespace scaled_mm
