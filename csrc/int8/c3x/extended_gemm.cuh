// gemm.cuh for tiles whose width CUTLASS has among its further wgmma shapes only. They take seconds to parse, so other kernels do without.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "int8/c3x/gemm.cuh"
