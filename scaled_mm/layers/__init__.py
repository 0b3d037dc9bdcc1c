"""Layers over the operators: from float activations to float outputs."""

from scaled_mm.layers.linear import int8_linear

__all__ = ["int8_linear"]
