"""Linear layers of an input whose K is divided over the ranks.

Either the weight's K is divided too: each rank multiplies its part, and int32 sums are reduced before anything is scaled. Or its N is divided: the
input is gathered, each rank computes its block of the outputs, and these are gathered (`gather_linear`).
"""

from __future__ import annotations

import torch

from scaled_mm.errors import K_BOUNDS, AccumulatorOverflowError, BadParamError, BadTensorDtypeError, BadTensorShapeError
from scaled_mm.layers.linear import check_linear, int8_linear, transposed
from scaled_mm.layers.workspace import renamed
from scaled_mm.nn.quantized import QuantizedActivation
from scaled_mm.parallel import choice, collectives
from scaled_mm.parallel.overlap import summed
from scaled_mm.parallel.ranks import Ranks, part_of
from scaled_mm.products.gemm import scaled_mm
from scaled_mm.products.prepared_weight import PreparedWeight
from scaled_mm.rowwise.dynamic import scale_of
from scaled_mm.rowwise.int8 import quantize_int8
from scaled_mm.rowwise.operands import check_rows


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
    chunks: with exact=True the rows are divided into so many chunks. While one chunk is reduced, the next is multiplied.

    Returns [rows of this rank, N]: rows `part_of(M, rank, size)` of the M rows of x. With exact=True the bits are those of `int8_linear` on one
    process, for any number of ranks. K of all ranks together: at most 131071, or 65793 with a zero point, or sums overflow; not checked here,
    `RowParallelInt8Linear` checks it. No gradient.
    Raises a ScaledMMError subclass that names the argument: on CPUs on all ranks. On GPUs, if one rank raises, the others wait until the group's
    timeout.
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
def gather_linear(
    x_shard: torch.Tensor,
    weight_shard: torch.Tensor | PreparedWeight,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group=None,
    input_scale: torch.Tensor | None = None,
    input_zero_point: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    gather_input: str = "int8",
    gather_output: bool = True,
) -> torch.Tensor:
    """y = x W^T + bias, where x is split along K and W along N over the ranks of a group: x is gathered, then the outputs.

    x_shard: float16, bfloat16 or float32 [..., K of this rank]; the same shape and dtype on all ranks.
    weight_shard: int8 [N of this rank, K of all ranks], or `prepare_weight` of its transpose. weight_scale: float32, one value, [N of this rank],
    [1, N of this rank] or [N of this rank, 1]. bias: [N of this rank] or [1, N of this rank], in the output's dtype or float32.
    The arguments below are the same on all ranks. group, input_scale, input_zero_point, out_dtype: see `reduce_scatter_linear`.
    gather_input: "float": x itself is gathered, and each rank quantizes whole rows: one collective, for few tokens (with dynamic scales faster up to
    256 on two H200s). "int8": each rank quantizes its part with the scale of the whole row, which takes an all-reduce of one float a row unless
    input_scale is given, and int8 is gathered: half of the bytes of a 16-bit x, for many tokens. The bits are the same.
    gather_output: True: all ranks get the outputs of all ranks, whose N must be equal. False: [..., N of this rank].

    Returns [..., N of all ranks] or [..., N of this rank], with the bits of `int8_linear` on one process. Bytes that a rank sends for each output,
    with 16-bit x and outputs: 2 + 2 K / N ("float") or 2 + K / N ("int8"), times (ranks - 1) / ranks. No gradient.
    Raises a ScaledMMError subclass that names the argument: on CPUs on all ranks. On GPUs, if one rank raises, the others wait until the group's
    timeout.
    """
    ranks = Ranks.of(group)

    def check():
        choice.check_gather(gather_input)
        if not isinstance(gather_output, bool):
            raise BadParamError(f"gather_output: expected True or False, got {gather_output!r}")
        return _checked(x_shard, weight_shard, weight_scale, bias, input_scale, input_zero_point, out_dtype, ranks.size)

    def facts(found) -> dict[str, object]:
        b, dtype = found
        sizes = {"shape": list(x_shard.shape), "dtype": x_shard.dtype, "quantization": kind_of(input_scale, input_zero_point)}
        options = {"gather_input": gather_input, "gather_output": gather_output}
        return sizes | options | ({"N": (b.b if isinstance(b, PreparedWeight) else b).shape[1], "out_dtype": dtype} if gather_output else {})

    b, dtype = ranks.checked(device_of(x_shard), check, facts, **_GATHER_ARGUMENTS)
    found = gathered(x_shard, ranks, gather_input, input_scale, input_zero_point)
    if isinstance(found, QuantizedActivation):
        scales = found.scale.reshape(-1, 1), weight_scale.reshape(-1)
        y = scaled_mm(_rows_of(found.q), b, *scales, bias, out_dtype=dtype, a_zero_point=found.zero_point)
        y = y.view(*x_shard.shape[:-1], y.shape[-1])
    else:
        static = dict(input_scale=input_scale, input_zero_point=input_zero_point)
        y = int8_linear(found, weight_shard, weight_scale, bias, **static, out_dtype=dtype)
    return collectives.gather_columns(y, ranks) if gather_output else y


