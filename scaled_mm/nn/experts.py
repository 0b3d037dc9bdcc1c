"""`Int8Experts`: the experts of a mixture with int8 weights."""

from __future__ import annotations

import torch

from scaled_mm.layers.experts import fused_experts
from scaled_mm.nn.weights import Float32Scales


class Int8Experts(Float32Scales):
    """The gated feed-forward networks of a mixture of experts, in place of the experts of transformers' models. Inputs are quantized dynamically.

    gate_up_proj: int8 [E, 2 I, H], the gate's rows first. down_proj: int8 [E, H, I]. gate_up_proj_scale, down_proj_scale: float32 [E, 2 I, 1], [E,
    H, 1].

    forward(hidden_states, top_k_index, top_k_weights): float [tokens, H], int [tokens, choices] and float [tokens, choices], as a router returns
    them. Returns [tokens, H] in the input's dtype, bit-identical to `fused_experts`. No gradient.
    """

    is_shard = False  # whether the module has a rank's part of the experts: scaled_mm.parallel
    scales = ("gate_up_proj_scale", "down_proj_scale")
    weights = ("gate_up_proj", "down_proj")

    def __init__(self, num_experts: int, hidden_dim: int, intermediate_dim: int, *, activation: str = "silu", device=None):
        """Memory for the tensors, uninitialized. activation: "silu", "gelu" or "gelu_tanh"."""
        super().__init__()
        self.num_experts, self.hidden_dim, self.intermediate_dim, self.activation = num_experts, hidden_dim, intermediate_dim, activation

        def tensor(*shape: int, of: torch.dtype) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, dtype=of, device=device), requires_grad=False)

        self.gate_up_proj = tensor(num_experts, 2 * intermediate_dim, hidden_dim, of=torch.int8)
        self.gate_up_proj_scale = tensor(num_experts, 2 * intermediate_dim, 1, of=torch.float32)
        self.down_proj = tensor(num_experts, hidden_dim, intermediate_dim, of=torch.int8)
        self.down_proj_scale = tensor(num_experts, hidden_dim, 1, of=torch.float32)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        weights = self.gate_up_proj, self.gate_up_proj_scale, self.down_proj, self.down_proj_scale
        return fused_experts(hidden_states, *weights, top_k_weights, top_k_index, activation=self.activation)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, hidden_dim={self.hidden_dim}, intermediate_dim={self.intermediate_dim}, activation={self.activation}"
