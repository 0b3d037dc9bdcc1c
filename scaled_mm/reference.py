"""The reference for bit-for-bit comparison of every kernel and the CPU backend: simple, slow, and independent of them.

    acc[m,n] = sum_k (a[m,k] - a_zero_point[m]) * (b[k,n] - b_zero_point[n])
    out[m,n] = cast( (f32(acc) * b_scale[n]) * a_scale[m] + bias[n] )

docs/design/numerics.md derives the bounds. The sum is a float64 product of the operands with zero points subtracted. Since
|a - za| <= 255 and |b - zb| <= 255, every partial sum is an integer of magnitude at most K * 255^2. float64 represents every integer
below 2^53, so no addition rounds, in any order (K up to 1.3e11; the operator's limit is 131071). The correction terms that kernels
use do not occur here, so the comparison checks them too.
"""

from __future__ import annotations

import torch

_FLOAT64_EXACT = 1 << 53
# Maximum number of float64 elements of one operand, or of the product, at a time: 64 MiB each.
_CHUNK_ELEMENTS = 8 << 20

_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@torch.no_grad()
def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    a_zero_point: torch.Tensor | None = None,
    b_zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """The defined result, a contiguous [M, N] or [B, M, N] tensor of `out_dtype` on `a`'s device.

    a: int8 [M, K]; b: int8 [K, N]; any strides. a_scale: float32, one value, [M] or [M, 1]; b_scale: float32, one
    value, [N] or [1, N]; both None for `out_dtype=torch.int32`, which returns the accumulators. bias: [N] or [1, N].
    Zero points: int8 or int32, a's shaped like a_scale, b's like b_scale. A batch is a loop over products. The first dimension of a 3-d
    argument is the batch; size 1 there, or fewer dimensions, means that all products share the argument.

    Raises OverflowError if the accumulator exceeds 32 bits, or if float64 could round. Reading the values for this check synchronizes
    with the device.
    """
    if a.dim() == 3 or b.dim() == 3:
        inputs = (a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point)
        return _batch(inputs, out_dtype)
    acc = accumulators(a, b, a_zero_point, b_zero_point)
    return acc if out_dtype is torch.int32 else scaled(acc, a_scale, b_scale, bias, out_dtype)


