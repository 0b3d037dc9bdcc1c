"""The layer in plain torch: a peer when compiled in bfloat16, the reference in float32."""

from __future__ import annotations

import torch
from torch.nn import functional

from scaled_mm.bench.decoder.cases import Model
from scaled_mm.bench.decoder.inputs import EPSILON, DecoderInputs, Pair, attention, dequantized


def layer(model: Model, x, residual, cos, sin, *, qkv, o, gate_up, down, input_norm, post_norm, router=None, query_norm=None, key_norm=None) -> Pair:
    """(output, residual), both [T, H], of a decoder layer with a residual. Weights: [N, K]."""
    residual = x + residual
    heads = functional.linear(_norm(residual, input_norm), qkv).view(-1, model.heads + 2 * model.kv_heads, model.head)
    query, key, value = heads.split((model.heads, model.kv_heads, model.kv_heads), 1)
    if query_norm is not None:
        query, key = _norm(query, query_norm), _norm(key, key_norm)
    h = functional.linear(attention(_rotated(query, cos, sin), _rotated(key, cos, sin), value), o)
    residual = h + residual
    h = _norm(residual, post_norm)
    if router is not None:
        return _experts(h, *routed(h, router, model.choices), gate_up, down), residual
    return functional.linear(_gated(functional.linear(h, gate_up)), down), residual


def routed(h: torch.Tensor, router: torch.Tensor, choices: int) -> Pair:
    """(weights float32, experts int64), both [T, choices]: the router of Qwen3's mixtures."""
    return best(functional.linear(h, router), choices)


def best(logits: torch.Tensor, choices: int) -> Pair:
    """As `routed`, of the router's output [T, E]."""
    weights, ids = logits.float().softmax(-1).topk(choices)
    return weights / weights.sum(-1, keepdim=True), ids


def reference(inputs: DecoderInputs) -> Pair:
    """The layer with the weights of set 0 in float32."""
    operands = (tensor.float() for tensor in (inputs.x, inputs.residual, inputs.cos, inputs.sin))
    return layer(inputs.case.model, *operands, **dequantized(inputs.weights.layers[0], torch.float32))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, EPSILON)


def _gated(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    return functional.silu(gate) * up


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _experts(h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Each expert multiplies its rows: torch's grouped product in bfloat16 on a GPU, else a loop."""
    choices, flat = ids.shape[1], ids.flatten()
    order = flat.argsort(stable=True)
    rows = h[order // choices]
    if rows.dtype is torch.bfloat16 and rows.is_cuda:
        ends = functional.one_hot(flat, len(gate_up)).sum(0).cumsum(0).to(torch.int32)
        y = torch._grouped_mm(_gated(torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)), down.transpose(1, 2), offs=ends)
    else:
        parts = rows.split(torch.bincount(flat, minlength=len(gate_up)).tolist())
        y = torch.cat([functional.linear(_gated(functional.linear(part, gate_up[e])), down[e]) for e, part in enumerate(parts)])
    back = torch.empty_like(y).index_copy(0, order, y).view(len(h), choices, -1)
    return (back * weights[..., None].to(h.dtype)).sum(1)
