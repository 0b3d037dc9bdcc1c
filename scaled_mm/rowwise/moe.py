"""The row-wise operators of a mixture of experts: the order of tokens by expert (`moe_sort`), tokens quantized to the rows of their experts, the
activation between the products, and the weighted sum of the experts' outputs. `scaled_mm.layers.experts` puts them together."""

from __future__ import annotations

import functools
from operator import index
from typing import NamedTuple

import torch

from scaled_mm.core import fast
from scaled_mm.core.checks import check_device, check_strided, mark_written
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError, BadTensorStridesError, DeviceNotSupportedError
from scaled_mm.rowwise import kernels
from scaled_mm.rowwise.activation import gelu_and_mul, silu_and_mul
from scaled_mm.rowwise.arithmetic import wide
from scaled_mm.rowwise.int8 import quantize_int8
from scaled_mm.rowwise.int8_block import quantize_int8_block
from scaled_mm.rowwise.operands import check_float, check_rows, has_memory
from scaled_mm.rowwise.operators import operator

MOST_EXPERTS = 1024  # of the kernel: kMostExperts in csrc/core/kernel_abi.h
_MOST_ROWS = 2**31 - 1  # rows and experts are numbered in int32
_INDICES = (torch.int32, torch.int64)


class ExpertOrder(NamedTuple):
    """The permutation of the pairs (token, choice) that sorts them by expert. Pair (t, j) is copy t * choices + j.

    order: int32 [tokens * choices], the copy of each row; -1 past the last end.
    ends: int32 [num_experts], one past the last row of each expert: the `expert_offsets` of `grouped_scaled_mm`.
    inverse: int32, topk_ids' shape: the row of each copy; -1 if its expert is not local.
    """

    order: torch.Tensor
    ends: torch.Tensor
    inverse: torch.Tensor


@torch.no_grad()
def moe_sort(topk_ids: torch.Tensor, num_experts: int, *, expert_map: torch.Tensor | None = None) -> ExpertOrder:
    """Sorts the tokens of a mixture of experts by expert, stably: the rows of an expert are in the order of the tokens.

    topk_ids: int32 or int64 [tokens, choices], the experts of each token, from 0 to num_experts - 1; -1: an expert that is not local.
    expert_map: int32 [G]: id i stands for local expert expert_map[i], or for none if that is -1. topk_ids are from 0 to G - 1 then.
    num_experts: the local experts, from 1 to 2^31 - 1. The CUDA kernel takes up to 1024; beyond that torch operations serve.

    Returns an ExpertOrder (order, ends, inverse). Does not synchronize with the device; may be captured in a CUDA graph.
    Raises a ScaledMMError subclass that names the argument, what was expected and what was given. On a CPU an id out of range is a
    BadParamError. On a GPU, whose values the host does not read, it counts as -1.
    """
    num_experts = check_sort(topk_ids, num_experts, expert_map)
    if kernels.serve(topk_ids) and (served := _sort_by_kernel(topk_ids, num_experts, expert_map)):
        return ExpertOrder(*served)
    return ExpertOrder(*(_sort_operator if torch.compiler.is_compiling() else _sort)(topk_ids, num_experts, expert_map))


def check_sort(topk_ids, num_experts, expert_map=None) -> int:
    """num_experts, as an int. Checks the arguments of `moe_sort`."""
    _check_indices("topk_ids", topk_ids, *_INDICES)
    if topk_ids.dim() != 2:
        raise BadTensorShapeError(f"topk_ids: expected [tokens, choices], got {list(topk_ids.shape)}")
    experts = num_experts
    if isinstance(num_experts, torch.Tensor) and torch.jit.is_tracing():
        experts = int(num_experts)  # a size, of which torch warns that the graph will hold it as a constant
    elif isinstance(num_experts, (bool, torch.Tensor)):
        experts = None  # a tensor may be on a GPU, for which the host would wait
    elif not isinstance(num_experts, (int, torch.SymInt)):
        try:
            experts = index(num_experts)  # an integer of numpy
        except TypeError:
            experts = None
    if experts is None or not 1 <= experts <= _MOST_ROWS:
        raise BadParamError(f"num_experts: expected an integer from 1 to {_MOST_ROWS}, got {num_experts!r}")
    if expert_map is not None:
        _check_indices("expert_map", expert_map, torch.int32)
        check_device("expert_map", expert_map, topk_ids.device)
        if expert_map.dim() != 1:
            raise BadTensorShapeError(f"expert_map: expected [G], got {list(expert_map.shape)}")
    return experts


