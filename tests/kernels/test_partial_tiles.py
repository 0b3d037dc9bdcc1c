"""Partial tiles of every height at which the loads change, of both operands: the bits of the reference.

For every kernel config of sm90 that loads plain products with TMA.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.tables import load_table

pytestmark = pytest.mark.gpu

TABLE = load_table("sm90")
ROWS = [row.name for row in TABLE.rows if row.family in ("c3x", "decode")]
K = 13 * 128 + 16  # more steps than a kernel config has stages; the last one is partial too


def heights(rows: int, parts: int) -> list[int]:
    """Rows of the last tile. parts: thread blocks of a cluster that load `rows` rows together."""
    part = rows // parts
    return sorted({1, 8, part - 1, part, part + 1, rows - part - 1, rows - 1, rows} & set(range(1, rows + 1)))


def extents(name: str) -> tuple[list[int], list[int]]:
    """Heights along M and along N."""
    row = TABLE.row(name)
    first, second = heights(row.tile.m, row.cluster.n), heights(row.tile.n, row.cluster.m)
    return (second, first) if row.swap_ab else (first, second)


@pytest.mark.parametrize("row", ROWS)
def test_partial_tiles_have_the_bits_of_the_reference(handle, row):
    tile, (along_m, along_n) = TABLE.row(row).tile, extents(row)
    tile_m, tile_n = (tile.n, tile.m) if TABLE.row(row).swap_ab else (tile.m, tile.n)
    generator = torch.Generator("cuda").manual_seed(len(row))
    cases = list(itertools.product(along_m[:2] + along_m[-2:], along_n)) + list(itertools.product(along_m, along_n[:2] + along_n[-2:]))
    for m, n in sorted(set(cases)):
        # Whole tiles first in half of the cases; a batch that shares b in others.
        whole, batch = (m + n) % 2, 3 if (m + n) % 3 == 0 else 1
        M, N = m + whole * tile_m, n + whole * 2 * tile_n
        a = torch.randint(-128, 128, (batch, M, K), dtype=torch.int8, device="cuda", generator=generator)
        b = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda", generator=generator).t()
        inputs = {
            "a": a,
            "b": b.expand(batch, K, N),
            "a_scale": torch.rand(batch, M, 1, device="cuda", generator=generator),
            "b_scale": torch.rand(1, N, device="cuda", generator=generator),
        }
        room = torch.full((batch, M + 1, (N + 15) // 16 * 16 + 16), 7.0, dtype=torch.bfloat16, device="cuda")
        out = room[:, :M, :N]
        with sm.create_descriptor(handle, out=out, kernel=row, **inputs) as desc:
            workspace = torch.full((desc.workspace_size,), 255, dtype=torch.uint8, device="cuda") if desc.workspace_size else None
            desc.calculate(out, **inputs, workspace=workspace)
        assert torch.equal(out, reference.scaled_mm(**inputs)), (row, batch, M, N)
        assert bool((room[:, M:] == 7).all()) and bool((room[:, :, N:] == 7).all()), (row, batch, M, N)
