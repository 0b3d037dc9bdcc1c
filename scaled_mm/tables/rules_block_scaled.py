"""Which block-scaled rows are legal, decided without nvcc: `c2x` by mma.sync for aligned operands, `generic` for any.

The numbers are those of csrc/int8/block_scaled; the generated sources assert the shared memory computed here.
"""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.tables.rules_c2x import MAX_ACCUMULATORS, MAX_WARPS, TURING, WARP_SIZE
from scaled_mm.tables.schema import KernelRow, RowCost

BLOCK = 128  # k of a scale, and columns of one of b
_CHUNK = 16  # bytes moved at once, and the padding of a finished row in shared memory
_GENERIC_THREADS = 128
_FIELDS = ("name", "family", "tile", "warp", "stages", "swizzle", "block_scaled")
_GENERIC_FIELDS = ("name", "family", "tile", "block_scaled")


def threads(row: KernelRow) -> int:
    return row.tile.m // row.warp.m * (row.tile.n // row.warp.n) * WARP_SIZE


def cost(row: KernelRow, out_bytes: int = 4) -> RowCost:
    """Shared memory: the ring of stages, later in its place the finished tile, and two blocks' scales. Accumulators: int32 and float32."""
    m, n, k = row.tile
    scales = 2 * m * 4
    if row.family == "generic":
        stage = (m + n) * (k + _CHUNK)
        return RowCost(stage, 0, 1, stage + scales, 2 * m * n // _GENERIC_THREADS)
    stage, finished = (m + n) * k, m * (n * out_bytes + _CHUNK)
    stages = 0 if row.stages == "auto" else row.stages
    accumulators = None if row.warp is None else 2 * row.warp.m * row.warp.n // WARP_SIZE
    return RowCost(stage, finished, stages, max(stages * stage, finished) + scales, accumulators)


def findings(row: KernelRow, arch: str, limit: int) -> Iterator[tuple[str, str]]:
    """(field, reason) for every rule broken; `limit`: bytes of shared memory that a block may have."""
    if row.family not in ("c2x", "generic"):
        yield "family", f"no block-scaled kernel is a {row.family} one; expected c2x or generic"
        return
    for field, info in KernelRow.model_fields.items():
        if field not in (_FIELDS if row.family == "c2x" else _GENERIC_FIELDS) and getattr(row, field) != info.default:
            yield field, f"a block-scaled {row.family} row has none: leave it out"
    if row.tile.k != BLOCK:
        yield "tile", f"tile k = {row.tile.k}, expected {BLOCK}: a tile of K is a block of scales"
    if row.tile.n % 16 or BLOCK % row.tile.n:
        yield "tile", f"tile n = {row.tile.n}, expected 16, 32, 64 or 128: the columns of a tile share a scale"
    if row.family == "generic":
        if row.tile.m not in (32, 64) or row.tile.n not in (32, 64):
            yield "tile", f"tile {row.tile.m} x {row.tile.n}; a generic row has 2 x 2 warps, and 32 or 64 each way"
        return
    yield from _stages(row, arch)
    shape = list(_shape(row))
    yield from shape
    if not shape and (bytes_ := cost(row).shared_memory) > limit:
        what = f"{row.stages} stages of {cost(row).stage_bytes} bytes, or a tile of float32, and scales are {bytes_} bytes"
        yield "stages", f"{what} of shared memory, {arch} has {limit}"


def _stages(row: KernelRow, arch: str) -> Iterator[tuple[str, str]]:
    if row.stages == "auto":
        yield "stages", "a block-scaled c2x row says how many: 2 on sm75, at least 3 elsewhere"
    elif arch in TURING and row.stages != 2:
        yield "stages", f"stages = {row.stages}; Turing has no asynchronous copies to shared memory, so it takes 2"
    elif arch not in TURING and row.stages < 3:
        yield "stages", f"stages = {row.stages}; with asynchronous copies at least 3 (2 is Turing's kernel)"


def _shape(row: KernelRow) -> Iterator[tuple[str, str]]:
    if row.warp is None:
        yield "warp", "a block-scaled c2x row needs a warp tile"
        return
    for axis, tile, warp in zip("mn", row.tile, row.warp):
        if warp % 16:
            yield "warp", f"warp {axis} = {warp}, expected a multiple of 16"
        elif tile % warp:
            yield "warp", f"warp {axis} = {warp} does not divide tile {axis} = {tile}"
    if row.warp.k != row.tile.k:
        yield "warp", f"warp k = {row.warp.k}, expected {row.tile.k}: a warp sums a whole block of K"
    if any(warp % 16 or tile % warp for tile, warp in zip(row.tile[:2], row.warp[:2])):
        return  # the rest divides by what is wrong
    count = threads(row)
    if count > MAX_WARPS * WARP_SIZE or count % 64:
        yield "warp", f"{count // WARP_SIZE} warps, expected an even number of at most {MAX_WARPS}"
        return
    if count < row.tile.m:
        yield "warp", f"{count} threads fetch one row's scale each, and the tile has {row.tile.m}"
    for axis, size in (("m", row.tile.m), ("n", row.tile.n)):
        if size * BLOCK % (count * _CHUNK):
            yield "tile", f"tile {axis} = {size} rows of {BLOCK} bytes; {count} threads load {count * _CHUNK} bytes at a time"
    if (accumulators := 2 * row.warp.m * row.warp.n // WARP_SIZE) > MAX_ACCUMULATORS:
        what = f"{row.warp.m} x {row.warp.n} accumulators and as many sums over {WARP_SIZE} threads are {accumulators} registers per thread"
        yield "warp", f"{what}, at most {MAX_ACCUMULATORS} stay out of local memory"
