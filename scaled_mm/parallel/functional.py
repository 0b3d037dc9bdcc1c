"""Row-parallel linear layers: each rank multiplies its part of K, and int32 sums are reduced before anything is scaled."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scaled_mm.core.checks import check_device, has_shape
from scaled_mm.errors import BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.layers.linear import int8_linear
from scaled_mm.nn.quantized import QuantizedActivation
from scaled_mm.parallel import choice, collectives
from scaled_mm.parallel.overlap import summed
from scaled_mm.parallel.ranks import Ranks, rows_of
from scaled_mm.products.gemm import scaled_mm
from scaled_mm.products.prepared_weight import PreparedWeight
from scaled_mm.rowwise.arithmetic import FLOATS
from scaled_mm.rowwise.dynamic import scale_of
from scaled_mm.rowwise.int8 import quantize_int8
from scaled_mm.rowwise.operands import check_float, check_rows, check_static


def reduce_scatter_linear(
    x_shard: torch.Tensor,
    weight_shard: torch.Tensor | PreparedWeight,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group=None,
    input_scale: torch.Tensor | None = None,
    input_zero_point: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    exact: bool = True,
    chunks: int = 1,
) -> torch.Tensor:
    """The rows of y = x W^T + bias that belong to this rank, where x and W are split along K over the ranks of a group.

        scale = max over ranks of the row's scale, as `quantize_int8` has it; or input_scale
        acc   = sum over ranks of quantize_int8(x_shard, scale=scale) . weight_shard^T        int32, exact in any order
        y     = cast( (f32(acc) * weight_scale) * scale + bias )                             as `int8_linear`

    x_shard: float16, bfloat16 or float32 [..., K of this rank], the same number of rows on all ranks; the parts of K may differ.
    weight_shard: int8 [N, K of this rank], or `prepare_weight` of its transpose.
    weight_scale: float32, one value, [N], [1, N] or [N, 1]. bias: [N] or [1, N], in the output's dtype or float32. These, and all arguments below,
    are the same on all ranks.
    group: a process group, a `DeviceMesh` with one dimension, or None: all processes. input_scale, input_zero_point: static, as of `int8_linear`.
    out_dtype: float16, bfloat16 or float32; default: x's dtype.
    exact: False: each rank quantizes by itself and the products are rounded to out_dtype before they are summed, as engines do; the result then
    depends on the number of ranks.
    chunks: with exact=True rows are multiplied in so many chunks, each while the one before travels; the same on all ranks.

    Returns [rows of this rank, N]: rows `rows_of(M, rank, size)` of the M rows of x. With exact=True the bits are those of `int8_linear` on one
    process, for any number of ranks. K of all ranks together: at most 131071, or 65793 with a zero point, or sums overflow; not checked here,
    `RowParallelInt8Linear` checks it. No gradient.
    Raises a ScaledMMError subclass that names the argument. A rank that raises alone leaves the others waiting until the group's timeout.
    """
    return _linear(False, x_shard, weight_shard, weight_scale, bias, group, input_scale, input_zero_point, out_dtype, exact, "reduce_scatter", chunks)


def all_reduce_linear(
    x_shard: torch.Tensor,
    weight_shard: torch.Tensor | PreparedWeight,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group=None,
    input_scale: torch.Tensor | None = None,
    input_zero_point: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    exact: bool = True,
    via: str = "all_reduce",
    chunks: int = 1,
) -> torch.Tensor:
    """As `reduce_scatter_linear`, but every rank gets all rows: [..., N].

    via: with exact=True: "all_reduce": int32 sums go to all ranks, 8 bytes an element; "reduce_scatter": each rank gets the sums of its rows, scales
    them and sends them to all, 6 bytes an element for 16-bit outputs, but a second latency. The bits are the same.
    """
    return _linear(True, x_shard, weight_shard, weight_scale, bias, group, input_scale, input_zero_point, out_dtype, exact, via, chunks)


@torch.no_grad()
def all_gather_rows(mine: torch.Tensor | QuantizedActivation, rows: int, *, group=None) -> torch.Tensor | QuantizedActivation:
    """All rows from those of each rank, `rows_of(rows, rank, size)`, which `reduce_scatter_linear` leaves: [rows, N] from [rows of this rank, N].

    mine: a tensor of any dtype, or a `QuantizedActivation` of int8 rows with a scale a row, or one, which travels in one collective of N + 4 bytes a
    row. rows: of all ranks. Raises a ScaledMMError subclass that names the argument; on CPUs on all ranks.
    """
    ranks = Ranks.of(group)

    def check() -> None:
        q = mine.q if isinstance(mine, QuantizedActivation) else mine
        if not isinstance(q, torch.Tensor) or q.dim() < 1:
            raise BadParamError(f"mine: expected a tensor or a QuantizedActivation, got {type(mine).__name__}")
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise BadParamError(f"rows: expected a non-negative integer, got {rows!r}")
        part = rows_of(rows, ranks.rank, ranks.size)
        if q.shape[0] != part.stop - part.start:
            raise BadTensorShapeError(f"mine: expected {part.stop - part.start} of {rows} rows, got {list(q.shape)}")
        if isinstance(mine, QuantizedActivation) and (q.dim() != 2 or mine.scale.numel() not in (1, q.shape[0])):
            raise BadTensorShapeError(f"mine: expected int8 [rows, N] with a scale a row or one, got {list(q.shape)} and {list(mine.scale.shape)}")
        if isinstance(mine, QuantizedActivation) and mine.zero_point is not None and mine.zero_point.numel() != 1:
            raise BadTensorShapeError(f"mine: expected no zero point or one, got {list(mine.zero_point.shape)}")

    bytes_of_row = lambda _: mine.shape[1:].numel() * (1 if isinstance(mine, QuantizedActivation) else mine.element_size())  # noqa: E731
    tensor = mine.q if isinstance(mine, QuantizedActivation) else mine
    ranks.checked(tensor, check, rows__number=lambda _: rows, mine__bytes_of_a_row=bytes_of_row)
    if not isinstance(mine, QuantizedActivation):
        return collectives.gather_rows(mine, rows, ranks)
    k = mine.q.shape[1]
    packed = torch.cat((mine.q, collectives.bytes_of(mine.scale.reshape(-1, 1).expand(mine.q.shape[0], 1))), 1)
    packed = collectives.gather_rows(packed, rows, ranks)
    return QuantizedActivation(packed[:, :k].contiguous(), packed[:, k:].contiguous().view(torch.float32), mine.dtype, mine.zero_point)


@torch.no_grad()
def _linear(everywhere, x, weight, weight_scale, bias, group, input_scale, input_zero_point, out_dtype, exact, via, chunks) -> torch.Tensor:
    ranks = Ranks.of(group)

    def check():
        choice.check(via, chunks)
        return _checked(x, weight, weight_scale, bias, input_scale, input_zero_point, out_dtype)

    same = {"via__collectives": lambda _: choice.VIA.index(via), "chunks__number": lambda _: chunks}
    b, dtype = ranks.checked(x, check, **_same(x, input_scale, input_zero_point), **same)
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.new_empty((x.shape[:-1].numel(), 0))
    if exact:
        q, scale, zero_point = quantized(rows, ranks, input_scale, input_zero_point)
        y = product_of_whole_rows(q, scale, zero_point, b, weight_scale, bias, dtype, ranks, everywhere, via, chunks)
    else:
        options = dict(input_scale=input_scale, input_zero_point=input_zero_point, out_dtype=dtype)
        reduce = collectives.sum_to_all if everywhere else collectives.sum_to_rows
        y = reduce(int8_linear(rows, weight, weight_scale, **options), ranks)
        y = y if bias is None else (y.float() + bias.float()).to(dtype)
    return y.view(*x.shape[:-1], y.shape[-1]) if everywhere else y


def product_of_whole_rows(q, scale, zero_point, b, b_scale, bias, dtype, ranks: Ranks, everywhere: bool, via: str, chunks: int) -> torch.Tensor:
    """The output, [M, N] with everywhere, else this rank's rows, of this rank's part of rows that were quantized with the scales of whole rows.

    q: int8 [M, K]; scale: one value or [M, 1]; zero_point: one value, [M, 1] or None; b: [K, N]. The rest: see `all_reduce_linear`.
    """
    m, of_all = q.shape[0], via == "all_reduce"

    def multiply(q: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        return scaled_mm(q, b, out_dtype=torch.int32, a_zero_point=zero_point)

    acc = summed(multiply, q, zero_point, ranks, of_all, chunks)
    y = scaled(acc, scale if of_all or scale.numel() == 1 else scale[rows_of(m, ranks.rank, ranks.size)], b_scale, bias, dtype)
    return collectives.gather_rows(y, m, ranks) if everywhere and not of_all else y


def _same(x, input_scale, input_zero_point) -> dict[str, Callable]:
    """What all ranks must have in common: see `Ranks.checked`."""
    kind = (input_scale is not None) + (input_zero_point is not None)
    return {
        "x_shard__number_of_rows": lambda _: x.shape[:-1].numel(),
        "weight_shard__N": lambda found: (found[0].b if isinstance(found[0], PreparedWeight) else found[0]).shape[1],
        "input_scale__kind_of_inputs": lambda _: kind,
    }


def quantized(rows, ranks: Ranks, input_scale, input_zero_point) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(q int8, scale float32 [M, 1] or one value, zero point or None) of this rank's part of each row, with the scale of the whole row."""
    if input_scale is not None:
        given = quantize_int8(rows, scale=input_scale, zero_point=input_zero_point)
        return given[0], input_scale.reshape(1, 1), None if input_zero_point is None else given.zero_point.reshape(1)
    if rows.is_cuda:  # one kernel, which also quantizes
        scale = quantize_int8(rows)[1]
    else:
        scale = scale_of(rows.abs().amax(1, keepdim=True) if rows.shape[1] else rows.new_zeros(rows.shape[0], 1))
    scale = collectives.largest_scales(scale, ranks)
    return quantize_int8(rows, scale=scale)[0], scale, None


