"""The layer from the modules of `scaled_mm.nn`."""

from __future__ import annotations

import torch

import scaled_mm as sm
from scaled_mm import nn
from scaled_mm.bench.decoder.cases import Model
from scaled_mm.bench.decoder.inputs import EPSILON, Layer, Pair, Weight, attention


class DecoderLayer(torch.nn.Module):
    """A norm quantizes its result for the linear layers that read it, but not for a router.

    forward(x, residual, cos, sin) returns (output, residual), bfloat16 [T, H]."""

    def __init__(self, model: Model, weights: Layer):
        super().__init__()
        self.model = model
        self.input_norm = _norm(nn.AddRMSNorm, weights.norms[0], "token")
        self.qkv_proj, self.o_proj = _linear(weights.qkv), _linear(weights.o)
        self.head_norms = None if weights.head_norms is None else torch.nn.ModuleList(_norm(nn.RMSNorm, one, None) for one in weights.head_norms)
        self.post_norm = _norm(nn.AddRMSNorm, weights.norms[1], "token" if weights.router is None else None)
        self.mlp = nn.GatedMLP(_linear(weights.gate_up), _linear(weights.down)) if weights.router is None else Mixture(model, weights)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        model = self.model
        h, residual = self.input_norm(x, residual)
        query, key, value = self.qkv_proj(h).view(-1, model.heads + 2 * model.kv_heads, model.head).split((model.heads, *[model.kv_heads] * 2), 1)
        if self.head_norms is not None:
            query, key = self.head_norms[0](query), self.head_norms[1](key)
        query, key = sm.rope(query, key, cos, sin)
        h, residual = self.post_norm(self.o_proj(attention(query, key, value)), residual)
        return self.mlp(h), residual


class Mixture(torch.nn.Module):
    """A router whose product is in bfloat16, and `Int8Experts`."""

    def __init__(self, model: Model, weights: Layer):
        super().__init__()
        self.router = nn.SoftmaxRouter(model.hidden, model.experts, model.choices, device="meta")
        self.router.weight = torch.nn.Parameter(weights.router, requires_grad=False)
        self.experts = nn.Int8Experts(model.experts, model.hidden, model.inner, device="meta")
        for name, weight in (("gate_up_proj", weights.gate_up), ("down_proj", weights.down)):
            setattr(self.experts, name, torch.nn.Parameter(weight.q, requires_grad=False))
            setattr(self.experts, f"{name}_scale", torch.nn.Parameter(weight.scale, requires_grad=False))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        _, factors, ids = self.router(h)
        return self.experts(h, ids, factors)


def _linear(weight: Weight) -> nn.Int8Linear:
    return nn.Int8Linear.from_tensors(weight.q, weight.scale)


def _norm(kind: type[nn.RMSNorm], weight: torch.Tensor, quantize: str | None) -> nn.RMSNorm:
    made = kind(weight.shape[0], EPSILON, quantize=quantize, device="meta")
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return made