def gathered(x: torch.Tensor, ranks: Ranks, gather_input: str, input_scale, input_zero_point) -> torch.Tensor | QuantizedActivation:
    """[..., K of all ranks] from x [..., K of this rank]: in its own dtype, or with gather_input="int8" quantized as whole rows are."""
    if gather_input == "float":
        return collectives.gather_columns(x, ranks)
    q, scale, zero_point = quantized(_rows_of(x), ranks, input_scale, input_zero_point)
    return QuantizedActivation(collectives.gather_columns(q.view(x.shape), ranks), scale, x.dtype, zero_point)


@torch.no_grad()
def all_gather_rows(mine: torch.Tensor | QuantizedActivation, rows: int, *, group=None) -> torch.Tensor | QuantizedActivation:
    """All rows from those of each rank, `part_of(rows, rank, size)`, which `reduce_scatter_linear` leaves: [rows, N] from [rows of this rank, N].

    mine: a tensor of any dtype, or a `QuantizedActivation` of int8 rows with a scale a row, or one. The scales travel in the same message, N + 4
    bytes a row, or in a collective of their own from `collectives.APART` values on. rows: of all ranks. Raises a ScaledMMError subclass that names
    the argument; on CPUs on all ranks.
    """
    ranks = Ranks.of(group)

    def check() -> None:
        q = mine.q if isinstance(mine, QuantizedActivation) else mine
        if not isinstance(q, torch.Tensor) or q.dim() < 1:
            raise BadParamError(f"mine: expected a tensor or a QuantizedActivation, got {type(mine).__name__}")
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise BadParamError(f"rows: expected a non-negative integer, got {rows!r}")
        part = part_of(rows, ranks.rank, ranks.size)
        if q.shape[0] != part.stop - part.start:
            raise BadTensorShapeError(f"mine: expected {part.stop - part.start} of {rows} rows, got {list(q.shape)}")
        if isinstance(mine, QuantizedActivation) and (q.dim() != 2 or mine.scale.numel() not in (1, q.shape[0])):
            raise BadTensorShapeError(f"mine: expected int8 [rows, N] with a scale a row or one, got {list(q.shape)} and {list(mine.scale.shape)}")
        if isinstance(mine, QuantizedActivation) and (q.dtype is not torch.int8 or mine.scale.dtype is not torch.float32):
            raise BadTensorDtypeError(f"mine: expected int8 with float32 scales, got {q.dtype} with {mine.scale.dtype}")
        if isinstance(mine, QuantizedActivation) and mine.zero_point is not None and mine.zero_point.numel() != 1:
            raise BadTensorShapeError(f"mine: expected no zero point or one, got {list(mine.zero_point.shape)}")

    def facts(_) -> dict[str, object]:
        if isinstance(mine, QuantizedActivation):
            return {"rows": rows, "kind": f"quantized {list(mine.shape[1:])}"}
        return {"rows": rows, "kind": f"{mine.dtype} {list(mine.shape[1:])}"}

    ranks.checked(device_of(mine.q if isinstance(mine, QuantizedActivation) else mine), check, facts, rows="rows", kind="mine")
    if not isinstance(mine, QuantizedActivation):
        return collectives.gather_rows(mine, rows, ranks)
    k, scale = mine.q.shape[1], mine.scale.reshape(-1, 1).expand(mine.q.shape[0], 1)
    if rows * k >= collectives.APART:
        return QuantizedActivation(*(collectives.gather_rows(part, rows, ranks) for part in (mine.q, scale)), mine.dtype, mine.zero_point)
    packed = collectives.gather_rows(torch.cat((mine.q, collectives.bytes_of(scale)), 1), rows, ranks)
    return QuantizedActivation(packed[:, :k].contiguous(), collectives.of_bytes(packed[:, k:], torch.float32), mine.dtype, mine.zero_point)