def scaled(acc: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """cast( (f32(acc) * b_scale) * a_scale + bias ), each operation rounded separately: the formula of `scaled_mm`."""
    y = acc.to(torch.float32).mul_(b_scale.reshape(1, -1)).mul_(a_scale)
    if bias is not None:
        y.add_(bias.reshape(1, -1).float())
    return y.to(dtype)


def _checked(x, weight, weight_scale, bias, input_scale, input_zero_point, out_dtype) -> tuple[torch.Tensor | PreparedWeight, torch.dtype]:
    """(the weight as `scaled_mm` takes it, the output's dtype)."""
    check_rows("x_shard", x)
    stored = weight.b.t() if isinstance(weight, PreparedWeight) else weight
    if not isinstance(stored, torch.Tensor) or stored.dtype is not torch.int8 or stored.dim() != 2:
        got = f"{stored.dtype} {list(stored.shape)}" if isinstance(stored, torch.Tensor) else type(stored).__name__
        raise BadTensorDtypeError(f"weight_shard: expected int8 [N, K of this rank], or the result of prepare_weight, got {got}")
    n, k = stored.shape
    check_device("weight_shard", stored, x.device)
    if x.shape[-1] != k:
        raise BadTensorShapeError(f"x_shard: expected [..., {k}] as weight_shard, got {list(x.shape)}")
    dtype = x.dtype if out_dtype is None else out_dtype
    if dtype not in FLOATS:
        raise BadTensorDtypeError(f"out_dtype: expected float16, bfloat16 or float32, got {dtype!r}")
    check_float("weight_scale", weight_scale, (torch.float32,))
    check_device("weight_scale", weight_scale, x.device)
    if weight_scale.numel() != 1 and not has_shape(weight_scale, (n,), (1, n), (n, 1)):
        raise BadTensorShapeError(f"weight_scale: expected one value, [{n}], [1, {n}] or [{n}, 1], got {list(weight_scale.shape)}")
    if bias is not None:
        check_float("bias", bias, (dtype, torch.float32))
        check_device("bias", bias, x.device)
        if not has_shape(bias, (n,), (1, n)):
            raise BadTensorShapeError(f"bias: expected [{n}] or [1, {n}], got {list(bias.shape)}")
    if input_scale is not None:
        check_static(input_scale, input_zero_point, x, "input_scale", "input_zero_point")
    elif input_zero_point is not None:
        raise BadParamError("input_zero_point: expected None without input_scale, got a zero point")
    return (weight if isinstance(weight, PreparedWeight) else weight.t()), dtype
