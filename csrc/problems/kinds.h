// The kinds of product.
#pragma once

#include "core/problem.h"

namespace scaled_mm {

extern const ProblemKind kGemm, kGrouped, kBlockScaled, kGguf, kGroupedBlockScaled, kRowwiseQuantize, kRowwiseNorm, kRowwiseActivation;
extern const ProblemKind kRope, kInt8Block, kGgufQuantize, kMoeSort, kMoeQuantize, kMoeCombine, kTopkSoftmax;

} // namespace scaled_mm