def _check_indices(name: str, tensor: object, *dtypes: torch.dtype) -> None:
    check_strided(name, tensor)
    if tensor.dtype not in dtypes:
        raise BadTensorDtypeError(f"{name}: expected {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}, got {tensor.dtype}")
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise DeviceNotSupportedError(f"{name}: expected a CUDA or CPU tensor, got one on {tensor.device}")


def check_ids(topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None = None) -> None:
    """BadParamError for a value on a CPU that is out of range. Not while something traces: it would record this reading of values."""
    if fast.intercepted():
        return
    size = num_experts if expert_map is None else expert_map.shape[0]
    for name, tensor, most in (("topk_ids", topk_ids, size), ("expert_map", expert_map, num_experts)):
        if tensor is None or not tensor.is_cpu or tensor.numel() == 0 or not has_memory(tensor):
            continue
        low, high = (int(value) for value in torch.aminmax(tensor))
        if low < -1 or high >= most:
            raise BadParamError(f"{name}: expected values from -1 to {most - 1}, got {low if low < -1 else high}")


def _sort_by_kernel(topk_ids, num_experts, expert_map) -> tuple[torch.Tensor, ...] | None:
    if num_experts > MOST_EXPERTS:
        return None
    shapes = (topk_ids.numel(),), (num_experts,), tuple(topk_ids.shape)
    order, ends, inverse = (kernels.empty(topk_ids, shape, torch.int32) for shape in shapes)
    launched = kernels.launch(kernels.Kind.MOE_SORT, 0, 0, 0.0, order, topk_ids, expert_map, ends, inverse)
    return (order, ends, inverse) if launched else None


def _sort(topk_ids, num_experts, expert_map) -> tuple[torch.Tensor, ...]:
    check_ids(topk_ids, num_experts, expert_map)
    ids = topk_ids.reshape(-1).to(torch.int64)
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        padded = torch.cat((expert_map.to(torch.int64), expert_map.new_full((1,), -1, dtype=torch.int64)))
        ids = padded[torch.where(known, ids, expert_map.shape[0])]
    here = (ids >= 0) & (ids < num_experts)
    by_expert, copies = torch.where(here, ids, num_experts).sort(stable=True)
    rows = torch.arange(ids.shape[0], device=ids.device)
    ends = torch.searchsorted(by_expert, torch.arange(num_experts, device=ids.device), right=True, out_int32=True)
    order = torch.where(rows < ends[-1], copies, -1)
    inverse = torch.where(here, torch.zeros_like(rows).scatter(0, copies, rows), -1)
    return order.to(torch.int32), ends, inverse.to(torch.int32).view(topk_ids.shape)


