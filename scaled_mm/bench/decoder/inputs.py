"""The operands of decoder layers: random int8 weights of several layers, which rotate, and one activation with its residual."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional

from scaled_mm.bench.decoder.cases import DecoderCase, Model
from scaled_mm.bench.int8.inputs import INT8_STD, OUT_DTYPE, UNIFORM
from scaled_mm.bench.kept import KeptOutputs
from scaled_mm.bench.path.inputs import activations
from scaled_mm.measure.device import last_level_cache_bytes
from scaled_mm.measure.rotation import RotatedWeights, memory_limit, rotation

EPSILON, ROPE_BASE = 1e-6, 10000.0
BYTES = 3  # of memory for each element of a weight: int8 and its copy in bfloat16
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Weight:
    """int8 [N, K] and float32 [N, 1]; of experts [E, N, K] and [E, N, 1]."""

    q: torch.Tensor
    scale: torch.Tensor

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantized one expert at a time: float32 copies of all of them would take four times the memory of the int8 weights."""
        if self.q.dim() == 2:
            return (self.q.float() * self.scale).to(dtype)
        return torch.stack([(q.float() * scale).to(dtype) for q, scale in zip(self.q, self.scale, strict=True)])


@dataclass(frozen=True)
class Layer:
    """The weights of one layer. gate_up: the gate's rows first. norms: bfloat16 [H] before attention and before the feed-forward network.

    head_norms: bfloat16 [head] of query and key; router: bfloat16 [E, H]; None in a dense layer.
    """

    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    norms: Pair
    head_norms: Pair | None
    router: torch.Tensor | None


class DecoderWeights(RotatedWeights):
    """R layers of a model, so many that what one token reads of them exceeds the cache."""

    def __init__(self, model: Model, device: torch.device, generator: torch.Generator, sets: int | None):
        limit = memory_limit(device)
        wanted = sets or min(rotation(model.read, last_level_cache_bytes(device), limit), max(1, limit // (BYTES * model.stored)))
        super().__init__(model.read, limit, device, wanted)
        self.model = model
        self.layers = [self._layer(generator) for _ in range(self.sets)]

    @cached_property
    def bf16(self) -> list[dict[str, torch.Tensor]]:
        """The dequantized weights of each layer, by the names of `Layer`."""
        return [dequantized(layer, torch.bfloat16) for layer in self.layers]

    def _layer(self, generator: torch.Generator) -> Layer:
        m, mixture = self.model, self.model.experts > 0
        experts = (m.experts,) if mixture else ()
        normal = {"device": self.device, "generator": generator}
        return Layer(
            self._weight((m.of_qkv, m.hidden), generator),
            self._weight((m.hidden, m.of_query), generator),
            self._weight((*experts, 2 * m.inner, m.hidden), generator),
            self._weight((*experts, m.hidden, m.inner), generator),
            tuple((1 + 0.1 * torch.randn(m.hidden, **normal)).to(OUT_DTYPE) for _ in range(2)),
            tuple((1 + 0.1 * torch.randn(m.head, **normal)).to(OUT_DTYPE) for _ in range(2)) if mixture else None,
            (torch.randn(m.experts, m.hidden, **normal) / math.sqrt(m.hidden)).to(OUT_DTYPE) if mixture else None,
        )

    def _weight(self, shape: tuple[int, ...], generator: torch.Generator) -> Weight:
        q = torch.randint(-128, 128, shape, dtype=torch.int8, device=self.device, generator=generator)
        scale = (torch.rand(*shape[:-1], 1, device=self.device, generator=generator) + 0.5) / (INT8_STD[UNIFORM] * math.sqrt(shape[-1]))
        return Weight(q, scale)


def dequantized(layer: Layer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The arguments of `plain.layer` after the activations."""
    found = {name: getattr(layer, name).to(dtype) for name in ("qkv", "o", "gate_up", "down")}
    found |= {"input_norm": layer.norms[0].to(dtype), "post_norm": layer.norms[1].to(dtype)}
    if layer.router is not None:
        found |= {"router": layer.router.to(dtype), "query_norm": layer.head_norms[0].to(dtype), "key_norm": layer.head_norms[1].to(dtype)}
    return found


class DecoderInputs(KeptOutputs):
    """A case. x, residual: bfloat16 [T, H]. cos, sin: bfloat16 [T, head / 2], of the positions 0 to T - 1, which are int64 [T]."""

    case: DecoderCase

    def __init__(self, case: DecoderCase, weights: DecoderWeights, generator: torch.Generator):
        super().__init__(case, weights, OUT_DTYPE)
        self.x = activations(case.M, case.model.hidden, self.device, generator)
        self.residual = activations(case.M, case.model.hidden, self.device, generator)
        self.positions = torch.arange(case.M, device=self.device)
        half = case.model.head // 2
        speeds = ROPE_BASE ** (-torch.arange(half, device=self.device, dtype=torch.float32) / half)
        angles = self.positions.float()[:, None] * speeds
        self.cos, self.sin = angles.cos().to(OUT_DTYPE), angles.sin().to(OUT_DTYPE)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence by torch, for every implementation. query: [T, heads, D]; key, value: [T, KV heads, D]. [T, heads * D]."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)
