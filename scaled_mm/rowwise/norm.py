"""RMSNorm, alone or of a sum with a residual, with quantization of the result in the same call."""

from __future__ import annotations

import torch

from scaled_mm.core.checks import mark_written, overlap, same_place
from scaled_mm.errors import BadTensorShapeError
from scaled_mm.rowwise import kernels
from scaled_mm.rowwise.arithmetic import inverse_root, sum_of_squares, wide
from scaled_mm.rowwise.operands import check_epsilon, check_like, check_quantize, check_rows, check_vector, check_written, has_memory
from scaled_mm.rowwise.operators import composite, operator
from scaled_mm.rowwise.outputs import FUSED, Quantized, finished, flat, flat_fake, packed, served, unpacked


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float = 1e-6,
    *,
    quantize: str | torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor | Quantized:
    """y = x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension; with `quantize` the int8 quantization of y.

        y = (x * (1 / sqrt(sum(x * x) / K + epsilon))) * weight

    x: float16, bfloat16 or float32 [..., K], 1 to 8 dimensions, K >= 1, any strides, CPU or CUDA. weight: [K], any of these dtypes.
    epsilon: from 0 to the largest float32.
    quantize: None returns y in x's dtype. "token" returns (q, scale) as `quantize_int8` of y in float32: q int8 [..., K], scale float32 [..., 1].
        A float32 tensor with one value is a static scale: q = clamp(round half to even(y / scale) + zero_point, -128, 127); returns (q, scale).
        y is not rounded to x's dtype before it is quantized.
    zero_point: int8 or int32, one value, with a static scale.

    The order of the sum, and each rounding, are documented (docs/design/numerics.md): a CPU and every GPU give the same bits, for every
    batch. y is within 1 unit in the last place of x's dtype, except for extreme bfloat16 values (same page). NaN and infinity propagate.
    Contiguous outputs; no gradient.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    if zero_point is None and _is_short(quantize, epsilon):
        results = kernels.first(x, lambda: kernels.normalized(x, None, weight, epsilon, quantize, None, None))
        if results is not None:
            return served(results, quantize)
    return _rms_norm_checked(x, weight, epsilon, quantize, zero_point)


def _is_short(quantize, epsilon) -> bool:
    """Whether the core checks what is left to check."""
    return (quantize is None or (isinstance(quantize, str) and quantize == "token")) and type(epsilon) is float


@torch.no_grad()
def _rms_norm_checked(x, weight, epsilon, quantize, zero_point) -> torch.Tensor | Quantized:
    _check(x, weight, epsilon)
    epsilon = float(epsilon)  # torch's operators take no integer beyond 64 bits
    check_quantize(quantize, zero_point, x)
    if torch.compiler.is_compiling():
        return served(_fused(x, weight, epsilon, *packed(quantize, zero_point)), quantize)
    return _rms_norm_now(x, weight, epsilon, quantize, zero_point)


def _rms_norm_now(x, weight, epsilon, quantize, zero_point) -> torch.Tensor | Quantized:
    if kernels.serve(x) and (results := kernels.normalized(x, None, weight, epsilon, quantize, zero_point, None)):
        return served(results, quantize)
    return finished(_rms_norm(x, weight, epsilon), x.dtype, quantize, zero_point)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float = 1e-6,
    *,
    quantize: str | torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
    """(y, total): total = x + residual, rounded to x's dtype, and y = `rms_norm(total, weight, epsilon)`.

    residual: x's dtype and shape. total: a tensor to write the sum to; x or residual itself is allowed, memory of a weight, scale or
    zero point is not. The other arguments: see `rms_norm`. With `quantize` y is (q, scale).
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given.
    """
    if zero_point is None and total is None and _is_short(quantize, epsilon) and isinstance(residual, torch.Tensor):
        added: list[torch.Tensor] = []

        def results():
            if residual.shape != x.shape:
                return None
            added.append(kernels.empty(x, x.shape, x.dtype))
            return kernels.normalized(x, residual, weight, epsilon, quantize, None, added[0])

        if (found := kernels.first(x, results)) is not None:
            return served(found, quantize), added[0]
    return _add_rms_norm_checked(x, residual, weight, epsilon, quantize, zero_point, total)


@torch.no_grad()
def _add_rms_norm_checked(x, residual, weight, epsilon, quantize, zero_point, total) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
    _check(x, weight, epsilon)
    epsilon = float(epsilon)
    check_like("residual", residual, x)
    check_quantize(quantize, zero_point, x)
    if total is not None:
        scale = quantize if isinstance(quantize, torch.Tensor) else None
        check_written("total", total, x.dtype, x.shape, x.device, weight=weight, quantize=scale, zero_point=zero_point)
    if torch.compiler.is_compiling():
        *results, added = _fused_add(x, residual, weight, epsilon, *packed(quantize, zero_point))
        return served(results, quantize), added if total is None else total.copy_(added)
    return _add_rms_norm_now(x, residual, weight, epsilon, quantize, zero_point, total)


def _add_rms_norm_now(x, residual, weight, epsilon, quantize, zero_point, total) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
    if kernels.serve(x):
        into = (
            total
            if total is not None and has_memory(total) and all(_apart_or_same(total, t) for t in (x, residual))
            else torch.empty_like(x, memory_format=torch.contiguous_format)
        )
        if results := kernels.normalized(x, residual, weight, epsilon, quantize, zero_point, into):
            if into is total:
                mark_written(total)
            return served(results, quantize), into if total is None or into is total else total.copy_(into)
    y, added = _add_rms_norm(x, residual, weight, epsilon)
    result = finished(y, x.dtype, quantize, zero_point)
    return result, added if total is None else total.copy_(added)


def _apart_or_same(total: torch.Tensor, other: torch.Tensor) -> bool:
    """A tensor without memory, such as one of torch.func, is not looked at: no kernel serves it."""
    return not has_memory(other) or not overlap(total, other) or same_place(total, other)


def _check(x, weight, epsilon) -> None:
    check_rows("x", x)
    if x.shape[-1] == 0:
        raise BadTensorShapeError(f"x: expected rows of at least 1 element, got {list(x.shape)}")
    check_vector("weight", weight, x, x.shape[-1])
    check_epsilon(epsilon)


def _normalized(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """float32: y, rounded once from W."""
    w = wide(x)
    mean = sum_of_squares(w) / torch.full((), float(x.shape[-1]), dtype=w.dtype, device=w.device)
    inverse = inverse_root(mean + torch.full((), epsilon, dtype=w.dtype, device=w.device))
    return ((w * inverse) * weight.to(w.dtype)).to(torch.float32).contiguous()


def _added(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x.to(torch.float32) + residual.to(torch.float32)).to(x.dtype).contiguous()
    return _normalized(total, weight, epsilon), total


def _check_added(x, residual, weight, epsilon) -> None:
    _check(x, weight, epsilon)
    check_like("residual", residual, x)


def _fake_norm(x, *_) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def _fake_added(x, *_) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_norm(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)


_rms_norm = composite("rms_norm", 1, _normalized, _check, "Tensor weight, float epsilon", fake=_fake_norm)
_add_rms_norm = composite("add_rms_norm", 2, _added, _check_added, "Tensor residual, Tensor weight, float epsilon", fake=_fake_added)


# Operators for compiled graphs. They do not call the public function: it would call the operator again while torch compiles.
@torch.no_grad()
def _run(x, weight, epsilon, token, scale, zero_point) -> tuple[torch.Tensor, torch.Tensor]:
    return flat(_rms_norm_now(x, weight, epsilon, unpacked(token, scale), zero_point), token)


@torch.no_grad()
def _run_added(x, residual, weight, epsilon, token, scale, zero_point) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, total = _add_rms_norm_now(x, residual, weight, epsilon, unpacked(token, scale), zero_point, None)
    return *flat(y, token), total


_fused = operator(
    "rowwise_rms_norm",
    2,
    _run,
    lambda x, weight, epsilon, *_: _check(x, weight, epsilon),
    f"Tensor weight, float epsilon, {FUSED}",
    fake=lambda x, weight, epsilon, token, scale, zero_point: flat_fake(x, x.shape[-1], token, scale),
)
_fused_add = operator(
    "rowwise_add_rms_norm",
    3,
    _run_added,
    lambda x, residual, weight, epsilon, *_: _check_added(x, residual, weight, epsilon),
    f"Tensor residual, Tensor weight, float epsilon, {FUSED}",
    fake=lambda x, residual, weight, epsilon, token, scale, zero_point: (
        *flat_fake(x, x.shape[-1], token, scale),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
    ),
)
