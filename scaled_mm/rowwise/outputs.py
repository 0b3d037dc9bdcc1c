"""The output of a row-wise operator: its float32 result in x's dtype, or quantized."""

from __future__ import annotations

from typing import NamedTuple

import torch

from scaled_mm.errors import BadParamError
from scaled_mm.rowwise.arithmetic import FLOATS
from scaled_mm.rowwise.int8 import quantize_int8
from scaled_mm.rowwise.operands import check_float, without_gradient
from scaled_mm.rowwise.operators import composite
from scaled_mm.rowwise.static import static_rows


class Quantized(NamedTuple):
    """q: int8, contiguous. scale: float32, [..., 1] of each row, or the static scale that was given."""

    q: torch.Tensor
    scale: torch.Tensor


def finished(y: torch.Tensor, dtype: torch.dtype, quantize: str | torch.Tensor | None, zero_point: torch.Tensor | None) -> torch.Tensor | Quantized:
    """y, a contiguous float32 result, in `dtype`, or quantized as `quantize` says (see `rms_norm`)."""
    if quantize is None:
        return y if dtype is torch.float32 else _cast(y, dtype)
    if isinstance(quantize, torch.Tensor):
        return Quantized(static_rows(y, quantize.reshape(()), None if zero_point is None else zero_point.reshape(())), without_gradient(quantize))
    return Quantized(*quantize_int8(y))


def packed(quantize: str | torch.Tensor | None, zero_point: torch.Tensor | None) -> tuple[bool, torch.Tensor | None, torch.Tensor | None]:
    """(token, scale, zero_point): `quantize` as arguments of an operator, `FUSED`."""
    return isinstance(quantize, str), quantize if isinstance(quantize, torch.Tensor) else None, zero_point


FUSED = "bool token, Tensor? scale, Tensor? zero_point"


def unpacked(token: bool, scale: torch.Tensor | None) -> str | torch.Tensor | None:
    return "token" if token else scale


def flat(result: torch.Tensor | Quantized, token: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(y or q, the scales of the rows or an empty tensor): the results of an operator that runs a fused function."""
    if isinstance(result, torch.Tensor):
        return result, result.new_empty(0, dtype=torch.float32)
    return result.q, result.scale if token else result.q.new_empty(0, dtype=torch.float32)


def flat_fake(x: torch.Tensor, columns: int, token: bool, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The shapes of `flat`."""
    dtype = torch.int8 if token or scale is not None else x.dtype
    shape = (*x.shape[:-1], 1) if token else (0,)
    return x.new_empty((*x.shape[:-1], columns), dtype=dtype), x.new_empty(shape, dtype=torch.float32)


def served(results: tuple[torch.Tensor, ...], quantize: str | torch.Tensor | None) -> torch.Tensor | Quantized:
    """What a kernel has computed (`kernels.normalized`), as the operator returns it."""
    if quantize is None:
        return results[0]
    return Quantized(results[0], without_gradient(quantize) if isinstance(quantize, torch.Tensor) else results[1])


def _cast_to(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return y.to(dtype)


def _check_cast(y, dtype) -> None:
    check_float("y", y, (torch.float32,))
    if dtype not in FLOATS[:2]:
        raise BadParamError(f"dtype: expected float16 or bfloat16, got {dtype}")


# An operator, because Inductor removes a cast to 16 bits that another cast to float32 follows (torch 2.13).
_cast = composite("rowwise_cast", 1, _cast_to, _check_cast, "ScalarType dtype", first="y")
