"""`quantize_int8` and `dynamic_quant`: from floating-point tensors to the int8 operands and scales of the products."""

from __future__ import annotations

from typing import NamedTuple

import torch

from scaled_mm.core.checks import mark_written, overlap
from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.rowwise import kernels
from scaled_mm.rowwise.dynamic import dynamic, dynamic_asymmetric, scale_of
from scaled_mm.rowwise.operands import (
    SCALE_DTYPES,
    ZERO_POINT_DTYPES,
    check_float,
    check_parameter,
    check_rows,
    check_vector,
    check_written,
    has_memory,
    without_gradient,
)
from scaled_mm.rowwise.operators import composite
from scaled_mm.rowwise.static import static_rows

_DIMS = ("token", "channel", "tensor")


class AsymmetricInt8(NamedTuple):
    """The result of `quantize_int8` with zero points. x is approximately (q - zero_point) * scale; with symmetric=False 0 is represented exactly.

    q: int8, contiguous, x's shape. scale: float32. zero_point: int32. Computed: scale's shape, from -128 to 127. Static: as given.
    row_sums: int32, the sums of q over its last dimension. Pass them as `a_row_sums` for a = q, or with dim="channel" as `b_column_sums` for
    b = q.t(). Shape: [..., 1] for "token" and "tensor" ([1] for a 0-d x), [..., 1, N] for "channel".
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    row_sums: torch.Tensor


def quantize_int8(
    x: torch.Tensor,
    dim: str = "token",
    symmetric: bool = True,
    *,
    smooth_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | AsymmetricInt8:
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

    smooth_scale: [K], float16, bfloat16 or float32: f32(x) * smooth_scale, in float32, is quantized instead of x.
    scale: a static scale, float32: one value, or the shape that the scale above has. Nothing is computed from the data then:

        q = clamp(round half to even(x / scale) + zero_point, -128, 127)          NaN counts as 0

    Returns (q, scale), or with zero_point, int8 or int32 of scale's shape or one value, an AsymmetricInt8. `symmetric` has no meaning.
    out: int8, x's shape, any strides without overlap, apart from the scales and zero points: q is written there.

    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    if isinstance(dim, str) and dim == "token" and symmetric is True and scale is None and zero_point is None and out is None:
        served = kernels.first(x, lambda: kernels.quantized(x, kernels.Output.TOKEN, factor=smooth_scale))
        if served is not None:
            return served
    return _quantize_int8(x, dim, symmetric, smooth_scale, scale, zero_point, out)


@torch.no_grad()
def _quantize_int8(x, dim, symmetric, smooth_scale, scale, zero_point, out) -> tuple[torch.Tensor, torch.Tensor] | AsymmetricInt8:
    _check(x, dim)
    if not isinstance(symmetric, bool):
        raise BadParamError(f"symmetric: expected True or False, got {symmetric!r}")
    if smooth_scale is not None:
        _check_smoothing(x, smooth_scale)
    if out is not None:
        check_written("out", out, torch.int8, x.shape, x.device, smooth_scale=smooth_scale, scale=scale, zero_point=zero_point)
    if scale is not None:
        _check_static(x, dim, scale, zero_point)
    elif zero_point is not None:
        raise BadParamError("zero_point: expected None without a static scale, got a zero point; symmetric=False computes zero points")
    if kernels.serve(x) and (served := _by_kernel(x, dim, symmetric, smooth_scale, scale, zero_point, out)):
        return served
    if smooth_scale is not None:
        x = _smooth(x, smooth_scale)
    if scale is not None:
        result = _static(x, dim, scale, zero_point)
    else:
        result = _symmetric(x, dim) if symmetric else AsymmetricInt8(*_asymmetric(x, dim))
    if out is None:
        return result
    written = out.copy_(result[0])
    return result._replace(q=written) if isinstance(result, AsymmetricInt8) else (written, result[1])


def dynamic_quant(x: torch.Tensor, smooth_scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, scale) of `quantize_int8(x, "token", smooth_scale=smooth_scales)`, with one scale per row without the last dimension.

    x: float16, bfloat16 or float32 [..., K], 2 to 8 dimensions, any strides, CPU or CUDA. smooth_scales: [K], any of these dtypes, or None.
    y: int8, x's shape. scale: float32, x.shape[:-1]: max|x * smooth_scales| / 127.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    if isinstance(x, torch.Tensor) and x.dim() > 1:
        served = kernels.first(x, lambda: kernels.quantized(x, kernels.Output.TOKEN, factor=smooth_scales, shape=tuple(x.shape[:-1])))
        if served is not None:
            return served
    return _dynamic_quant(x, smooth_scales)


@torch.no_grad()
def _dynamic_quant(x, smooth_scales) -> tuple[torch.Tensor, torch.Tensor]:
    check_rows("x", x, least=2)
    if smooth_scales is not None:
        _check_smoothing(x, smooth_scales, "smooth_scales")
    if kernels.serve(x) and (served := kernels.quantized(x, kernels.Output.TOKEN, factor=smooth_scales, shape=tuple(x.shape[:-1]))):
        return served
    if smooth_scales is not None:
        x = _smooth(x, smooth_scales)
    y, scale = _symmetric(x, "token")
    return y, scale.squeeze(-1)


def _check(x: torch.Tensor, dim: str) -> None:
    if not isinstance(dim, str) or dim not in _DIMS:
        raise BadParamError(f"dim: expected one of {', '.join(map(repr, _DIMS))}, got {dim!r}")
    check_float("x", x)
    least = {"token": 1, "channel": 2, "tensor": 0}[dim]
    if x.dim() < least:
        raise BadTensorShapeError(f"x: dim={dim!r} needs at least {least} dimensions, got shape {tuple(x.shape)}")


def _check_smoothing(x: torch.Tensor, smooth_scale: torch.Tensor, name: str = "smooth_scale") -> None:
    if x.dim() == 0:
        raise BadTensorShapeError(f"x: {name} needs at least 1 dimension, got shape ()")
    check_vector(name, smooth_scale, x, x.shape[-1])


def _by_kernel(x, dim, symmetric, smooth_scale, scale, zero_point, out) -> tuple[torch.Tensor, torch.Tensor] | AsymmetricInt8 | None:
    """The result of a CUDA kernel; None: torch operations must serve."""
    if dim == "tensor" and scale is None:
        return _tensor_by_kernel(x, out) if symmetric and smooth_scale is None else None
    Output = kernels.Output
    output = Output.STATIC if scale is not None else Output.TOKEN if symmetric else Output.TOKEN_ASYMMETRIC
    into = None if out is None or not has_memory(out) or overlap(out, x) else out
    shape = None if dim == "tensor" else _scale_shape(x, dim)
    served = kernels.quantized(x, output, out=into, factor=smooth_scale, scale=scale, zero_point=zero_point, shape=shape)
    if served is None:
        return None
    q, *rest = served
    if into is not None:
        mark_written(out)
    elif out is not None:
        q = out.copy_(q)
    if scale is None:
        return (q, *rest) if symmetric else AsymmetricInt8(q, *rest)
    scale = without_gradient(scale)
    return (q, scale) if zero_point is None else AsymmetricInt8(q, scale, zero_point.to(torch.int32), *rest)


def _tensor_by_kernel(x, out) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One scale of a whole tensor: torch reads x once for the largest magnitude, a kernel once more. The bits of static quantization are those of
    dynamic quantization, for no quotient is beyond 127 and NaN counts as 0 in both."""
    if x.numel() == 0:
        return None
    low, high = torch.aminmax(x)
    scale = scale_of(torch.maximum(low.abs(), high.abs())).view(1)
    served = _by_kernel(x, "tensor", True, None, scale, None, out)
    return None if served is None else (served[0], scale)