def _fake_sort(topk_ids, num_experts, expert_map) -> tuple[torch.Tensor, ...]:
    tokens, choices = topk_ids.shape
    shapes = (tokens * choices,), (num_experts,), (tokens, choices)
    return tuple(topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


_sort_operator = operator(
    "moe_sort", 3, _sort, check_sort, "SymInt num_experts, Tensor? expert_map", fake=_fake_sort, first="topk_ids", kernel=_sort_by_kernel
)


# ---- tokens quantized to the rows of their experts --------------------------------------------------------------------------


@torch.no_grad()
def quantize_to_rows(x: torch.Tensor, rows: torch.Tensor, block: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale): each row of x, quantized once and written to its rows of q, int8 [tokens * choices, K].

    x: a float dtype [tokens, K]. rows: the `inverse` of an ExpertOrder. block: as `quantize_int8_block`, scale is [.., ceil(K/128)]; else as
    `quantize_int8`, [.., 1]. Unassigned rows have any values: no expert reads them.
    """
    if torch.compiler.is_compiling():
        return _quantize_operator(x, rows, block)
    served = _quantize_by_kernel(x, rows, block) if kernels.serve(x) else None
    return _quantize(x, rows, block) if served is None else served


def _check_quantize(x, rows, block) -> None:
    check_rows("x", x, least=2)
    if x.dim() != 2:
        raise BadTensorShapeError(f"x: expected [tokens, K], got {list(x.shape)}")
    _check_named_rows(rows, x, "x")


def _check_named_rows(rows, like, name: str) -> None:
    _check_indices("rows", rows, torch.int32)
    check_device("rows", rows, like.device)
    if rows.dim() != 2 or rows.shape[0] != like.shape[0]:
        raise BadTensorShapeError(f"rows: expected [tokens, choices] with the tokens of {name} {list(like.shape)}, got {list(rows.shape)}")
    if not rows.is_contiguous():
        raise BadTensorStridesError(f"rows: expected a contiguous tensor, got strides {list(rows.stride())} for shape {list(rows.shape)}")


def _quantize_by_kernel(x, rows, block) -> tuple[torch.Tensor, torch.Tensor] | None:
    if x.shape[1] == 0:
        return None
    count, k = rows.numel(), x.shape[1]
    q, scale = kernels.empty(x, (count, k), torch.int8), kernels.empty(x, (count, -(-k // 128) if block else 1), torch.float32)
    launched = kernels.launch(kernels.Kind.MOE_QUANTIZE, int(block), 0, 0.0, q, x, rows, scale)
    return (q, scale) if launched else None


def _quantize(x, rows, block) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize_to(rows.numel(), x, rows, block)


def _quantize_to(count: int, x, rows, block) -> tuple[torch.Tensor, torch.Tensor]:
    values = quantize_int8_block(x) if block else quantize_int8(x)
    return tuple(_to_rows(count, each, rows) for each in values)


def _to_rows(count: int, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    named = torch.where(rows >= 0, rows, count).view(-1).to(torch.int64)
    to = values.new_zeros((count + 1, values.shape[1]))  # the last one takes the copies that have no row
    return to.index_copy_(0, named, values.repeat_interleave(rows.shape[1], dim=0, output_size=rows.numel()))[:count]


def _fake_quantize(x, rows, block) -> tuple[torch.Tensor, torch.Tensor]:
    count, k = rows.shape[0] * rows.shape[1], x.shape[1]
    return x.new_empty((count, k), dtype=torch.int8), x.new_empty((count, -(-k // 128) if block else 1), dtype=torch.float32)


_quantize_operator = operator(
    "moe_quantize", 2, _quantize, _check_quantize, "Tensor rows, bool block", fake=_fake_quantize, kernel=_quantize_by_kernel
)


def quantize_to_rows_on_cpu(count: int, x: torch.Tensor, rows: torch.Tensor, block: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_to_rows` for any number of rows of q, `count`. rows: int32 [tokens, choices]. BadParamError for one that is not below count."""
    _check_below("rows", rows, count)
    return _quantize_to(count, x, rows, block)


def _check_below(name: str, rows: torch.Tensor, count: int) -> None:
    if rows.numel() and (largest := int(rows.max())) >= count:
        raise BadParamError(f"{name}: expected values below {count}, the number of rows, got {largest}")


# ---- the activation between the products ------------------------------------------------------------------------------------

ACTIVATIONS = {
    "silu": (kernels.Function.SILU_AND_MUL, silu_and_mul),
    "gelu": (kernels.Function.GELU_AND_MUL, gelu_and_mul),
    "gelu_tanh": (kernels.Function.GELU_TANH_AND_MUL, functools.partial(gelu_and_mul, approximate="tanh")),
}
"""The names of gated activations: the kernel's function, and the operator."""


@torch.no_grad()
def activate(h: torch.Tensor, activation: str, ends: torch.Tensor, block: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale): the gated activation of each row of h, quantized: int8 [rows, I] for h [rows, 2 I].

    activation: one of `ACTIVATIONS`. ends: of an ExpertOrder. Unassigned rows have any values; kernels do not compute them.
    block: `quantize_int8_block` of the activation in h's dtype, scale [rows, ceil(I/128)]; else quantize="token", scale [rows, 1].
    """
    function, operator = ACTIVATIONS[activation]
    if kernels.serve(h) and h.shape[1] and (served := _activate_by_kernel(h, function, ends, block)):
        return served
    return quantize_int8_block(operator(h)) if block else operator(h, quantize="token")


def _activate_by_kernel(h, function, ends, block) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not block:
        return kernels.activated(h, function, "token", None, ends)
    y = kernels.activated(h, function, None, None, ends)
    return y and (kernels.quantized_by_block(y[0], False, False, 128, ends) or quantize_int8_block(y[0]))


# ---- the weighted sum ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def combine(y: torch.Tensor, topk_weights: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """out[t] = sum over j of topk_weights[t, j] * y[rows[t, j]], in order of j, without the j whose row is -1.

    y: a float dtype [rows, N]. topk_weights: a float dtype [tokens, choices]. rows: the `inverse` of an ExpertOrder.
    Products and sums round separately, in float32, for float32 y in float64. out: [tokens, N] of y's dtype to write to, apart from the rest.
    """
    if torch.compiler.is_compiling():
        result = _combine_operator(y, topk_weights, rows)
        return result if out is None else out.copy_(result)
    served = _combine_by_kernel(y, topk_weights, rows, out) if kernels.serve(y) else None
    if served is not None:
        return served
    result = _combine(y, topk_weights, rows)
    return result if out is None else out.copy_(result)


def combine_on_cpu(y: torch.Tensor, topk_weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`combine` for any `rows`. BadParamError for one that y does not have."""
    _check_below("rows", rows, y.shape[0])
    return _combine(y, topk_weights, rows)


def _check_combine(y, topk_weights, rows) -> None:
    check_rows("y", y, least=2)
    if y.dim() != 2:
        raise BadTensorShapeError(f"y: expected [rows, N], got {list(y.shape)}")
    check_weights(topk_weights, y)
    _check_named_rows(rows, topk_weights, "topk_weights")
    if rows.shape != topk_weights.shape:
        raise BadTensorShapeError(f"rows: expected {list(topk_weights.shape)} as topk_weights, got {list(rows.shape)}")


def check_weights(topk_weights: object, like: torch.Tensor) -> None:
    """A float tensor [tokens, choices] on the device of another."""
    check_float("topk_weights", topk_weights)
    check_device("topk_weights", topk_weights, like.device)
    if topk_weights.dim() != 2:
        raise BadTensorShapeError(f"topk_weights: expected [tokens, choices], got {list(topk_weights.shape)}")


def _combine_by_kernel(y, topk_weights, rows, out=None) -> torch.Tensor | None:
    if y.shape[0] == 0 or y.shape[1] == 0:
        return None
    into = kernels.empty(y, (rows.shape[0], y.shape[1]), y.dtype) if out is None else out
    if not kernels.launch(kernels.Kind.MOE_COMBINE, 0, 0, 0.0, into, y, topk_weights, rows):
        return None
    if out is not None:
        mark_written(out)
    return into


def _combine(y, topk_weights, rows) -> torch.Tensor:
    total = wide(y.new_zeros((rows.shape[0], y.shape[1])))
    weights = topk_weights.to(total.dtype)
    padded = torch.nn.functional.pad(y, (0, 0, 0, 1))  # the last row: of choices without one. autocast refuses `cat` of some dtypes
    for j in range(rows.shape[1]):
        here = rows[:, j, None] >= 0
        row = torch.where(here[:, 0], rows[:, j], y.shape[0]).to(torch.int64)
        total = torch.where(here, total + weights[:, j, None] * padded[row].to(total.dtype), total)
    return total.to(torch.float32).to(y.dtype)


def _fake_combine(y, topk_weights, rows) -> torch.Tensor:
    return y.new_empty((rows.shape[0], y.shape[1]))


_combine_operator = operator(
    "moe_combine", 1, _combine, _check_combine, "Tensor topk_weights, Tensor rows", fake=_fake_combine, first="y", kernel=_combine_by_kernel
)