@torch.no_grad()
def _linear(all_rows, x, weight, weight_scale, bias, group, input_scale, input_zero_point, out_dtype, exact, via, chunks) -> torch.Tensor:
    ranks = Ranks.of(group)

    def check():
        choice.check(via, chunks)
        return _checked(x, weight, weight_scale, bias, input_scale, input_zero_point, out_dtype)

    def facts(found) -> dict[str, object]:
        b, dtype = found
        n = (b.b if isinstance(b, PreparedWeight) else b).shape[1]
        sizes = {"number of rows": x.shape[:-1].numel(), "N": n, "out_dtype": dtype, "quantization": kind_of(input_scale, input_zero_point)}
        return sizes | {"bias": bias is not None, "exact": bool(exact), "via": via, "chunks": chunks}

    b, dtype = ranks.checked(device_of(x), check, facts, **_ARGUMENTS)
    rows = _rows_of(x)
    if exact:
        q, scale, zero_point = quantized(rows, ranks, input_scale, input_zero_point)
        y = linear_of_quantized(q, scale, zero_point, b, weight_scale, bias, dtype, ranks, all_rows, via, chunks)
    else:
        options = dict(input_scale=input_scale, input_zero_point=input_zero_point, out_dtype=dtype)
        reduce = collectives.all_reduce if all_rows else collectives.reduce_scatter
        y = reduce(int8_linear(rows, weight, weight_scale, **options), ranks)
        y = y if bias is None else (y.float() + bias.float()).to(dtype)
    return y.view(*x.shape[:-1], y.shape[-1]) if all_rows else y


_ARGUMENTS = {
    "number of rows": "x_shard",
    "N": "weight_shard",
    "out_dtype": "out_dtype",
    "quantization": "input_scale",
    "bias": "bias",
    "exact": "exact",
    "via": "via",
    "chunks": "chunks",
}

_GATHER_ARGUMENTS = {
    "shape": "x_shard",
    "dtype": "x_shard",
    "quantization": "input_scale",
    "gather_input": "gather_input",
    "gather_output": "gather_output",
    "N": "weight_shard",
    "out_dtype": "out_dtype",
}


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.new_empty((x.shape[:-1].numel(), 0))


def check_k(k: int, zero_point: bool) -> None:
    """AccumulatorOverflowError if int32 sums over K of all ranks could overflow."""
    if k > K_BOUNDS[zero_point]:
        raise AccumulatorOverflowError(f"weight_shard: expected K of all ranks of at most {K_BOUNDS[zero_point]}, got {k}")


def check_part(name: str, shape: torch.Size, k: int, size: int) -> None:
    """BadTensorShapeError, with the argument's name, unless shape is [..., K / ranks]."""
    if shape[-1] * size != k:
        raise BadTensorShapeError(f"{name}: expected [..., K of this rank] with K = {k} / {size} ranks, got {list(shape)}")


def device_of(tensor: object) -> torch.device | None:
    return tensor.device if isinstance(tensor, torch.Tensor) else None


