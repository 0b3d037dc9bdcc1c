"""Quantizers: from floating-point tensors to the integer operands and scales of the products."""

from scaled_mm.quantize.int8 import AsymmetricInt8, quantize_int8
from scaled_mm.quantize.int8_block import quantize_int8_block

__all__ = ["AsymmetricInt8", "quantize_int8", "quantize_int8_block"]
