"""The kinds of product as scaledMMProduct_t and scaledMMTableKind_t number them, in the order of csrc/problems/kinds.cpp."""

GEMM, GROUPED_GEMM, BLOCK_SCALED_GEMM, GGUF_GEMM, GROUPED_BLOCK_SCALED_GEMM = range(5)
