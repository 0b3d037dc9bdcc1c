"""Layers over the operators: from float activations to float outputs."""

from scaled_mm.layers.experts import fused_experts
from scaled_mm.layers.experts_descriptor import FusedExpertsDescriptor, create_fused_experts_descriptor
from scaled_mm.layers.linear import int8_linear
from scaled_mm.layers.linear_descriptor import LinearDescriptor, create_linear_descriptor

__all__ = [
    "FusedExpertsDescriptor",
    "LinearDescriptor",
    "create_fused_experts_descriptor",
    "create_linear_descriptor",
    "fused_experts",
    "int8_linear",
]
