// The gguf_wgmma family with tiles whose wgmma instruction CUTLASS declares in a further header, of 56,000 lines.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "gguf/wgmma.cuh"
