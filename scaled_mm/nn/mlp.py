"""`GatedMLP`: a gated feed-forward network whose activation is quantized in the kernel that computes it."""

from __future__ import annotations

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.nn.linear import Int8Linear
from scaled_mm.nn.quantized import QuantizedActivation
from scaled_mm.rowwise.activation import gelu_and_mul, silu_and_mul


class GatedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)) with int8 layers. gate_up: `Int8Linear` [2 I, H], the gate's rows first. down: `Int8Linear` [H, I], symmetric.

    activation: "silu", "gelu" or "gelu_tanh". forward(x): x float [..., H] or a `QuantizedActivation`; [..., H] in x's dtype.
    """

    def __init__(self, gate_up: Int8Linear, down: Int8Linear, activation: str = "silu"):
        super().__init__()
        if activation not in ("silu", "gelu", "gelu_tanh"):
            raise BadParamError(f"activation: expected 'silu', 'gelu' or 'gelu_tanh', got {activation!r}")
        for name, layer in ("gate_up", gate_up), ("down", down):
            if not isinstance(layer, Int8Linear):
                raise BadParamError(f"{name}: expected an Int8Linear, got a {type(layer).__name__}")
        if down.input_zero_point is not None or not down.symmetric:
            raise BadParamError("down: expected a layer with symmetric inputs, got an asymmetric one")
        if gate_up.out_features != 2 * down.in_features:
            raise BadParamError(f"gate_up: expected {2 * down.in_features} rows for down's {down.in_features} inputs, got {gate_up.out_features}")
        self.gate_up_proj, self.down_proj, self.activation = gate_up, down, activation

    def forward(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        h = self.gate_up_proj(x)
        quantize = "token" if self.down_proj.input_scale is None else self.down_proj.input_scale
        if self.activation == "silu":
            q, scale = silu_and_mul(h, quantize=quantize)
        else:
            q, scale = gelu_and_mul(h, approximate="tanh" if self.activation == "gelu_tanh" else "none", quantize=quantize)
        return self.down_proj(QuantizedActivation(q, scale, h.dtype))

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
