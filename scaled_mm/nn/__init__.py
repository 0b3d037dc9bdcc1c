"""Modules over the operators."""

from scaled_mm.nn import functional
from scaled_mm.nn.block_linear import BlockLinear
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear
from scaled_mm.nn.mlp import GatedMLP
from scaled_mm.nn.norm import AddRMSNorm, RMSNorm
from scaled_mm.nn.quantized import QuantizedActivation
from scaled_mm.nn.router import SoftmaxRouter

__all__ = ["AddRMSNorm", "BlockLinear", "GatedMLP", "Int8Experts", "Int8Linear", "QuantizedActivation", "RMSNorm", "SoftmaxRouter", "functional"]
