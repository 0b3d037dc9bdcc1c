"""Dynamic INT8 quantization, symmetric or with zero points: one float32 scale per row or per tensor, computed from the data."""

from __future__ import annotations

from typing import NamedTuple

import torch

from scaled_mm.core.checks import check_strided
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.quantize.ops import operator

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DIMS = ("token", "channel", "tensor")


class AsymmetricInt8(NamedTuple):
    """The result of `quantize_int8(..., symmetric=False)`. x is approximately (q - zero_point) * scale; 0 is represented exactly.

    q: int8, contiguous, x's shape. scale: float32. zero_point: int32, scale's shape, from -128 to 127.
    row_sums: int32, the sums of q over its last dimension. Pass them as `a_row_sums` for a = q, or with dim="channel" as `b_column_sums` for
    b = q.t(). Shape: [..., 1] for "token" and "tensor" ([1] for a 0-d x), [..., 1, N] for "channel".
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    row_sums: torch.Tensor


@torch.no_grad()
def quantize_int8(x: torch.Tensor, dim: str = "token", symmetric: bool = True) -> tuple[torch.Tensor, torch.Tensor] | AsymmetricInt8:
    """Quantizes `x` to int8 with scale = max|x| / 127 and q = round half to even(x / scale), clamped to [-127, 127].

    x: float16, bfloat16 or float32, CPU or CUDA, any strides. `dim` selects the values that share a scale, and the layout of the scales:

    * "token": an activation [..., K], at least 1-d. One scale per row: scale [..., 1], the `a_scale` for a = q.
    * "channel": a weight [..., N, K] as torch.nn.Linear stores it, at least 2-d. One scale per output channel, that is
      per row: scale [..., 1, N], the `b_scale` for b = q.t(). Checkpoints store the transpose, [N, 1].
    * "tensor": any shape. One scale: [1].

    Returns (q, scale): q int8, contiguous, x's shape; scale float32. q * scale differs from x by at most scale / 2, plus at most 2^-17 scale
    from rounding x / scale. Does not synchronize with the device.

    The scale is never below 2^-126, the smallest normal float32, so no division by zero occurs. A row of zeros and an empty row have
    scale 2^-126 and q = 0, so q * scale is exactly 0. A row with a NaN has scale NaN. A row with an infinity and no NaN has scale
    inf. q is 0 in all of such a row, and every product with it is NaN.

    symmetric=False returns an AsymmetricInt8 (q, scale, zero_point, row_sums) instead. It uses all 256 values for a range that covers x
    and 0. With low = min(min x, 0) and high = max(max x, 0), each operation rounded separately:

        scale      = max(high / 255 - low / 255, 2^-126)
        zero_point = clamp(round half to even(-128 - low / scale), -128, 127)
        q          = clamp(round half to even(x / scale) + zero_point, -128, 127)

    The range always includes 0, and the zero point is clamped to int8. A row far from 0, such as 500 to 505, uses its values for 0 to 505.
    docs/guide/coming-from.md has a quantizer for such rows. Its zero points are outside of int8, which `scaled_mm` supports.

    In this mode a row of zeros has zero_point -128 and q = -128. A row with a NaN or an infinity has zero_point 0 and q = 0.

    Divisions are IEEE divisions and the maximum is exact, so CPU and GPU give the same bits.

    Raises BadTensorDtypeError, BadTensorShapeError (too few dimensions) or BadParamError (invalid `dim`, or x is not a tensor).
    """
    _check(x, dim)
    if not isinstance(symmetric, bool):
        raise BadParamError(f"symmetric: expected True or False, got {symmetric!r}")
    if torch.compiler.is_compiling():
        return _symmetric_operator(x, dim) if symmetric else AsymmetricInt8(*_asymmetric_operator(x, dim))
    return _symmetric(x, dim) if symmetric else AsymmetricInt8(*_asymmetric(x, dim))


def _check(x: torch.Tensor, dim: str) -> None:
    if dim not in _DIMS:
        raise BadParamError(f"dim: expected one of {', '.join(map(repr, _DIMS))}, got {dim!r}")
    check_strided("x", x)
    if x.dtype not in _DTYPES:
        raise BadTensorDtypeError(f"x: expected float16, bfloat16 or float32, got {x.dtype}")
    least = {"token": 1, "channel": 2, "tensor": 0}[dim]
    if x.dim() < least:
        raise BadTensorShapeError(f"x: dim={dim!r} needs at least {least} dimensions, got shape {tuple(x.shape)}")


def _symmetric(x: torch.Tensor, dim: str) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _scale(x.reshape(1, -1) if dim == "tensor" else x)
    q = quantized(x, scale.view(()) if dim == "tensor" else scale)
    if dim == "tensor":
        return q, scale.view(1)
    return q, scale.transpose(-1, -2).contiguous() if dim == "channel" else scale


def quantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int8, contiguous: clamp(round half to even(x / scale), -127, 127)."""
    ratio = x.to(torch.float32) / scale
    # inf / inf and x / NaN are NaN, whose conversion to int8 is undefined.
    return ratio.round_().clamp_(-127, 127).nan_to_num_(nan=0.0).to(torch.int8, memory_format=torch.contiguous_format)


def _asymmetric(x: torch.Tensor, dim: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = x.reshape(1, -1) if dim == "tensor" else x
    low, high = _range(rows)
    divisor = torch.full((), 255.0, dtype=torch.float32, device=x.device)  # on the device: see _scale
    scale = (high / divisor - low / divisor).clamp_min_(torch.finfo(torch.float32).tiny)
    spoilt = scale.isfinite().logical_not_()  # NaN or infinite
    zero_point = (-128 - low / scale).round_().clamp_(-128, 127).masked_fill_(spoilt, 0)
    q = (rows.to(torch.float32) / scale).round_().add_(zero_point).clamp_(-128, 127).masked_fill_(spoilt, 0)
    q = q.to(torch.int8, memory_format=torch.contiguous_format).reshape(x.shape)
    sums = q.to(torch.int32).view(1) if q.dim() == 0 else q.sum(dim=-1, keepdim=True, dtype=torch.int32)
    zero_point = zero_point.to(torch.int32)
    if dim == "tensor":
        return q, scale.view(1), zero_point.view(1), sums
    if dim == "channel":
        scale, zero_point, sums = (t.transpose(-1, -2).contiguous() for t in (scale, zero_point, sums))
    return q, scale, zero_point, sums


def _range(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high), float32 [..., 1] each: minimum and maximum over the last dimension and 0."""
    if x.shape[-1] == 0:
        zeros = torch.zeros((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        return zeros, zeros
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    return low.to(torch.float32).clamp_max_(0), high.to(torch.float32).clamp_min_(0)


def _scale(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., 1]: max|x| / 127 over the last dimension, at least 2^-126."""
    if x.shape[-1] == 0:
        largest = torch.zeros((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    else:
        largest = x.abs().amax(dim=-1, keepdim=True)
    return scale_of(largest)


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """float32: largest / 127, at least 2^-126."""
    largest = largest.to(torch.float32)
    # The divisor must be a device tensor: for a Python number, torch's CUDA kernel multiplies by the reciprocal, which rounds once
    # more than the CPU's division.
    divisor = torch.full((), 127.0, dtype=torch.float32, device=largest.device)
    return (largest / divisor).clamp_min_(torch.finfo(torch.float32).tiny)


_symmetric_operator = operator("quantize_int8", 2, _symmetric, _check)
_asymmetric_operator = operator("quantize_int8_asymmetric", 4, _asymmetric, _check)
