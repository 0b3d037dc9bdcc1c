// int8_linear: a row-wise quantizer and a product in one call, with what lies between them in one allocation.
#pragma once

#include "python/operands.h"

namespace {

// The operands of both, read from Python's: x, weight, weight_scale, bias, smooth_scale, input_scale, input_zero_point, column_sums.
class Linear {
public:
  static constexpr Py_ssize_t kArguments = 8;

  Operands quantizer, product;
  DLTensor x; // as given, of any number of dimensions

  // transposed: the weight is [N, K]. constant: it does not change. folds: dimensions of x before the last are folded, and static parameters may
  // have any number of dimensions.
  Answer read(PyObject* const* args, int32_t device, bool constant, bool transposed, bool folds) {
    enum { kX, kWeight, kWeightScale, kBias, kSmooth, kScale, kZeroPoint, kSums };
    quantizer.product = SCALED_MM_ROWWISE_QUANTIZE;
    quantizer.count = 9; // out, x, factor, offset, scale, zero_point, out_scale, out_zero_point, out_row_sums
    product.product = SCALED_MM_GEMM;
    product.count = 10; // out, a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_row_sums, b_column_sums
    for (int32_t i : {0, 3, 7, 8}) absent(&quantizer, i);
    for (int32_t i : {0, 7, 8}) absent(&product, i);
    const struct {
      Operands* of;
      int32_t index, argument;
      Fold fold;
    } given[] = {{&quantizer, 1, kX, Fold::kMatrix},       {&quantizer, 2, kSmooth, Fold::kNone}, {&quantizer, 4, kScale, Fold::kRows},
                 {&quantizer, 5, kZeroPoint, Fold::kRows}, {&product, 2, kWeight, Fold::kNone},   {&product, 3, kScale, Fold::kRows},
                 {&product, 4, kWeightScale, Fold::kNone}, {&product, 5, kBias, Fold::kNone},     {&product, 6, kZeroPoint, Fold::kRows},
                 {&product, 9, kSums, Fold::kNone}};
    for (const auto& one : given) {
      if (Answer answer =
              read_operand(one.index, args[one.argument], device, folds ? one.fold : Fold::kNone, one.of, one.argument == kX ? &x : nullptr);
          answer != Answer::kFine) {
        return answer;
      }
    }
    constexpr int32_t kMostDims = 8;
    if (quantizer.present[1] == nullptr || product.present[2] == nullptr || quantizer.descs[1].ndim != 2 || product.descs[2].ndim != 2) {
      return Answer::kNotMine;
    }
    if (x.ndim > kMostDims) return Answer::kNotMine;
    for (int32_t i : {4, 5}) { // static: one value
      if (folds && quantizer.present[i] != nullptr && quantizer.descs[i].shape[0] != 1) return Answer::kNotMine;
    }
    scaledMMTensorDesc_t& weight = product.descs[2];
    if (transposed) {
      for (int64_t* pair : {weight.shape, weight.strides}) {
        const int64_t first = pair[0];
        pair[0] = pair[1];
        pair[1] = first;
      }
    }
    if (constant) weight.flags = SCALED_MM_TENSOR_CONSTANT;
    return rows() > 0 && k() > 0 && n() > 0 && weight.shape[0] == k() ? Answer::kFine : Answer::kNotMine;
  }

  int64_t rows() const { return quantizer.descs[1].shape[0]; }
  int64_t k() const { return quantizer.descs[1].shape[1]; }
  int64_t n() const { return product.descs[2].shape[1]; }
  bool is_static() const { return quantizer.present[4] != nullptr; }

  // Bytes of what the quantizer writes, up to what follows it: q, and the scales of the rows.
  size_t bytes() const { return q_bytes() + (is_static() ? 0 : whole(size_t(rows()) * sizeof(float))); }

  void place(void* memory) {
    describe(SCALED_MM_DTYPE_INT8, rows(), k(), memory, &quantizer, 0);
    describe(SCALED_MM_DTYPE_INT8, rows(), k(), memory, &product, 1);
    if (is_static()) return absent(&quantizer, 6);
    void* const scales = static_cast<char*>(memory) + q_bytes();
    describe(SCALED_MM_DTYPE_FLOAT32, rows(), 0, scales, &quantizer, 6);
    describe(SCALED_MM_DTYPE_FLOAT32, rows(), 0, scales, &product, 3);
  }

  // Whether memory of so many bytes is apart from every operand of the product that Python gave.
  bool is_apart(const void* memory, size_t size) const {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory), end = begin + size;
    for (int32_t i = 0; i < product.count; ++i) {
      if (product.present[i] == nullptr || i == 1 || (i == 3 && !is_static())) continue;
      const Extent of = extent(product, i);
      if (begin < of.end && of.begin < end) return false;
    }
    return true;
  }
  // Whether out does not alias smooth_scale. The core compares out with the product's operands alone.
  bool out_is_apart() const {
    if (quantizer.present[2] == nullptr) return true;
    const Extent out = extent(product, 0), factor = extent(quantizer, 2);
    return out.end <= factor.begin || factor.end <= out.begin;
  }

  int32_t output_mode() const { return is_static() ? SCALED_MM_ROWWISE_STATIC : SCALED_MM_ROWWISE_TOKEN; }

private:
  struct Extent {
    uintptr_t begin, end;
  };
  static Extent extent(const Operands& o, int32_t i) {
    const scaledMMTensorDesc_t& desc = o.descs[i];
    int64_t last = 0;
    for (int32_t d = 0; d < desc.ndim; ++d) last += (desc.shape[d] > 0 ? desc.shape[d] - 1 : 0) * desc.strides[d];
    const int64_t element = desc.dtype == SCALED_MM_DTYPE_INT8                                             ? 1
                            : desc.dtype == SCALED_MM_DTYPE_FLOAT32 || desc.dtype == SCALED_MM_DTYPE_INT32 ? 4
                                                                                                           : 2;
    const uintptr_t first = reinterpret_cast<uintptr_t>(o.data[i]);
    return {first, first + uintptr_t((last + 1) * element)};
  }

  static size_t whole(size_t bytes) { return (bytes + 15) / 16 * 16; }
  size_t q_bytes() const { return whole(size_t(rows()) * size_t(k())); }

  static void absent(Operands* o, int32_t i) {
    o->present[i] = nullptr;
    o->data[i] = nullptr;
  }
  // A contiguous matrix, or a vector if columns is 0.
  static void describe(int32_t dtype, int64_t rows, int64_t columns, void* data, Operands* o, int32_t i) {
    scaledMMTensorDesc_t& desc = o->descs[i];
    desc.dtype = dtype;
    desc.ndim = columns ? 2 : 1;
    desc.shape[0] = rows;
    desc.shape[1] = columns;
    desc.strides[0] = columns ? columns : 1;
    desc.strides[1] = 1;
    desc.alignment = 16;
    desc.flags = 0;
    o->present[i] = &desc;
    o->data[i] = data;
  }
};

} // namespace
