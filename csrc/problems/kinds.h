// The kinds of product.
#pragma once

#include "core/problem.h"

namespace scaled_mm {

extern const ProblemKind kGemm, kGrouped, kBlockScaled, kGguf;

} // namespace scaled_mm