def kind_of(input_scale: object, input_zero_point: object) -> str:
    """What ranks must have in common of how an input is quantized, as they run other collectives otherwise."""
    return "dynamic" if input_scale is None else "static" if input_zero_point is None else "static asymmetric"


def linear_of_quantized(q, scale, zero_point, b, b_scale, bias, dtype, ranks: Ranks, all_rows: bool, via: str, chunks: int) -> torch.Tensor:
    """[M, N] with all_rows, else this rank's rows, from this rank's columns of a quantized input.

    q: int8 [M, K of this rank], quantized with the scales of whole rows; scale: one value or [M, 1]; zero_point: one value, [M, 1] or None.
    b: [K of this rank, N]. The rest: see `all_reduce_linear`.
    """
    m, of_all = q.shape[0], via == "all_reduce"

    def multiply(q: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        return scaled_mm(q, b, out_dtype=torch.int32, a_zero_point=zero_point)

    acc = summed(multiply, q, zero_point, ranks, of_all, chunks)
    y = scaled(acc, scale if of_all or scale.numel() == 1 else scale[part_of(m, ranks.rank, ranks.size)], b_scale, bias, dtype)
    return collectives.gather_rows(y, m, ranks) if all_rows and not of_all else y


def quantized(rows, ranks: Ranks, input_scale, input_zero_point) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(q int8, scale float32 [M, 1] or one value, zero point or None) of this rank's part of each row, with the scale of the whole row."""
    if input_scale is not None:
        given = quantize_int8(rows, scale=input_scale, zero_point=input_zero_point)
        return given[0], input_scale.reshape(1, 1), None if input_zero_point is None else given.zero_point.reshape(1)
    if rows.is_cuda:  # one kernel, which also quantizes
        scale = quantize_int8(rows)[1]
    else:
        scale = scale_of(rows.abs().amax(1, keepdim=True) if rows.shape[1] else rows.new_zeros(rows.shape[0], 1))
    scale = collectives.all_reduce_max(scale, ranks)
    return quantize_int8(rows, scale=scale)[0], scale, None


def scaled(acc: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """cast( (f32(acc) * b_scale) * a_scale + bias ), each operation rounded separately: the formula of `scaled_mm`.

    acc: int32 [M, N]. a_scale: float32, one value or [M, 1]. b_scale: float32, N values or one. bias: N values of a float dtype.
    """
    y = acc.new_empty(acc.shape, dtype=dtype)
    scaled_into(y, acc, a_scale, b_scale, bias, torch.empty_like(acc, dtype=torch.float32))
    return y


def scaled_into(out, acc, a_scale, b_scale, bias, buffer) -> None:
    """`scaled` into out [M, N]. buffer: float32 [M, N], apart from acc."""
    y = torch.mul(acc, b_scale.reshape(1, -1), out=buffer)
    if bias is None:
        torch.mul(y, a_scale, out=out)
    else:
        torch.add(y.mul_(a_scale), bias.reshape(1, -1), out=out)


def _checked(x, weight, weight_scale, bias, input_scale, input_zero_point, out_dtype, ranks: int | None = None) -> tuple[object, torch.dtype]:
    """(the weight as `scaled_mm` takes it, the output's dtype). ranks: over which x is divided, if the weight has all of K.

    Raises a ScaledMMError that names the argument."""
    with renamed({"x": "x_shard", "weight": "weight_shard"}):
        check_rows("x", x)
        b = weight if isinstance(weight, PreparedWeight) else transposed(weight)
        k, n = (b.b if isinstance(b, PreparedWeight) else b).shape[-2:]
        if ranks is not None:
            check_part("x", x.shape, k, ranks)
            check_k(k, input_zero_point is not None)
            k = x.shape[-1]
        dtype = x.dtype if out_dtype is None else out_dtype
        check_linear(x, b, k, n, weight_scale, bias, input_scale, input_zero_point, dtype)
    return b, dtype
