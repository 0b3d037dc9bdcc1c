"""Row-wise operators, what stands between two products: quantizers, norms, activations and rotary embedding."""

from scaled_mm.rowwise.activation import gelu_and_mul, silu_and_mul
from scaled_mm.rowwise.descriptor import RowwiseDescriptor, create_rowwise_descriptor
from scaled_mm.rowwise.int8 import AsymmetricInt8, dynamic_quant, quantize_int8
from scaled_mm.rowwise.int8_block import quantize_int8_block
from scaled_mm.rowwise.moe import ExpertOrder, moe_sort
from scaled_mm.rowwise.norm import add_rms_norm, rms_norm
from scaled_mm.rowwise.outputs import Quantized
from scaled_mm.rowwise.rope import rope
from scaled_mm.rowwise.router import topk_softmax
from scaled_mm.rowwise.static import quantize

__all__ = [
    "AsymmetricInt8",
    "ExpertOrder",
    "Quantized",
    "RowwiseDescriptor",
    "add_rms_norm",
    "create_rowwise_descriptor",
    "dynamic_quant",
    "gelu_and_mul",
    "moe_sort",
    "quantize",
    "quantize_int8",
    "quantize_int8_block",
    "rms_norm",
    "rope",
    "silu_and_mul",
    "topk_softmax",
]
