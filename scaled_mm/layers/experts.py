"""`fused_experts`: the experts of a mixture in one call, from float tokens to float tokens."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import check_device, check_strided, has_shape
from scaled_mm.errors import K_BOUNDS, AccumulatorOverflowError, BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.products.grouped import grouped_scaled_mm
from scaled_mm.products.grouped_block_scaled import grouped_block_scaled_mm
from scaled_mm.rowwise import moe
from scaled_mm.rowwise.operands import check_float, check_rows, check_written


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
    block_scales: bool = False,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gated feed-forward networks of a mixture of experts, with int8 weights: [tokens, H] to [tokens, H].

        order, ends, inverse = moe_sort(topk_ids, E)
        q, scale   = quantize_int8(x, "token")                                              once a token
        token      = order // choices                                                       of each row
        h          = grouped_scaled_mm(q[token], w13^T, scale[token], w13_scale, ends)      in x's dtype
        q, scale   = silu_and_mul(h, quantize="token")
        y          = grouped_scaled_mm(q, w2^T, scale, w2_scale, ends)                      in x's dtype
        out[t]     = sum over j of topk_weights[t, j] * y[inverse[t, j]]                    in order of j

    With block_scales the quantizer is quantize_int8_block, that of h's activation is quantize_int8_block(silu_and_mul(h)), with silu_and_mul(h) in
    x's dtype, and the products are those of grouped_block_scaled_mm. `activation` names what takes the place of silu_and_mul.

    x: float16, bfloat16 or float32 [tokens, H], any strides, CPU or CUDA.
    w13: int8 [E, 2 I, H], the gate's rows before those of the other projection; w2: int8 [E, H, I]; both fastest if contiguous.
    w13_scale, w2_scale: float32, of each channel [E, 2 I] and [E, H], or with a last dimension of 1 as checkpoints store it; of each expert [E];
        or one value. With block_scales: of each 128 x 128 elements, [E, ceil(2 I/128), ceil(H/128)] and [E, ceil(H/128), ceil(I/128)], as
        checkpoints store them (`weight_scale_inv`).
    topk_weights: float16, bfloat16 or float32 [tokens, choices]. topk_ids: int32 or int64 [tokens, choices]; -1: an expert that is not local.
    activation: "silu", "gelu" or "gelu_tanh", of the gate.
    expert_map: int32 [G]: ids are from 0 to G - 1, and expert_map[id] is the local expert, or -1. Then `out` is the sum over the local experts,
        and the kernel configs are selected for E / G of the choices.
    out: [tokens, H] of x's dtype to write to. It may be x, and must be apart from the other operands.

    A choice whose expert is not local adds nothing. The weighted sum is computed in float32, for float32 x in float64, and rounded once.
    The bits are those of the calls above: the same on a CPU, every GPU, for every batch and any order of the tokens. The sum of several
    calls, each with some of the experts, is rounded in between, and so may differ from one call with all of them.
    Does not synchronize with the device; may be captured in a CUDA graph. No gradient.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given; ids as in `moe_sort`.
    AccumulatorOverflowError: H or I is above 131071, without block_scales.
    """
    check_experts(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, activation, block_scales)
    if out is not None:
        apart = dict(w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale, topk_weights=topk_weights, topk_ids=topk_ids)
        check_written("out", out, x.dtype, x.shape, x.device, **apart, expert_map=expert_map)
    order = moe.moe_sort(topk_ids, w13.shape[0], expert_map=expert_map)
    q, scale = moe.quantize_to_rows(x, order.inverse, block_scales)
    rows = expected_rows(*topk_ids.shape, w13.shape[0], expert_map)
    y = products_of_experts(q, scale, w13, w13_scale, w2, w2_scale, order.ends, x.dtype, activation, block_scales, rows)
    return moe.combine(y, topk_weights, order.inverse, out)


def products_of_experts(q, scale, w13, w13_scale, w2, w2_scale, ends, out_dtype, activation, block_scales, rows) -> torch.Tensor:
    """The two products of `fused_experts`, with the activation between them, of rows that are sorted by expert and quantized."""
    h = _product(q, w13, scale, w13_scale, ends, out_dtype, block_scales, rows)
    q, scale = moe.activate(h, activation, ends, block_scales)
    return _product(q, w2, scale, w2_scale, ends, out_dtype, block_scales, rows)


