"""Which rows of block products are legal, decided without nvcc: `block_mma` by mma.sync, `block_wgmma` on SM90.

A tile is [tokens, rows of the weight, 256 k]. The numbers are those of csrc/block, from above; the generated sources assert that a
kernel's shared memory is at most what is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.block.formats import BLOCK, TILE_BLOCKS, TILE_ROWS, WEIGHT_FORMATS
from scaled_mm.tables.schema import KernelRow, RowCost

GENERATIONS = ("block_mma", "block_wgmma")
WGMMA_ARCHES = ("sm90",)
TILE_K = TILE_BLOCKS * BLOCK
_TOKEN_BYTES = 2 * TILE_K  # of a stage: a token's activations, two bytes each
_BARRIERS = 2048
_MAX_TOKENS = 256
_FIELDS = {
    "block_mma": ("name", "generation", "tile", "block"),
    "block_wgmma": ("name", "generation", "tile", "split_k", "stages", "block"),
}


def stage_bytes(row: KernelRow, fmt: str) -> int:
    """Of one stage of a block_wgmma row's pipeline: tiles of a format's weight, and activations."""
    return row.tile.n // TILE_ROWS * WEIGHT_FORMATS[fmt].tile_bytes + row.tile.m * _TOKEN_BYTES


def _beside_stages(row: KernelRow) -> int:
    return _BARRIERS + (row.tile.m * row.tile.n * 4 if row.split_k > 1 else 0)  # float32 sums of the blocks that share K


def stages(row: KernelRow, fmt: str, limit: int) -> int:
    """How many stages a block_wgmma row has for a format: its own number, or what fits `limit` bytes of shared memory."""
    return min(row.stages, max(0, limit - _beside_stages(row)) // stage_bytes(row, fmt))


def shared_memory(row: KernelRow, fmt: str, limit: int) -> int:
    """Dynamic shared memory in bytes, from above, of a row that is built for a format and a GPU with `limit` bytes."""
    if row.generation == "block_mma":
        return 0
    return stages(row, fmt, limit) * stage_bytes(row, fmt) + _beside_stages(row)


def cost(row: KernelRow, limit: int) -> RowCost:
    """What it takes with the format that takes most."""
    if row.generation != "block_wgmma" or row.stages == "auto":
        return RowCost(0, 0, 1, 0, None)
    largest = max(WEIGHT_FORMATS, key=lambda fmt: shared_memory(row, fmt, limit))
    return RowCost(stage_bytes(row, largest), _beside_stages(row), stages(row, largest, limit), shared_memory(row, largest, limit), None)


def findings(row: KernelRow, arch: str, limit: int) -> Iterator[tuple[str, str]]:
    """(field, reason) for every rule broken; `limit`: bytes of shared memory that a block may have."""
    if row.generation not in GENERATIONS:
        yield "generation", f"no kernel of block products is a {row.generation} one; expected {' or '.join(GENERATIONS)}"
        return
    if row.generation == "block_wgmma" and arch not in WGMMA_ARCHES:
        yield "generation", f"block_wgmma rows use wgmma, which {arch} lacks; they run on {', '.join(WGMMA_ARCHES)}"
        return
    for field, info in KernelRow.model_fields.items():
        if field not in _FIELDS[row.generation] and getattr(row, field) != info.default:
            yield field, f"a {row.generation} row has none: leave it out"
    tokens, rows, k = row.tile
    if tokens % 8 or tokens > _MAX_TOKENS:
        yield "tile", f"tile m = {tokens} tokens; an MMA takes a multiple of 8, at most {_MAX_TOKENS}"
    allowed = (TILE_ROWS,) if row.generation == "block_mma" else (TILE_ROWS, 2 * TILE_ROWS)
    if rows not in allowed:
        yield "tile", f"tile n = {rows} rows of the weight, expected {' or '.join(map(str, allowed))}"
    if k != TILE_K:
        yield "tile", f"tile k = {k}, expected {TILE_K}: a tile of a packed weight has {TILE_BLOCKS} blocks of {BLOCK}"
    if row.generation == "block_wgmma" and rows in allowed:
        yield from _pipeline(row, arch, limit)


def _pipeline(row: KernelRow, arch: str, limit: int) -> Iterator[tuple[str, str]]:
    if row.split_k not in (1, 2, 4, 8):
        yield "split_k", f"split_k = {row.split_k}, expected 1, 2, 4 or 8: the blocks of a cluster share a tile's K"
    if row.stages == "auto" or row.stages < 2:
        yield "stages", f"stages = {row.stages}; a block_wgmma row says how many, at least 2"
        return
    fitting = {fmt: stages(row, fmt, limit) for fmt in WEIGHT_FORMATS}
    if max(fitting.values()) < row.stages:
        least = min(WEIGHT_FORMATS, key=lambda fmt: stage_bytes(row, fmt))
        what = f"{row.stages} stages of {stage_bytes(row, least)} bytes and {_beside_stages(row)} beside them, for {least}, which takes least"
        yield "stages", f"{what}, are more shared memory than the {limit} bytes of {arch}"
    for fmt, count in fitting.items():
        if count < 2:
            yield "tile", f"a stage of {stage_bytes(row, fmt)} bytes for {fmt}: {count} fit in the {limit} bytes of {arch}, a pipeline needs 2"
