"""Static INT8 quantization: the scale is given, not computed from the data."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import has_shape, mark_written
from scaled_mm.errors import BadTensorDtypeError, BadTensorShapeError
from scaled_mm.rowwise import kernels
from scaled_mm.rowwise.operands import SCALE_DTYPES, ZERO_POINT_DTYPES, check_float, check_parameter, check_rows, check_vector
from scaled_mm.rowwise.operators import composite


def _divided(y: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
    """int8, contiguous: clamp(round half to even(y / scale) + zero_point, -128, 127), in float32. NaN counts as 0. scale, zero_point: broadcast."""
    return _rounded(y.to(torch.float32) / scale, zero_point)


def _rounded(ratio: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
    q = ratio.round().nan_to_num(nan=0.0)
    if zero_point is not None:
        q = q + zero_point.to(torch.float32)
    return q.clamp(-128, 127).to(torch.int8, memory_format=torch.contiguous_format)


@torch.no_grad()
def quantize(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
    """int8, x's shape, contiguous: clamp(round half to even(x * scale + offset), -128, 127). It multiplies; `quantize_int8(scale=)` divides.

    x: float16, bfloat16 or float32 [..., K], 1 to 8 dimensions, any strides, CPU or CUDA. scale, offset: [K] or one value, float16, bfloat16 or
    float32; offset in scale's dtype. Product and sum are float32 operations that round separately. A result of NaN counts as 0.
    A CPU and every GPU give the same bits. No gradient.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    _check(x, scale, offset)
    if kernels.serve(x) and (served := _scaled_by_kernel(x, scale, offset)) is not None:
        return served
    return _quantize(x, scale, offset)


def _check(x, scale, offset) -> None:
    check_rows("x", x)
    check_vector("scale", scale, x, x.shape[-1], one=True)
    if offset is not None:
        check_vector("offset", offset, x, x.shape[-1], one=True)
        if offset.dtype != scale.dtype:
            raise BadTensorDtypeError(f"offset: expected {scale.dtype} as scale, got {offset.dtype}")


def _scaled(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    product = x.to(torch.float32) * scale.to(torch.float32)
    if offset is not None:
        product = product + offset.to(torch.float32)
    return _rounded(product, None)


def _check_divided(y, scale, zero_point) -> None:
    check_float("x", y)
    for name, tensor, dtypes in (("scale", scale, SCALE_DTYPES), ("zero_point", zero_point, ZERO_POINT_DTYPES)):
        if tensor is None and name == "zero_point":
            continue
        check_parameter(name, tensor, y, *dtypes)
        if tensor.dim() and not has_shape(tensor, (*y.shape[:-1], 1), y.shape[-1:]):
            raise BadTensorShapeError(f"{name}: expected [], {[*y.shape[:-1], 1]} or {list(y.shape[-1:])}, got {list(tensor.shape)}")


def requantize(y: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    """int8, y's shape: clamp(round half to even(y / scale) + zero_point, -128, 127). NaN counts as 0. y: a contiguous float32 [..., N].

    scale: float32, zero_point: int8 or int32: one value or [N]; checked. out: where the result goes, apart from y.
    """
    if kernels.serve(y):
        served = kernels.quantized(y, kernels.Output.STATIC_COLUMNS, out=out, scale=scale, zero_point=zero_point)
        if served:
            if out is not None:
                mark_written(out)
            return served[0]
    of_columns = (t if t is None or t.numel() != 1 else t.reshape(()) for t in (scale, zero_point))
    q = static_rows(y, *of_columns)
    return q if out is None else out.copy_(q)


def _static_by_kernel(y: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor | None:
    given = [t for t in (scale, zero_point) if t is not None]
    if all(t.numel() == 1 or t.shape == (*y.shape[:-1], 1) for t in given):
        output = kernels.Output.STATIC
    elif all(t.numel() == 1 or t.shape == y.shape[-1:] for t in given):
        output = kernels.Output.STATIC_COLUMNS
    else:
        return None
    served = kernels.quantized(y, output, scale=scale, zero_point=zero_point)
    return None if served is None else served[0]


def _scaled_by_kernel(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor | None:
    factor, shift = (t if t is None or t.dim() == 1 and t.shape[0] == x.shape[-1] else t.reshape(1).expand(x.shape[-1]) for t in (scale, offset))
    served = kernels.quantized(x, kernels.Output.ROUND, factor=factor, offset=shift)
    return None if served is None else served[0]


static_rows = composite("quantize_int8_static", 1, _divided, _check_divided, "Tensor scale, Tensor? zero_point", kernel=_static_by_kernel)
_quantize = composite("quantize", 1, _scaled, _check, "Tensor scale, Tensor? offset", kernel=_scaled_by_kernel)