def expected_rows(tokens: int, choices: int, experts: int, expert_map) -> int | None:
    """How many rows the local experts get on average, if all experts are chosen equally often. None without a map: all. None also for symbolic sizes
    and while a compiler traces: operators have no such argument, and a comparison would bound the sizes."""
    if expert_map is None or torch.compiler.is_compiling() or expert_map.shape[0] == 0:
        return None
    rows = -(-tokens * choices * experts // expert_map.shape[0])
    return None if isinstance(rows, torch.SymInt) else max(1, rows)


def _product(q, weight, scale, weight_scale, ends, out_dtype, block_scales, rows) -> torch.Tensor:
    b = weight.transpose(1, 2)
    if block_scales:
        scales = scale, weight_scale.transpose(1, 2)
        return grouped_block_scaled_mm(q, b, *scales, ends, out_dtype=out_dtype, expected_rows=rows, zero_unassigned=False)
    return grouped_scaled_mm(q, b, scale, weight_scale, ends, out_dtype=out_dtype, expected_rows=rows, zero_unassigned=False)


def check_experts(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, activation, block_scales, least: int = 1) -> None:
    """Checks operands of `fused_experts`. least: number of experts."""
    check_rows("x", x, least=2)
    if x.dim() != 2:
        raise BadTensorShapeError(f"x: expected [tokens, H], got {list(x.shape)}")
    _check_weight("w13", w13, "[E, 2 I, H]", x)
    _check_weight("w2", w2, "[E, H, I]", x)
    tokens, hidden = x.shape
    if w13.shape[2] != hidden or w13.shape[1] % 2:
        raise BadTensorShapeError(f"w13: expected [E, 2 I, H] with H = {hidden} as in x, got {list(w13.shape)}")
    if w13.shape[0] < least:
        raise BadTensorShapeError(f"w13: expected at least one expert, got {list(w13.shape)}")
    expected = w13.shape[0], hidden, w13.shape[1] // 2
    if tuple(w2.shape) != expected:
        raise BadTensorShapeError(f"w2: expected [E, H, I] = {list(expected)} for w13 {list(w13.shape)}, got {list(w2.shape)}")
    if not isinstance(block_scales, bool):
        raise BadParamError(f"block_scales: expected True or False, got {block_scales!r}")
    check_depths(hidden, expected[2], block_scales)
    for name, scale, weight in (("w13_scale", w13_scale, w13), ("w2_scale", w2_scale, w2)):
        check_float(name, scale, (torch.float32,))
        check_device(name, scale, x.device)
        _check_scale(name, scale, weight, block_scales)
    moe.check_weights(topk_weights, x)
    check_strided("topk_ids", topk_ids)
    check_device("topk_ids", topk_ids, x.device)
    if topk_weights.shape[0] != tokens:
        raise BadTensorShapeError(f"topk_weights: expected [tokens, choices] with {tokens} tokens as in x, got {list(topk_weights.shape)}")
    if topk_ids.shape != topk_weights.shape:
        raise BadTensorShapeError(f"topk_ids: expected {list(topk_weights.shape)} as topk_weights, got {list(topk_ids.shape)}")
    if not isinstance(activation, str) or activation not in moe.ACTIVATIONS:
        raise BadParamError(f"activation: expected one of {', '.join(map(repr, moe.ACTIVATIONS))}, got {activation!r}")


def check_depths(hidden: int, inner: int, block_scales: bool) -> None:
    """Checks that H and I, the K of the two products, are within the bound of `scaled_mm`. Block-scaled products have none."""
    for name, k in () if block_scales else (("x", hidden), ("w2", inner)):
        if k > K_BOUNDS[0]:
            raise AccumulatorOverflowError(f"{name}: expected K <= {K_BOUNDS[0]}, beyond which a 32-bit accumulator is not exact, got K = {k}")


def _check_scale(name: str, scale: torch.Tensor, weight: torch.Tensor, block_scales: bool) -> None:
    experts, channels, k = weight.shape
    if block_scales:
        forms = ((experts, -(-channels // 128), -(-k // 128)),)
    else:
        forms = (experts,), (experts, 1, 1), (experts, channels), (experts, 1, channels), (experts, channels, 1)
    if has_shape(scale, *forms) or (scale.numel() == 1 and scale.dim() <= 3 and not block_scales):
        return
    expected = ", ".join(str(list(form)) for form in forms)
    raise BadTensorShapeError(f"{name}: expected {'' if block_scales else 'one value, '}{expected}, got {list(scale.shape)}")


def _check_weight(name: str, weight: object, shape: str, x: torch.Tensor) -> None:
    check_strided(name, weight)
    check_device(name, weight, x.device)
    if weight.dtype is not torch.int8:
        raise BadTensorDtypeError(f"{name}: expected int8, got {weight.dtype}")
    if weight.dim() != 3:
        raise BadTensorShapeError(f"{name}: expected {shape}, got {weight.dim()} dimensions: {list(weight.shape)}")
