"""The row-wise operators: one entry each, with the calls of ours, vLLM's and torch's, the reference, and the bytes that must move.

A call returns a tuple of tensors, the same for every implementation: (q, scale) of a quantizer, (q,) with a static scale, (y,); the sum with a
residual comes last. Inputs are `rows.RowInputs`: M rows of K columns, bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

import scaled_mm as sm
from scaled_mm.rowwise import reference

if TYPE_CHECKING:
    from scaled_mm.bench.path.rows import RowInputs, Rows

EPSILON = 1e-6
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operator:
    """One operator. Bytes: each input read once, each output written once.

    ours: what the user calls. vllm: the name in vLLM's library. width: columns of x over K. element, row: bytes for each of M x K and each of M.
    out: dtype of the first output. run: (inputs, i) -> results of ours. bind: (vLLM's operator, inputs, i) -> a call. expected: CPU rows -> results.
    torch: (inputs, i) -> results of torch's plain operators, None where torch has none.
    """

    name: str
    ours: str
    vllm: str
    element: int
    out: torch.dtype
    run: Callable[[RowInputs, int], Tensors]
    bind: Callable[[Callable, RowInputs, int], Callable[[], Tensors]]
    expected: Callable[[Rows], Tensors]
    torch: Callable[[RowInputs, int], Tensors] | None = None
    width: int = 1
    row: int = 0
    normalizes: bool = False
    adds: bool = False

    def traffic_bytes(self, M: int, K: int) -> int:
        return self.element * M * K + self.row * M + (2 * K if self.normalizes else 0)


def _run_quantize(given: RowInputs, i: int) -> Tensors:
    return sm.quantize_int8(given.x(i))


def _run_static(given: RowInputs, i: int) -> Tensors:
    return sm.quantize_int8(given.x(i), scale=given.scale)[:1]


def _run_norm_quantize(given: RowInputs, i: int) -> Tensors:
    return tuple(sm.rms_norm(given.x(i), given.weight, EPSILON, quantize="token"))


def _run_add_norm_quantize(given: RowInputs, i: int) -> Tensors:
    quantized, total = sm.add_rms_norm(given.x(i), given.residual(i), given.weight, EPSILON, quantize="token")
    return *quantized, total


def _run_add_norm(given: RowInputs, i: int) -> Tensors:
    return sm.add_rms_norm(given.x(i), given.residual(i), given.weight, EPSILON)


def _run_silu(given: RowInputs, i: int) -> Tensors:
    return (sm.silu_and_mul(given.x(i)),)


def _bind_quantize(operator: Callable, given: RowInputs, i: int) -> Callable[[], Tensors]:
    q, scale, x = given.out(i), given.row_scale(i), given.x(i)
    return _returning((q, scale), operator, q, x, scale, None)


def _bind_static(operator: Callable, given: RowInputs, i: int) -> Callable[[], Tensors]:
    q = given.out(i)
    return _returning((q,), operator, q, given.x(i), given.scale, None)


def _bind_norm_quantize(operator: Callable, given: RowInputs, i: int) -> Callable[[], Tensors]:
    q, scale = given.out(i), given.row_scale(i)
    return _returning((q, scale), operator, q, given.x(i), given.weight, scale, EPSILON, None, None)


def _bind_add_norm_quantize(operator: Callable, given: RowInputs, i: int) -> Callable[[], Tensors]:
    q, scale, residual = given.out(i), given.row_scale(i), given.residual(i).clone()  # it gets the sum
    return _returning((q, scale, residual), operator, q, given.x(i), given.weight, scale, EPSILON, None, residual)


def _bind_add_norm(operator: Callable, given: RowInputs, i: int) -> Callable[[], Tensors]:
    x, residual = given.x(i).clone(), given.residual(i).clone()  # both are written to
    return _returning((x, residual), operator, x, residual, given.weight, EPSILON)


def _bind_silu(operator: Callable, given: RowInputs, i: int) -> Callable[[], Tensors]:
    out = given.out(i)
    return _returning((out,), operator, out, given.x(i))


def _returning(results: Tensors, operator: Callable, *arguments: object) -> Callable[[], Tensors]:
    def call() -> Tensors:
        operator(*arguments)
        return results

    return call


def _norm(rows: Rows) -> torch.Tensor:
    return reference.rms_norm(rows.x, rows.weight, EPSILON)


def _expect_add_norm_quantize(rows: Rows) -> Tensors:
    y, total = reference.add_rms_norm(rows.x, rows.residual, rows.weight, EPSILON)
    return *reference.token(y), total


def _expect_add_norm(rows: Rows) -> Tensors:
    y, total = reference.add_rms_norm(rows.x, rows.residual, rows.weight, EPSILON)
    return y.to(rows.x.dtype), total


def _torch_add_norm(given: RowInputs, i: int) -> Tensors:
    total = given.x(i) + given.residual(i)
    return functional.rms_norm(total, total.shape[-1:], given.weight, EPSILON), total


def _torch_silu(given: RowInputs, i: int) -> Tensors:
    g, u = given.x(i).chunk(2, dim=-1)
    return (functional.silu(g) * u,)


INT8, BF16 = torch.int8, torch.bfloat16

OPERATORS: dict[str, Operator] = {
    one.name: one
    for one in (
        Operator(
            *("quantize_int8", "quantize_int8(x)", "dynamic_scaled_int8_quant", 3, INT8, _run_quantize, _bind_quantize),
            expected=lambda rows: reference.token(rows.x),
            row=4,
        ),
        Operator(
            *("quantize_int8_static", "quantize_int8(x, scale=)", "static_scaled_int8_quant", 3, INT8, _run_static, _bind_static),
            expected=lambda rows: (reference.static(rows.x, rows.scale),),
        ),
        Operator(
            *("rms_norm_quantize", 'rms_norm(x, weight, quantize="token")', "rms_norm_dynamic_per_token_quant", 3, INT8),
            *(_run_norm_quantize, _bind_norm_quantize),
            expected=lambda rows: reference.token(_norm(rows)),
            row=4,
            normalizes=True,
        ),
        Operator(
            *("add_rms_norm_quantize", 'add_rms_norm(x, residual, weight, quantize="token")', "rms_norm_dynamic_per_token_quant", 7, INT8),
            *(_run_add_norm_quantize, _bind_add_norm_quantize, _expect_add_norm_quantize),
            row=4,
            normalizes=True,
            adds=True,
        ),
        Operator(
            *("add_rms_norm", "add_rms_norm(x, residual, weight)", "fused_add_rms_norm", 8, BF16),
            *(_run_add_norm, _bind_add_norm, _expect_add_norm, _torch_add_norm),
            normalizes=True,
            adds=True,
        ),
        Operator(
            *("silu_and_mul", "silu_and_mul(x)", "silu_and_mul", 6, BF16, _run_silu, _bind_silu),
            expected=lambda rows: (reference.silu_and_mul(rows.x).to(rows.x.dtype),),
            torch=_torch_silu,
            width=2,
        ),
    )
}
