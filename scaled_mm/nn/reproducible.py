"""Attention and rotary angles from IEEE operations in one order: the same bits on a CPU and on every GPU.

torch's own attention, `exp`, `cos` and `sin` differ between devices in the last digit. Here every operator is an addition, a multiplication, a
division, a maximum or a rounding, all of which IEEE 754 defines to the bit, or one of integers, and sums have one order. Polynomials are
Taylor's, in float64; their result is rounded to float32 once.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from scaled_mm.core.checks import check_device
from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.rowwise.operands import check_float

LARGEST = 1 << 24  # products in memory at a time

EXP = [1 / math.factorial(k) for k in range(14, -1, -1)]  # |r| <= ln(2) / 2: the rest is below 1e-19
SIN = [(-1) ** k / math.factorial(2 * k + 1) for k in range(9, -1, -1)]  # in r * r, times r; |r| <= pi / 4: the rest is below 1e-21
COS = [(-1) ** k / math.factorial(2 * k) for k in range(9, -1, -1)]

# 42 and 33 bits, and what is left of ln(2) and pi / 2: n times the first part is exact for |n| < 2^11 and 2^20.
LN2 = 0.6931471805598903, 5.497923018708371e-14
HALF_PI = 1.5707963267341256, 6.077100506506192e-11


@torch.no_grad()
def reproducible_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float
) -> torch.Tensor:
    """Attention whose bits do not depend on the device, the batch, the number of heads, or the number of tokens in a call.

        out[b, h, t] = sum over l of softmax_l(scale * query[b, h, t] . key[b, g, l] + mask[b, h, t, l]) * value[b, g, l],   g = h * KV heads // heads

    query: float [B, heads, T, D]. key: query's dtype, [B, KV heads, L, D]. value: the same, [B, KV heads, L, E]. mask: float, to be added, or bool,
    False for keys that do not count, broadcast to [B, heads, T, L], or None. scale: finite. Returns query's dtype, [B, heads, T, E].

    Computed in float32 and rounded to the dtype once; `exp` in float64, results below 2^-126 are 0. Sums over D and over L add neighbours, then
    neighbours of these sums, and so on. Keys at the end whose weight is 0 change nothing, if their values are finite. Keys in front shift the pairs.

    It moves heads * T * L * D products through memory, so it is slow: for tests, and for text that must be the same on another machine. Plain torch
    calls, not for torch.compile, which may contract a product and a sum. Raises a ScaledMMError subclass that names the argument.
    """
    _check(query, key, value, mask, scale)
    (batch, heads, tokens, size), (groups, length) = query.shape, key.shape[1:3]
    if query.numel() == 0 or value.numel() == 0:
        return query.new_zeros(batch, heads, tokens, value.shape[3])
    key, value = key.float()[:, :, None, None], value.float()[:, :, None, None]  # [B, G, 1, 1, L, D]
    rows = query.float().reshape(batch, groups, heads // groups, tokens, 1, size)
    if mask is not None:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min) if mask.dtype is torch.bool else mask.float()
        mask = mask.expand(batch, heads, tokens, length).reshape(batch, groups, -1, tokens, length)
    step, parts = max(1, LARGEST // (batch * heads * length * max(size, value.shape[-1]))), []
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        scores = _sum(rows[:, :, :, part] * key, -1) * scale  # [B, G, heads / G, t, L]
        if mask is not None:
            scores = scores + mask[:, :, :, part]
        weights = _exp(scores - scores.amax(-1, keepdim=True))
        weights = weights / _sum(weights, -1)[..., None]
        parts.append(_sum(weights[..., None] * value, -2))
    return torch.cat(parts, 3).reshape(batch, heads, tokens, -1).to(query.dtype)


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (cos, sin), float32 [..., F], of the angles positions * frequencies, which are rounded to float32 first.

    positions: integers [...]. frequencies: float32 [F]. Angles: below 2^20 in magnitude.
    """
    angles = (positions[..., None].float() * frequencies).double()
    turns = torch.round(angles * (2 / math.pi))
    r = (angles - turns * HALF_PI[0]) - turns * HALF_PI[1]
    square, quadrant = r * r, turns.long() & 3
    sin, cos = _horner(SIN, square) * r, _horner(COS, square)
    odd, of_cos, of_sin = quadrant % 2 == 1, (quadrant == 1) | (quadrant == 2), quadrant >= 2
    return tuple(
        torch.where(negative, -one, one).float() for one, negative in ((torch.where(odd, sin, cos), of_cos), (torch.where(odd, cos, sin), of_sin))
    )


def _exp(x: torch.Tensor) -> torch.Tensor:
    """float32 to float32, for x <= 0 or NaN."""
    wide = x.double().clamp(min=-128.0)
    n = torch.round(wide * math.log2(math.e))
    power = ((n.nan_to_num(0.0).long() + 1023) << 52).view(torch.float64)
    result = (_horner(EXP, (wide - n * LN2[0]) - n * LN2[1]) * power).float()
    return torch.where(result < 2.0**-126, 0.0, result)


def _horner(coefficients: list[float], x: torch.Tensor) -> torch.Tensor:
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def _sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Neighbours first, so that zeros at the end do not change the order. A sum that is 0 is +0."""
    while x.shape[dim] > 1:
        if x.shape[dim] % 2:
            x = functional.pad(x, (0, 1) if dim == -1 else (0, 0, 0, 1))
        first, second = x.unflatten(dim, (-1, 2)).unbind(dim)
        x = first + second
    return x.squeeze(dim) + 0.0


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float) -> None:
    check_float("query", query)
    if query.dim() != 4:
        raise BadTensorShapeError(f"query: expected [B, heads, T, D], got {list(query.shape)}")
    for name, tensor in (("key", key), ("value", value)):
        check_float(name, tensor, (query.dtype,))
        check_device(name, tensor, query.device)
    if key.dim() != 4 or key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise BadTensorShapeError(f"key: expected [{query.shape[0]}, KV heads, L, {query.shape[3]}], got {list(key.shape)}")
    if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
        raise BadTensorShapeError(f"value: expected [{', '.join(map(str, key.shape[:3]))}, E] as key, got {list(value.shape)}")
    if key.shape[1] < 1 or query.shape[1] % key.shape[1]:
        raise BadParamError(f"key: expected a number of heads that divides the {query.shape[1]} of query, got {key.shape[1]}")
    if not isinstance(scale, (int, float)) or not abs(scale) <= 3e38:
        raise BadParamError(f"scale: expected a finite number of float32, got {scale!r}")
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool:
        check_float("mask", mask)
    check_device("mask", mask, query.device)
    wanted = (*query.shape[:3], key.shape[2])
    if mask.dim() != 4 or any(size not in (1, full) for size, full in zip(mask.shape, wanted)):
        raise BadTensorShapeError(f"mask: expected what broadcasts to {list(wanted)}, got {list(mask.shape)}")
