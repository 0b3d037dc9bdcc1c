"""llama.cpp's GGUF formats: quantizers, dequantizers, products and GGUF files (docs/design/gguf-formats.md)."""

from scaled_mm.gguf import by_format
from scaled_mm.gguf.by_format import *  # noqa: F403  (its __all__, which is part of ours)
from scaled_mm.gguf.convert import convert_k_quant
from scaled_mm.gguf.dequantize import dequantize_block
from scaled_mm.gguf.gguf_file import QuantizedTensor, load_gguf
from scaled_mm.gguf.linear import block_linear
from scaled_mm.gguf.pack import PackedBlockWeight, pack_block_weight
from scaled_mm.gguf.quantize import quantize_block

__all__ = [
    "PackedBlockWeight",
    "QuantizedTensor",
    "block_linear",
    "convert_k_quant",
    "dequantize_block",
    "load_gguf",
    "pack_block_weight",
    "quantize_block",
]
__all__ += by_format.__all__
