"""Layers over the operators: from float activations to float outputs."""

from scaled_mm.layers.experts import fused_experts
from scaled_mm.layers.linear import int8_linear
from scaled_mm.layers.linear_descriptor import LinearDescriptor, create_linear_descriptor

__all__ = ["LinearDescriptor", "create_linear_descriptor", "fused_experts", "int8_linear"]
