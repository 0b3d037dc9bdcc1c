"""Partial tiles of every height at which the loads change, of both operands: the bits of the reference.

For every kernel config of sm90 that loads plain products with TMA.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import scaled_mm as sm
from scaled_mm import reference
from scaled_mm.kernels.config import KernelConfig
from scaled_mm.tables import load_table

pytestmark = pytest.mark.gpu

TABLE = load_table("sm90")
ROWS = [row.name for row in TABLE.rows if row.family in ("c3x", "decode")]
# The first wraps around the stages and ends in a partial step. The second is shorter. The third is whole steps of 128, but ends within a step of 256.
STEPS = (48 * 128 + 16, 12 * 128 + 16, 13 * 128)


def heights(rows: int, parts: int, unit: int = 1) -> list[int]:
    """Sizes of the last tile along one dimension, multiples of `unit`. parts: thread blocks of a cluster that load `rows` rows together."""
    part = rows // parts
    near = {unit, 8, part - unit, part, part + unit, rows - part - unit, rows - unit, rows}
    return sorted(height for height in near if 0 < height <= rows)


def sizes(config: KernelConfig, out_dtype: torch.dtype) -> tuple[int, int, list[int], list[int]]:
    """Tile size along M and N, then sizes of the last tile along M and N. c3x kernels store whole vectors of 16 bytes along N."""
    unit = 16 // out_dtype.itemsize if config.family == "c3x" else 1
    if config.swap_ab:
        return config.tile.n, config.tile.m, heights(config.tile.n, config.cluster.m), heights(config.tile.m, config.cluster.n, unit)
    return config.tile.m, config.tile.n, heights(config.tile.m, config.cluster.n), heights(config.tile.n, config.cluster.m, unit)


def check(handle, row: str, batch: int, M: int, N: int, K: int, out_dtype: torch.dtype, constant: bool) -> None:
    """The product by one kernel config, and that nothing is written past out. Batches share b. constant: b may be loaded early."""
    generator = torch.Generator("cuda").manual_seed(M * N + K)
    b = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda", generator=generator).t().expand(batch, K, N)
    inputs = {
        "a": torch.randint(-128, 128, (batch, M, K), dtype=torch.int8, device="cuda", generator=generator),
        "b": sm.prepare_weight(b) if constant else b,
        "a_scale": torch.rand(batch, M, 1, device="cuda", generator=generator),
        "b_scale": torch.rand(1, N, device="cuda", generator=generator),
    }
    padded = torch.full((batch, M + 1, (N + 15) // 16 * 16 + 16), 7.0, dtype=out_dtype, device="cuda")
    out = padded[:, :M, :N]
    with sm.create_descriptor(handle, out=out, kernel=row, **inputs) as desc:
        workspace = torch.full((desc.workspace_size,), 255, dtype=torch.uint8, device="cuda") if desc.workspace_size else None
        desc.calculate(out, **inputs, workspace=workspace)
    said = f"{row} {out_dtype} batch {batch} M={M} N={N} K={K} constant={constant}"
    assert torch.equal(out, reference.scaled_mm(**{**inputs, "b": b}, out_dtype=out_dtype)), said
    assert bool((padded[:, M:] == 7).all()) and bool((padded[:, :, N:] == 7).all()), said


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("row", ROWS)
def test_partial_tiles_have_the_bits_of_the_reference(handle, row, out_dtype):
    tile_m, tile_n, along_m, along_n = sizes(TABLE.row(row), out_dtype)
    pairs = {*itertools.product(along_m[:2] + along_m[-2:], along_n), *itertools.product(along_m, along_n[:2] + along_n[-2:])}
    for i, (m, n) in enumerate(sorted(pairs)):
        whole_m, whole_n = i % 2, i // 2 % 3  # tiles before the last one
        check(handle, row, 1 + 2 * (i % 5 == 0), m + whole_m * tile_m, n + whole_n * tile_n, STEPS[i % 3], out_dtype, constant=i // 3 % 2 == 0)


@pytest.mark.parametrize("row", ROWS)
def test_partial_tiles_after_the_first_tile_of_a_thread_block(handle, row):
    tile_m, tile_n, along_m, along_n = sizes(TABLE.row(row), torch.bfloat16)
    for m, n in ((along_m[0], along_n[0]), (along_m[-2], along_n[-2])):
        check(handle, row, 101, tile_m + m, 2 * tile_n + n, 272, torch.bfloat16, constant=False)
