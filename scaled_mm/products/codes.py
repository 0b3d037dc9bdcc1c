"""scaledMMProduct_t, and scaledMMTableKind_t: the kinds of product, in the order of csrc/problems/kinds.cpp."""

GEMM, GROUPED_GEMM, BLOCK_SCALED_GEMM, GGUF_GEMM = range(4)
