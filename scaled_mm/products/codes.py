"""The kinds of product as scaledMMProduct_t numbers them. 5 to 13 are the row-wise operators: `scaled_mm.rowwise.kernels.Kind`."""

GEMM = 0
GROUPED_GEMM = 1
BLOCK_SCALED_GEMM = 2
GGUF_GEMM = 3
GROUPED_BLOCK_SCALED_GEMM = 4
