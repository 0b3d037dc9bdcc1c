"""An int32 product and the sum of it over all ranks, in chunks of rows: while one chunk is reduced, the next is multiplied."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scaled_mm.parallel import collectives
from scaled_mm.parallel.ranks import Ranks, part_of

Multiply = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def chunk_slices(rows: int, chunks: int) -> list[slice]:
    """At most `chunks` slices that cover the rows, equal but for one row; one empty slice for no rows."""
    count = max(1, min(chunks, rows))
    ends = [0]
    for index in range(count):
        ends.append(ends[-1] + rows // count + (index < rows % count))
    return [slice(begin, end) for begin, end in zip(ends, ends[1:])]


def summed(multiply: Multiply, q: torch.Tensor, zero_point: torch.Tensor | None, ranks: Ranks, all_reduce: bool, chunks: int) -> torch.Tensor:
    """int32: the sums over all ranks of multiply(q, zero_point). [M, N] with all_reduce, else [rows of this rank (`part_of`), N].

    multiply: from rows of q, and their zero points, to [rows, N] int32. q: int8 [M, K]. zero_point: one value, [M, 1] or None.
    chunks: at least 1. The bits do not depend on it.
    """
    if chunks == 1:
        return (collectives.all_reduce if all_reduce else collectives.reduce_scatter)(multiply(q, zero_point), ranks)
    return _to_all(multiply, q, zero_point, ranks, chunks) if all_reduce else _to_rows(multiply, q, zero_point, ranks, chunks)


def _to_all(multiply: Multiply, q, zero_point, ranks: Ranks, chunks: int) -> torch.Tensor:
    sent = []
    for rows in chunk_slices(q.shape[0], chunks):
        of_chunk = multiply(q[rows], zero_point if zero_point is None or zero_point.numel() == 1 else zero_point[rows])
        sent.append((of_chunk, collectives.begin_all_reduce(of_chunk, ranks)))
    return torch.cat([_arrived(*each) for each in sent])


def _to_rows(multiply: Multiply, q, zero_point, ranks: Ranks, chunks: int) -> torch.Tensor:
    """Each chunk has an equal share of every rank's rows (`part_of`), so its reduce-scatter gives each rank rows of its own."""
    m, each = q.shape[0], -(-q.shape[0] // ranks.size)

    def by_rank(tensor: torch.Tensor) -> torch.Tensor:
        missing = each * ranks.size - m
        padded = torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor
        return padded.view(ranks.size, each, *tensor.shape[1:])

    of_ranks = by_rank(q)
    zeros_of_ranks = by_rank(zero_point) if zero_point is not None and zero_point.numel() != 1 else None
    sent = []
    for rows in chunk_slices(each, chunks):
        zeros = zero_point if zeros_of_ranks is None else zeros_of_ranks[:, rows].flatten(0, 1)
        acc = multiply(of_ranks[:, rows].flatten(0, 1), zeros)
        mine = acc.new_empty(rows.stop - rows.start, acc.shape[1])
        sent.append((mine, collectives.begin_reduce_scatter(acc, ranks, mine), acc))  # acc is read until the work is done
    mine = torch.cat([_arrived(of_chunk, work) for of_chunk, work, _ in sent])
    rows = part_of(m, ranks.rank, ranks.size)
    return mine[: rows.stop - rows.start]


def _arrived(tensor: torch.Tensor, work) -> torch.Tensor:
    """The tensor, once the collective is done: on a GPU the stream waits, the host does not."""
    if work is not None:
        work.wait()
    return tensor
