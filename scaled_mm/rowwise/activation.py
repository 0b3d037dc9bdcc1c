"""Gated activations: silu or gelu of the first half of each row times the second half, with quantization of the result in the same call."""

from __future__ import annotations

import math

import torch

from scaled_mm.errors import BadParamError, BadTensorShapeError
from scaled_mm.rowwise import kernels
from scaled_mm.rowwise.arithmetic import erfc, sigmoid_times, wide
from scaled_mm.rowwise.operands import check_quantize, check_rows
from scaled_mm.rowwise.operators import composite, operator
from scaled_mm.rowwise.outputs import FUSED, Quantized, finished, flat, flat_fake, packed, served, unpacked

APPROXIMATIONS = ("none", "tanh")


def silu_and_mul(x: torch.Tensor, *, quantize: str | torch.Tensor | None = None, zero_point: torch.Tensor | None = None) -> torch.Tensor | Quantized:
    """y = silu(g) * u, where g and u are the first and the second half of the last dimension of x; with `quantize` its int8 quantization.

        y = (g * sigmoid(g)) * u

    x: float16, bfloat16 or float32 [..., 2 H], 1 to 8 dimensions, any strides, CPU or CUDA. y: [..., H], contiguous, x's dtype.
    quantize, zero_point: see `rms_norm`. y is not rounded to x's dtype before it is quantized.

    exp is our own polynomial, and each rounding is documented (docs/design/numerics.md): a CPU and every GPU give the same bits. y is
    within 1 unit in the last place of x's dtype, except for extreme bfloat16 values (same page). g = -inf gives NaN, as the formula does.
    No gradient.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    if (results := _short(x, kernels.Function.SILU_AND_MUL, quantize, zero_point)) is not None:
        return served(results, quantize)
    with torch.no_grad():
        _check(x)
        return _checked(x, kernels.Function.SILU_AND_MUL, quantize, zero_point)


def gelu_and_mul(
    x: torch.Tensor, *, approximate: str = "none", quantize: str | torch.Tensor | None = None, zero_point: torch.Tensor | None = None
) -> torch.Tensor | Quantized:
    """y = gelu(g) * u, where g and u are the first and the second half of the last dimension of x; with `quantize` its int8 quantization.

        "none":  y = ((0.5 * g) * erfc(-(g * sqrt(1/2)))) * u
        "tanh":  y = (g * sigmoid(2 sqrt(2 / pi) * (g * (1 + 0.044715 * (g * g))))) * u        which is 0.5 g (1 + tanh(...)) u

    The other arguments, and what is promised: see `silu_and_mul`.
    """
    known = isinstance(approximate, str) and approximate in APPROXIMATIONS
    function = kernels.Function.GELU_AND_MUL if known and approximate == "none" else kernels.Function.GELU_TANH_AND_MUL
    if known and (results := _short(x, function, quantize, zero_point)) is not None:
        return served(results, quantize)
    with torch.no_grad():
        _check_gelu(x, approximate)
        return _checked(x, function, quantize, zero_point)


def _short(x, function: kernels.Function, quantize, zero_point) -> tuple[torch.Tensor, ...] | None:
    if zero_point is not None or not (quantize is None or (isinstance(quantize, str) and quantize == "token")):
        return None
    return kernels.first(x, lambda: kernels.activated(x, function, quantize, None))


def _checked(x, function: kernels.Function, quantize, zero_point) -> torch.Tensor | Quantized:
    check_quantize(quantize, zero_point, x)
    if torch.compiler.is_compiling():
        return served(_fused(x, function.name, *packed(quantize, zero_point)), quantize)
    return _now(x, function, quantize, zero_point)


def _now(x, function: kernels.Function, quantize, zero_point) -> torch.Tensor | Quantized:
    if kernels.serve(x) and (results := kernels.activated(x, function, quantize, zero_point)):
        return served(results, quantize)
    return finished(_COMPOSITES[function](x), x.dtype, quantize, zero_point)


def _check(x) -> None:
    check_rows("x", x)
    if x.shape[-1] % 2:
        raise BadTensorShapeError(f"x: expected [..., 2 H], got {list(x.shape)}")


def _check_gelu(x, approximate) -> None:
    _check(x)
    if not isinstance(approximate, str) or approximate not in APPROXIMATIONS:
        raise BadParamError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")


def _gated(x: torch.Tensor, activation) -> torch.Tensor:
    """float32: activation(g) * u, rounded once from W."""
    g, u = wide(x).chunk(2, dim=-1) if x.shape[-1] else (wide(x), wide(x))
    return (activation(g) * u).to(torch.float32).contiguous()


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _gelu(g: torch.Tensor) -> torch.Tensor:
    return (0.5 * g) * erfc(-(g * _number(math.sqrt(0.5), g)))


def _gelu_tanh(g: torch.Tensor) -> torch.Tensor:
    return sigmoid_times(g, _number(2 * math.sqrt(2 / math.pi), g) * (g * (1 + _number(0.044715, g) * (g * g))))


def _silu(x: torch.Tensor) -> torch.Tensor:
    return _gated(x, lambda g: sigmoid_times(g, g))


def _gelu_of(x: torch.Tensor, approximate: str) -> torch.Tensor:
    return _gated(x, _gelu if approximate == "none" else _gelu_tanh)


def _fake(x, *_) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.float32, device=x.device)


_silu_and_mul = composite("silu_and_mul", 1, _silu, _check, "", fake=_fake)
_gelu_and_mul = composite("gelu_and_mul", 1, _gelu_of, _check_gelu, "str approximate", fake=_fake)


_COMPOSITES = {
    kernels.Function.SILU_AND_MUL: _silu_and_mul,
    kernels.Function.GELU_AND_MUL: lambda x: _gelu_and_mul(x, "none"),
    kernels.Function.GELU_TANH_AND_MUL: lambda x: _gelu_and_mul(x, "tanh"),
}
"""The float32 results by torch operations."""


# Operators for compiled graphs. They do not call the public function: it would call the operator again while torch compiles.
@torch.no_grad()
def _run(x, function, token, scale, zero_point) -> tuple[torch.Tensor, torch.Tensor]:
    return flat(_now(x, kernels.Function[function], unpacked(token, scale), zero_point), token)


_fused = operator(
    "rowwise_gated",
    2,
    _run,
    lambda x, *_: _check(x),
    f"str function, {FUSED}",
    fake=lambda x, function, token, scale, zero_point: flat_fake(x, x.shape[-1] // 2, token, scale),
)