def _scale_shape(x: torch.Tensor, dim: str) -> tuple[int, ...]:
    if dim == "tensor":
        return (1,)
    return (*x.shape[:-2], 1, x.shape[-2]) if dim == "channel" else (*x.shape[:-1], 1)


def _check_static(x: torch.Tensor, dim: str, scale: torch.Tensor, zero_point: torch.Tensor | None) -> None:
    shape = _scale_shape(x, dim)
    for name, tensor, dtypes in (("scale", scale, SCALE_DTYPES), ("zero_point", zero_point, ZERO_POINT_DTYPES)):
        if tensor is None:
            continue
        check_parameter(name, tensor, x, *dtypes)
        if tensor.numel() != 1 and tuple(tensor.shape) != shape:
            raise BadTensorShapeError(f"{name}: expected one value or {list(shape)}, got {list(tensor.shape)}")


def _static(x: torch.Tensor, dim: str, scale: torch.Tensor, zero_point: torch.Tensor | None):
    def of_rows(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 1:
            return tensor.reshape(())
        return tensor.transpose(-1, -2) if dim == "channel" else tensor

    q = static_rows(x, of_rows(scale), None if zero_point is None else of_rows(zero_point))
    if zero_point is None:
        return q, without_gradient(scale)
    sums = q.to(torch.int32).view(1) if q.dim() == 0 else q.sum(dim=-1, keepdim=True, dtype=torch.int32)
    return AsymmetricInt8(q, without_gradient(scale), zero_point.to(torch.int32), sums.flatten(-2).unsqueeze(-2) if dim == "channel" else sums)


def _smoothed_rows(x: torch.Tensor, smooth_scale: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32) * smooth_scale.to(torch.float32)


def _check_smooth(x, smooth_scale) -> None:
    check_float("x", x)
    if x.dim() == 0:
        raise BadTensorShapeError("x: expected at least 1 dimension, got shape ()")
    check_vector("smooth_scale", smooth_scale, x, x.shape[-1])


# An operator, because Inductor would take x before its rounding to 16 bits.
_smooth = composite("rowwise_smooth", 1, _smoothed_rows, _check_smooth, "Tensor smooth_scale")
_symmetric = composite("quantize_int8", 2, dynamic, _check, kernel=lambda x, dim: _by_kernel(x, dim, True, None, None, None, None))
_asymmetric = composite(
    "quantize_int8_asymmetric", 4, dynamic_asymmetric, _check, kernel=lambda x, dim: _by_kernel(x, dim, False, None, None, None, None)
)
