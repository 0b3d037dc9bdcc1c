// The kinds of product there are.
#pragma once

#include "core/problem.h"

namespace scaled_mm {

extern const ProblemKind kGemm, kGrouped, kBlockScaled, kGguf;

} // namespace scaled_mm
