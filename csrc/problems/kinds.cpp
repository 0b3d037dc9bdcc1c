// The kinds of product by scaledMMProduct_t. A new kind is one file beside this one, its name in kinds.h, and an entry at the end of this list.
#include "problems/kinds.h"

#include <iterator>

namespace scaled_mm {

const ProblemKind* const kProblemKinds[] = {&kGemm,        &kGrouped,           &kBlockScaled, &kGguf,      &kGroupedBlockScaled, &kRowwiseQuantize,
                                            &kRowwiseNorm, &kRowwiseActivation, &kRope,        &kInt8Block, &kGgufQuantize,       &kMoeSort,
                                            &kMoeQuantize, &kMoeCombine,        &kTopkSoftmax};
const int32_t kNumProblemKinds = std::size(kProblemKinds);
static_assert(std::size(kProblemKinds) <= kMaxKinds, "raise kMaxKinds");

} // namespace scaled_mm
