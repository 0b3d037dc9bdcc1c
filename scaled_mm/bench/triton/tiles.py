"""Which rows lie in which tile of a grouped kernel that pads each expert's rows to whole tiles, and the sizes of tiles that are tried."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BLOCK = 128


@dataclass(frozen=True)
class Config:
    """The sizes of a tile, tiles along M that are visited together, and Triton's warps and stages. programs: of an SM."""

    bm: int
    bn: int
    bk: int
    group: int
    warps: int
    stages: int
    programs: int


# (bm, bn, bk, warps, stages) by the largest mean number of rows per expert: those that won for INT8 on an H200 and their neighbours.
_SIZES = {
    24: ((16, 64, 128, 4, 5), (16, 64, 256, 4, 4), (16, 128, 128, 4, 4), (16, 128, 256, 4, 3), (32, 64, 128, 4, 4), (32, 128, 128, 4, 4)),
    64: ((16, 128, 256, 4, 3), (32, 64, 128, 4, 4), (32, 128, 128, 4, 4), (64, 64, 128, 4, 4), (64, 128, 128, 4, 4), (64, 128, 128, 4, 3)),
    math.inf: (
        *((64, 64, 128, 4, 3), (64, 64, 128, 4, 4), (64, 128, 128, 4, 3), (64, 128, 128, 4, 4), (64, 128, 128, 4, 5), (64, 128, 128, 8, 4)),
        *((128, 64, 128, 4, 4), (64, 256, 128, 8, 3), (128, 128, 128, 8, 3), (128, 128, 128, 8, 4), (128, 256, 128, 8, 3)),
    ),
}


def configs(rows_of_expert: float, block_scales: bool) -> list[Config]:
    """Candidates for this mean number of rows per expert. With scales of blocks a step of K is a block."""
    sizes = next(sizes for most, sizes in _SIZES.items() if rows_of_expert <= most)
    found = [
        Config(bm, bn, BLOCK if block_scales else bk, 8 if bm >= 64 else 1, warps, stages, 2 if bm * bn < 128 * 128 else 1)
        for bm, bn, bk, warps, stages in sizes
    ]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Aligned:
    """The rows of the experts in whole tiles of bm rows.

    rows: int32 [tiles * bm], the row of each slot; the number of copies marks padding. experts: int32, one per tile. tiles: int32 [1], those in use.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    tiles: torch.Tensor


def align(order: torch.Tensor, ends: torch.Tensor, bm: int, sorted_rows: bool) -> Aligned:
    """order, ends: of `moe_sort`. sorted_rows: rows are numbered in the order by expert; else by copy. Does not synchronize."""
    copies, experts, device = order.numel(), ends.numel(), order.device
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    tiles = (counts + bm - 1) // bm
    tile_ends = tiles.cumsum(0)
    most = copies // bm + min(experts, copies)
    index = torch.arange(most, device=device)
    expert = torch.searchsorted(tile_ends, index, right=True).clamp_max(experts - 1)
    begin = ends[expert] - counts[expert] + (index - (tile_ends[expert] - tiles[expert])) * bm
    row = begin[:, None] + torch.arange(bm, device=device)
    inside = (row < ends[expert][:, None]) & (index < tile_ends[-1])[:, None]
    row = torch.where(inside, row, 0)
    named = row if sorted_rows else order[row]
    rows = torch.where(inside, named, copies).to(torch.int32)
    return Aligned(rows.view(-1), expert.to(torch.int32), tile_ends[-1:].to(torch.int32))


def align_one(rows: int, bm: int, device: torch.device) -> Aligned:
    """The rows of a plain product: one expert has all of them."""
    tiles = -(-rows // bm)
    names = torch.arange(tiles * bm, dtype=torch.int32, device=device).clamp_max(rows)
    return Aligned(names, torch.zeros(tiles, dtype=torch.int32, device=device), torch.full((1,), tiles, dtype=torch.int32, device=device))
