// gemm.cuh with CUTLASS's extended wgmma widths. They take seconds to parse, so only kernels that need them include this file.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "int8/c3x/gemm.cuh"