@torch.no_grad()
def accumulators(
    a: torch.Tensor, b: torch.Tensor, a_zero_point: torch.Tensor | None = None, b_zero_point: torch.Tensor | None = None
) -> torch.Tensor:
    """acc of the formula above, int32 [M, N]. Operands and errors as in `scaled_mm`, without a batch."""
    m, n = a.shape[0], b.shape[1]
    a_zero_point, b_zero_point = _column(a_zero_point, m), _row(b_zero_point, n)
    acc = torch.empty((m, n), dtype=torch.int32, device=a.device)
    row_chunk = max(1, _CHUNK_ELEMENTS // max(a.shape[1], 1))
    column_chunk = max(1, _CHUNK_ELEMENTS // max(a.shape[1], row_chunk, 1))
    for left in range(0, n, column_chunk):
        columns = slice(left, left + column_chunk)
        right = _adjusted(b[:, columns], None if b_zero_point is None else b_zero_point[:, columns])
        for top in range(0, m, row_chunk):
            rows = slice(top, top + row_chunk)
            acc[rows, columns] = _integer_product(_adjusted(a[rows], None if a_zero_point is None else a_zero_point[rows]), right)
    return acc


@torch.no_grad()
def scaled(acc: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """out of the formula above, [M, N], from int32 accumulators [M, N]. Scales and bias as in `scaled_mm`, without a batch."""
    m, n = acc.shape
    a_scale, b_scale, bias = _column(a_scale, m), _row(b_scale, n), _row(bias, n)
    out = torch.empty((m, n), dtype=out_dtype, device=acc.device)
    step = max(1, _CHUNK_ELEMENTS // max(n, 1))
    for top in range(0, m, step):
        rows = slice(top, top + step)
        value = acc[rows].to(torch.float32)  # rounds to nearest even from 2^24 on
        value = value * b_scale
        value = value * a_scale[rows]
        if bias is not None:
            value = value + bias.to(torch.float32)
        out[rows] = value.to(out_dtype)
    return out


def _batch(inputs: tuple[torch.Tensor | None, ...], out_dtype: torch.dtype) -> torch.Tensor:
    a, b = inputs[:2]
    sizes = {t.shape[0] for t in (a, b) if t.dim() == 3} - {1}
    if len(sizes) > 1:
        raise ValueError(f"batches of {sizes} products do not go together")
    batch = sizes.pop() if sizes else 1
    out = torch.empty((batch, a.shape[-2], b.shape[-1]), dtype=out_dtype, device=a.device)
    for i in range(batch):
        a_i, b_i, a_scale, b_scale, bias, a_zero_point, b_zero_point = (
            t if t is None or t.dim() < 3 else t.expand(batch, *t.shape[1:])[i] for t in inputs
        )
        out[i] = scaled_mm(a_i, b_i, a_scale, b_scale, bias, out_dtype=out_dtype, a_zero_point=a_zero_point, b_zero_point=b_zero_point)
    return out


@torch.no_grad()
def grouped_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    a_zero_point: torch.Tensor | None = None,
    b_zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """The defined result of a grouped product, a contiguous [tokens, N] tensor: `scaled_mm` of each token with its expert.

    A token belongs to the first expert whose clamped end (the running maximum of the offsets) exceeds the token's index.
    Operands as in `scaled_mm.grouped_scaled_mm`.
    """
    tokens, (experts, _, n) = a.shape[0], b.shape
    out = torch.zeros((tokens, n), dtype=out_dtype, device=a.device)
    if experts == 0:
        return out
    a_scale, a_zero_point = (_column(t, tokens) for t in (a_scale, a_zero_point))
    b_scale, b_zero_point = (_of_every_expert(t, experts, n) for t in (b_scale, b_zero_point))
    for expert, rows in _rows_of_experts(expert_offsets, tokens, experts):
        out[rows] = scaled_mm(
            a[rows],
            b[expert],
            None if a_scale is None else a_scale[rows],
            None if b_scale is None else b_scale[expert],
            None if bias is None else bias[expert],
            out_dtype=out_dtype,
            a_zero_point=None if a_zero_point is None else a_zero_point[rows],
            b_zero_point=None if b_zero_point is None else b_zero_point[expert],
        )
    return out


def _of_every_expert(values: torch.Tensor | None, experts: int, n: int) -> torch.Tensor | None:
    """[E, N] of one value, or of values by expert or by expert and column."""
    if values is None:
        return None
    return values.reshape(1, 1).expand(experts, n) if values.numel() == 1 else values.reshape(experts, -1).expand(experts, n)


@torch.no_grad()
def block_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The defined result of a block-scaled product, a contiguous [M, N] tensor of `out_dtype` on `a`'s device.

        sum[m,n] = 0;  for kb = 0, 1, ...:  sum[m,n] += f32(sum of a[m,k] * b[k,n] over block kb) * (a_scale[m,kb] * b_scale[kb,n//B])
        out[m,n] = cast( sum[m,n] + bias[n] )

    Operands as in `scaled_mm.block_scaled_mm`. A block has B elements of K, 128 or 64; the last block may have fewer.
    """
    m, n = a.shape[0], b.shape[1]
    size = 128 if a_scale.shape[1] == -(-a.shape[1] // 128) and b_scale.shape[1] == -(-n // 128) else 64
    block_of = torch.arange(n, device=a.device) // size
    total = torch.zeros((m, n), dtype=torch.float32, device=a.device)
    for block in range(a_scale.shape[1]):
        k = slice(size * block, size * block + size)
        value = _integer_product(a[:, k].to(torch.float64), b[k].to(torch.float64)).to(torch.float32)
        scale = a_scale[:, block].reshape(m, 1) * b_scale[block][block_of].reshape(1, n)
        value = value * scale
        total = total + value
    if bias is not None:
        total = total + bias.reshape(1, n).to(torch.float32)
    return total.to(out_dtype)


@torch.no_grad()
def grouped_block_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The defined result of a grouped block-scaled product, a contiguous [tokens, N] tensor: `block_scaled_mm` of each token with its expert.

    Experts of tokens as in `grouped_scaled_mm`. Operands as in `scaled_mm.grouped_block_scaled_mm`.
    """
    tokens, (experts, _, n) = a.shape[0], b.shape
    out = torch.zeros((tokens, n), dtype=out_dtype, device=a.device)
    for expert, rows in _rows_of_experts(expert_offsets, tokens, experts):
        own_bias = None if bias is None else bias[expert]
        out[rows] = block_scaled_mm(a[rows], b[expert], a_scale[rows], b_scale[expert], own_bias, out_dtype=out_dtype)
    return out


def _rows_of_experts(expert_offsets: torch.Tensor, tokens: int, experts: int) -> list[tuple[int, torch.Tensor]]:
    """(expert, its rows): a row belongs to the first expert whose clamped end (the running maximum of the offsets) exceeds the row's index."""
    if experts == 0:
        return []
    ends = expert_offsets.long().clamp(0, tokens).cummax(0).values
    expert_of = torch.searchsorted(ends, torch.arange(tokens, device=ends.device), right=True)
    return [(expert, (expert_of == expert).nonzero().flatten()) for expert in expert_of.unique().tolist() if expert < experts]


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both tensors have the same bits: `torch.equal` that also distinguishes +0.0 from -0.0.

    Any NaN equals any NaN, because IEEE 754 does not define the bit pattern, and CPU and GPU differ. Shape, dtype and device must agree;
    strides need not.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype or actual.device != expected.device:
        return False
    return not bool(_differs(actual, expected).any())


def describe_difference(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """One line that describes how `actual` differs from `expected`: shape, dtype, device, or the number of elements and the first one."""
    for name in ("shape", "dtype", "device"):
        if getattr(actual, name) != getattr(expected, name):
            return f"{name} {getattr(actual, name)}, expected {getattr(expected, name)}"
    where = _differs(actual, expected).nonzero()
    if where.shape[0] == 0:
        return "no difference"
    first = tuple(where[0].tolist())
    return (
        f"{where.shape[0]} of {actual.numel()} elements differ; the first at {list(first)}: "
        f"{actual[first].item()!r}, expected {expected[first].item()!r}"
    )


def _differs(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    if actual.dtype not in _BITS:
        return actual != expected
    bits = _BITS[actual.dtype]
    unlike = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    return unlike & ~(actual.isnan() & expected.isnan())


def _adjusted(operand: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
    operand = operand.to(torch.float64)
    return operand if zero_point is None else operand - zero_point.to(torch.float64)


def _integer_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """int32 [m, n]: the exact product of integers stored as float64."""
    if left.numel() == 0 or right.numel() == 0:
        return torch.zeros((left.shape[0], right.shape[1]), dtype=torch.int32, device=left.device)
    bound = left.shape[1] * int(left.abs().amax()) * int(right.abs().amax())
    if bound >= _FLOAT64_EXACT:
        raise OverflowError(f"K * max|a - za| * max|b - zb| = {bound} is not below 2^53: float64 could round the sum")
    acc = left @ right
    low, high = (int(limit) for limit in acc.aminmax())
    if low < -(1 << 31) or high >= 1 << 31:
        raise OverflowError(f"accumulators from {low} to {high} do not fit 32 bits")
    return acc.to(torch.int32)


def _column(t: torch.Tensor | None, m: int) -> torch.Tensor | None:
    return None if t is None else t.reshape(-1, 1).expand(m, 1)


def _row(t: torch.Tensor | None, n: int) -> torch.Tensor | None:
    return None if t is None else t.reshape(1, -1).expand(1, n)
