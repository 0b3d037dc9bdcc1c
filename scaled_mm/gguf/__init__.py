"""llama.cpp's GGUF formats: quantizers, dequantizers, products and GGUF files (docs/design/gguf-formats.md)."""

from scaled_mm.gguf.dequantize import (
    dequantize_block,
    dequantize_q4_0,
    dequantize_q4_1,
    dequantize_q5_0,
    dequantize_q5_1,
    dequantize_q8_0,
    dequantize_q8_1,
)
from scaled_mm.gguf.descriptor import BlockDescriptor, create_block_descriptor
from scaled_mm.gguf.gemm import (
    gemm_q4_0,
    gemm_q4_0_q8_1,
    gemm_q4_1,
    gemm_q4_1_q8_1,
    gemm_q5_0,
    gemm_q5_0_q8_1,
    gemm_q5_1,
    gemm_q5_1_q8_1,
    gemm_q8_0,
    gemm_q8_0_q8_1,
)
from scaled_mm.gguf.gguf_file import QuantizedTensor, load_gguf
from scaled_mm.gguf.linear import block_linear
from scaled_mm.gguf.pack import PackedBlockWeight, pack_block_weight
from scaled_mm.gguf.quantize import (
    quantize_block,
    quantize_q4_0,
    quantize_q4_1,
    quantize_q5_0,
    quantize_q5_1,
    quantize_q8_0,
    quantize_q8_1,
)

__all__ = [
    "BlockDescriptor",
    "PackedBlockWeight",
    "QuantizedTensor",
    "block_linear",
    "create_block_descriptor",
    "dequantize_block",
    "dequantize_q4_0",
    "dequantize_q4_1",
    "dequantize_q5_0",
    "dequantize_q5_1",
    "dequantize_q8_0",
    "dequantize_q8_1",
    "gemm_q4_0",
    "gemm_q4_0_q8_1",
    "gemm_q4_1",
    "gemm_q4_1_q8_1",
    "gemm_q5_0",
    "gemm_q5_0_q8_1",
    "gemm_q5_1",
    "gemm_q5_1_q8_1",
    "gemm_q8_0",
    "gemm_q8_0_q8_1",
    "load_gguf",
    "pack_block_weight",
    "quantize_block",
    "quantize_q4_0",
    "quantize_q4_1",
    "quantize_q5_0",
    "quantize_q5_1",
    "quantize_q8_0",
    "quantize_q8_1",
]
