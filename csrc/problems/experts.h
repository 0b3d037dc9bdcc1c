// What the kinds of product over experts share: the validation of b [E, K, N], of the bias and of expert_offsets; sizes for the choice of a kernel.
#pragma once

#include <algorithm>

#include "problems/gemm.h"

namespace scaled_mm {

// A tensor without its first dimension.
inline scaledMMTensorDesc_t of_one_expert(const scaledMMTensorDesc_t& t) {
  scaledMMTensorDesc_t one = {t.dtype, t.ndim - 1, {}, {}, t.alignment, t.flags};
  for (int i = 1; i < t.ndim; ++i) {
    one.shape[i - 1] = t.shape[i];
    one.strides[i - 1] = t.strides[i];
  }
  return one;
}

// M is the number of tokens. Some of them may belong to no expert.
class ExpertsProblem : public Problem {
public:
  // In their tables, m bounds the average number of tokens per expert.
  BucketKey bucket() const override { return {per_expert(groups_.experts), info.N, info.K, 0}; }
  // For the predicted time: at most as many experts have tokens as there are rows. (A bucket's m counts all experts.)
  ProductSize size() const override {
    const int64_t active = std::min(groups_.experts, rows());
    return {per_expert(active), info.N, info.K, active, false, true};
  }
  const char* misfit(const RowNeeds& needs) const override;

protected:
  // Reads the option: the expected rows of experts or 0 (all), and SCALED_MM_UNASSIGNED_ROWS_ANY.
  scaledMMStatus_t read_option(const Options& options);
  // a [tokens, K], b [E, K, N] and expert_offsets [E].
  scaledMMStatus_t check_experts(const scaledMMTensorDesc_t* a, const scaledMMTensorDesc_t* b, const scaledMMTensorDesc_t* expert_offsets);
  // bias [E, N], in the dtype of out or float32.
  scaledMMStatus_t check_expert_bias(const scaledMMTensorDesc_t& bias, int32_t out_dtype, int64_t N);
  // After the validation of one expert's product, which filled in info.
  void finish();

  Groups groups_{};

private:
  int64_t rows() const { return expected_rows_ > 0 ? std::min(expected_rows_, info.M) : info.M; }
  int64_t per_expert(int64_t experts) const { return experts > 0 ? (rows() + experts - 1) / experts : rows(); }

  int64_t expected_rows_ = 0;
};

} // namespace scaled_mm
