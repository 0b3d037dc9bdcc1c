"""The int8 layers that take the places of float ones."""

from __future__ import annotations

import torch

from scaled_mm.models.blocks import activation_of
from scaled_mm.models.search import Static
from scaled_mm.models.weights import quantize_weight
from scaled_mm.nn.experts import Int8Experts
from scaled_mm.nn.linear import Int8Linear


def int8_linear_of(linear: torch.nn.Linear, static: Static | None, symmetric: bool) -> Int8Linear:
    """The int8 layer of a float layer. static: the scale of its inputs, or None."""
    weight, scale = quantize_weight(linear.weight.detach(), linear.weight.dtype)
    device = weight.device
    input_scale = None if static is None else torch.tensor([static.scale], dtype=torch.float32, device=device)
    zero = None if static is None or static.zero_point is None else torch.tensor([static.zero_point], dtype=torch.int8, device=device)
    return Int8Linear.from_tensors(weight, scale, linear.bias, input_scale, zero, symmetric=symmetric)


def int8_experts(experts: torch.nn.Module) -> Int8Experts:
    """The int8 experts of float experts in transformers' form."""
    count, hidden, inner = experts.down_proj.shape
    made = Int8Experts(count, hidden, inner, activation=activation_of(experts), device=experts.down_proj.device)
    for name in ("gate_up_proj", "down_proj"):
        weights, q, scale = getattr(experts, name).detach(), getattr(made, name), getattr(made, f"{name}_scale")
        for expert, weight in enumerate(weights):  # one at a time: the float32 copies of all would be four times their size
            q[expert], scale[expert] = quantize_weight(weight, weight.dtype)
    return made
