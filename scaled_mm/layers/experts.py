"""`fused_experts`: the experts of a mixture in one call, from float tokens to float tokens."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import check_device, check_strided
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.products.grouped import grouped_scaled_mm
from scaled_mm.rowwise import moe
from scaled_mm.rowwise.activation import gelu_and_mul, silu_and_mul
from scaled_mm.rowwise.operands import check_float, check_rows, check_written

ACTIVATIONS = {
    "silu": lambda h: silu_and_mul(h, quantize="token"),
    "gelu": lambda h: gelu_and_mul(h, quantize="token"),
    "gelu_tanh": lambda h: gelu_and_mul(h, approximate="tanh", quantize="token"),
}


@torch.no_grad()
def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gated feed-forward networks of a mixture of experts, with int8 weights: [tokens, H] to [tokens, H].

        order      = moe_sort(topk_ids, E)
        q, scale   = quantize_int8(x, "token")                                     once a token; row r of order is token order[r] // choices
        h          = grouped_scaled_mm(q, w13^T, scale, w13_scale, order.ends)     in x's dtype
        q, scale   = silu_and_mul(h, quantize="token")
        y          = grouped_scaled_mm(q, w2^T, scale, w2_scale, order.ends)       in x's dtype
        out[t]     = sum over j of topk_weights[t, j] * y[order.inverse[t, j]]     in order of j

    x: float16, bfloat16 or float32 [tokens, H], any strides, CPU or CUDA.
    w13: int8 [E, 2 I, H], the gate's rows before those of the other projection; w2: int8 [E, H, I]; both fastest if contiguous.
    w13_scale, w2_scale: float32, of each channel [E, 2 I] and [E, H], or with a last dimension of 1 as checkpoints store it; of each expert [E];
        or one value.
    topk_weights: a float dtype [tokens, choices]. topk_ids: int32 or int64 [tokens, choices]; -1: an expert that is not here.
    activation: "silu", "gelu" or "gelu_tanh", of the gate.
    expert_map: int32 [G]: ids are from 0 to G - 1, and expert_map[id] is the expert here, or -1. Then `out` is the sum over the experts here.
    out: [tokens, H] of x's dtype to write to. It may be x, and must be apart from the other operands.

    A choice that is not here adds nothing. The weighted sum is computed in float32, for float32 x in float64, and rounded once.
    The bits are those of the calls above: the same on a CPU, every GPU, for every batch and any order of the tokens. The sum over several
    calls with parts of the experts is rounded in between, and so may differ from one call with all of them.
    Does not synchronize with the device; may be captured in a CUDA graph. No gradient.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given; ids as in `moe_sort`.
    """
    _check(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, activation, out)
    order = moe.moe_sort(topk_ids, w13.shape[0], expert_map=expert_map)
    q, scale = moe.quantize_to_rows(x, order.inverse, False)
    h = grouped_scaled_mm(q, w13.transpose(1, 2), scale, w13_scale, order.ends, out_dtype=x.dtype)
    q, scale = ACTIVATIONS[activation](h)
    y = grouped_scaled_mm(q, w2.transpose(1, 2), scale, w2_scale, order.ends, out_dtype=x.dtype)
    return moe.combine(y, topk_weights, order.inverse, out)


def _check(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, activation, out) -> None:
    check_rows("x", x, least=2)
    if x.dim() != 2:
        raise BadTensorShapeError(f"x: expected [tokens, H], got {list(x.shape)}")
    _check_weight("w13", w13, "[E, 2 I, H]", x)
    _check_weight("w2", w2, "[E, H, I]", x)
    tokens, hidden = x.shape
    if w13.shape[2] != hidden or w13.shape[1] % 2:
        raise BadTensorShapeError(f"w13: expected [E, 2 I, H] with H = {hidden} as in x, got {list(w13.shape)}")
    if w13.shape[0] < 1:
        raise BadTensorShapeError(f"w13: expected at least one expert, got {list(w13.shape)}")
    expected = w13.shape[0], hidden, w13.shape[1] // 2
    if tuple(w2.shape) != expected:
        raise BadTensorShapeError(f"w2: expected [E, H, I] = {list(expected)} for w13 {list(w13.shape)}, got {list(w2.shape)}")
    for name, scale, weight in (("w13_scale", w13_scale, w13), ("w2_scale", w2_scale, w2)):
        check_float(name, scale, (torch.float32,))
        check_device(name, scale, x.device)
        experts, channels = weight.shape[:2]
        forms = (experts,), (experts, 1, 1), (experts, channels), (experts, 1, channels), (experts, channels, 1)
        if scale.numel() != 1 and tuple(scale.shape) not in forms:
            raise BadTensorShapeError(f"{name}: expected one value, {', '.join(str(list(form)) for form in forms)}, got {list(scale.shape)}")
    moe.check_weights(topk_weights, x)
    check_strided("topk_ids", topk_ids)
    check_device("topk_ids", topk_ids, x.device)
    if topk_weights.shape[0] != tokens:
        raise BadTensorShapeError(f"topk_weights: expected [tokens, choices] with {tokens} tokens as in x, got {list(topk_weights.shape)}")
    if topk_ids.shape != topk_weights.shape:
        raise BadTensorShapeError(f"topk_ids: expected {list(topk_weights.shape)} as topk_weights, got {list(topk_ids.shape)}")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise BadParamError(f"activation: expected one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    if out is not None:
        apart = dict(w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale, topk_weights=topk_weights, topk_ids=topk_ids)
        check_written("out", out, x.dtype, x.shape, x.device, **apart)


def _check_weight(name: str, weight: object, shape: str, x: torch.Tensor) -> None:
    check_strided(name, weight)
    check_device(name, weight, x.device)
    if weight.dtype is not torch.int8:
        raise BadTensorDtypeError(f"{name}: expected int8, got {weight.dtype}")
    if weight.dim() != 3:
        raise BadTensorShapeError(f"{name}: expected {shape}, got {weight.dim()} dimensions: {list(weight.shape)}")
