"""The collectives of exact parallelism: sums of integers and maxima, which are the same in any order, and copies."""

from __future__ import annotations

import torch
import torch.distributed as dist

from scaled_mm.parallel.ranks import Ranks, part_of

# torch 2.13 renames these and warns about the former names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

APART = 2 << 20
"""Values of all ranks, from which `functional.all_gather_rows` gathers int8 rows and their scales apart, because one message is packed and unpacked
byte by byte. On two H200s the one message took 10 us less for 16 x 8192, 2 us more for 256 x 8192 and 40 us more for 2048 x 8192."""


def all_reduce_max(scales: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The maximum over all ranks, in place. scales: float32, positive, infinity or NaN; NaN counts as the largest.

    With the sign bit cleared, which a NaN may have, these floats compare as int32 in the order of their values, NaN above infinity. So a maximum of
    integers propagates a NaN on every backend.
    """
    dist.all_reduce(scales.view(torch.int32).bitwise_and_(0x7FFFFFFF), dist.ReduceOp.MAX, group=ranks.group)
    return scales


def reduce_scatter(sums: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """[rows of this rank (`part_of`), N]: the sums over all ranks. sums: [M, N], contiguous; the same M, N and dtype on all ranks."""
    m = sums.shape[0]
    each = -(-m // ranks.size)
    if each * ranks.size != m:
        sums = torch.cat((sums, sums.new_zeros(each * ranks.size - m, sums.shape[1])))
    mine = sums.new_empty(each, sums.shape[1])
    _reduce_scatter(mine, sums, group=ranks.group)
    rows = part_of(m, ranks.rank, ranks.size)
    return mine[: rows.stop - rows.start]


def reduce_scatter_disjoint(bits: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """`reduce_scatter` of tensors [M, N] of any dtype, in which each element has other bits than 0 on at most one rank. The bits are summed as
    integers, so values, NaN too, arrive as they are."""
    as_integers = torch.int32 if bits.shape[1] * bits.element_size() % 4 == 0 else torch.int8
    return reduce_scatter(bits.view(as_integers), ranks).view(bits.dtype)


def all_reduce(sums: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sums over all ranks, in place."""
    dist.all_reduce(sums, group=ranks.group)
    return sums


def begin_all_reduce(sums: torch.Tensor, ranks: Ranks):
    """Begins `all_reduce` and returns the work to wait for."""
    return dist.all_reduce(sums, group=ranks.group, async_op=True)


def begin_reduce_scatter(sums: torch.Tensor, ranks: Ranks, mine: torch.Tensor):
    """Begins a reduce-scatter of [M, N] into [M / number of ranks, N], and returns the work to wait for."""
    return _reduce_scatter(mine, sums, group=ranks.group, async_op=True)


def gather_rows(mine: torch.Tensor, rows: int, ranks: Ranks) -> torch.Tensor:
    """[rows, ...] from the rows of each rank, as `reduce_scatter` distributes them. Any dtype: bytes travel."""
    each, shape = -(-rows // ranks.size), mine.shape[1:]
    sent = bytes_of(mine.reshape(mine.shape[0], shape.numel()))
    if mine.shape[0] < each:
        sent = torch.cat((sent, sent.new_zeros(each - mine.shape[0], sent.shape[1])))
    everything = sent.new_empty(each * ranks.size, sent.shape[1])
    _all_gather(everything, sent, group=ranks.group)
    return everything[:rows].view(mine.dtype).view(rows, *shape)


def gather_columns(mine: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """[..., N * ranks] from [..., N] of each rank, in order of rank. Any dtype, the same shape on all ranks.

    What arrives is [ranks, M, N]. One row is a view of it. More are copied as integers that are as wide as the bytes of a part of a row allow: a
    strided copy by torch moves one element a thread, whatever its size.
    """
    m, n = mine.shape[:-1].numel(), mine.shape[-1]
    everything = mine.new_empty(ranks.size * m, n)
    _all_gather(everything, mine.reshape(m, n).contiguous(), group=ranks.group)
    if m > 1 and n:
        wide = everything.view(_widest(n * mine.element_size()))
        everything = wide.view(ranks.size, m, wide.shape[1]).movedim(0, 1).contiguous().view(m, -1).view(mine.dtype)
    return everything.view(*mine.shape[:-1], ranks.size * n)


def _widest(size: int) -> torch.dtype:
    """The widest integer dtype of which `size` bytes are a multiple."""
    return next(dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.int8) if size % dtype.itemsize == 0)


def all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], ranks: Ranks) -> torch.Tensor:
    """The rows that all ranks send to this one, in order of rank. rows: [sum(send), ...] of any dtype, in order of the rank they go to.
    send, receive: how many to and from each rank."""
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=ranks.group)
    return arrived


def bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """int8 [M, bytes of a row] of a tensor [M, N], to send several tensors in one message."""
    if rows.shape[0] <= 1 or rows.stride(-1) != 1 or not rows.is_contiguous():  # one row is contiguous with any strides, which `view` refuses
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int8)


def of_bytes(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor [M, N] that `bytes_of` has made int8, from a slice of the columns of a message."""
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)  # a copy: a slice of one row would keep its odd address
