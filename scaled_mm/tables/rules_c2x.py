"""Which c2x rows (CUTLASS 2.x, mma.sync) are legal, decided without nvcc.

The numbers are those of CUTLASS's threadblock MMA and of the thread map with which its epilogue stores 16 bytes per thread;
the generated sources assert the shared memory computed here.
"""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.tables.schema import KernelRow, RowCost

TURING = ("sm75",)
WARP_SIZE = 32
MAX_WARPS = 8
# A thread has 255 registers; beside these it holds operand fragments, scales and addresses.
MAX_ACCUMULATORS = 128
_FIELDS = ("name", "family", "tile", "warp", "stages", "swizzle", "split_k", "grouped")
_SPLITS = (1, 2, 4, 8)
_ACCESS_BYTES = 16
_OUT_BYTES = (2, 4)
_EXCHANGE_ROWS, _EXCHANGE_PADDING = 8, 8  # rows of a warp and columns of padding of the epilogue's exchange, in int32


def warps(row: KernelRow) -> tuple[int, int, int]:
    """Warps along m, n and k of the tile."""
    return tuple(tile // warp for tile, warp in zip(row.tile, row.warp))


def cost(row: KernelRow) -> RowCost:
    """Shared memory: the ring of stages, and in the same place afterwards the epilogue's exchange."""
    stage = (row.tile.m + row.tile.n) * row.tile.k
    stages = 0 if row.stages == "auto" else row.stages
    if row.warp is None:
        return RowCost(stage, 0, stages, stages * stage, None)
    m, _, k = warps(row)
    exchange = m * k * _EXCHANGE_ROWS * (row.tile.n + _EXCHANGE_PADDING) * 4
    return RowCost(stage, exchange, stages, max(stages * stage, exchange), row.warp.m * row.warp.n // WARP_SIZE)


def findings(row: KernelRow, arch: str, limit: int) -> Iterator[tuple[str, str]]:
    """(field, reason) for every rule broken; `limit`: bytes of shared memory that a block may have."""
    for field, info in KernelRow.model_fields.items():
        if field not in _FIELDS and getattr(row, field) != info.default:
            yield field, "a c2x row has none: leave it out"
    if row.split_k not in _SPLITS:
        yield "split_k", f"split_k = {row.split_k}, expected one of {', '.join(map(str, _SPLITS))}"
    yield from _stages(row, arch)
    shape = list(_shape(row, arch))
    yield from shape
    if shape:
        return  # the rest divides by what is wrong
    yield from _threads(row)
    if (bytes_ := cost(row).shared_memory) > limit:
        what = f"{row.stages} stages of {cost(row).stage_bytes} bytes are {bytes_} bytes of shared memory"
        yield "stages", f"{what}, {arch} has {limit}"


def _stages(row: KernelRow, arch: str) -> Iterator[tuple[str, str]]:
    if row.stages == "auto":
        yield "stages", "a c2x row says how many: 2 on sm75, at least 3 elsewhere"
    elif arch in TURING and row.stages != 2:
        yield "stages", f"stages = {row.stages}; Turing has no asynchronous copies to shared memory, so it takes 2"
    elif arch not in TURING and row.stages < 3:
        yield "stages", f"stages = {row.stages}; with asynchronous copies at least 3 (2 is Turing's kernel)"


def _shape(row: KernelRow, arch: str) -> Iterator[tuple[str, str]]:
    if row.warp is None:
        yield "warp", "a c2x row needs a warp tile"
        return
    if row.tile.k not in (64, 128):
        yield "tile", f"tile k = {row.tile.k}, expected 64 or 128: rows of shared memory hold 128 bytes"
    for axis, tile, warp in zip("mnk", row.tile, row.warp):
        if tile % warp:
            yield "warp", f"warp {axis} = {warp} does not divide tile {axis} = {tile}"
    # mma.m16n8k32, of which ldmatrix fetches two along n and the pipeline wants two along k; on Turing four of mma.m8n8k16.
    steps = (32, 32, 64) if arch in TURING else (16, 16, 64)
    for axis, warp, step in zip("mnk", row.warp, steps):
        if warp % step:
            yield "warp", f"warp {axis} = {warp}; on {arch} a multiple of {step}"


def _threads(row: KernelRow) -> Iterator[tuple[str, str]]:
    m, n, k = warps(row)
    count = m * n * k
    if count > MAX_WARPS:
        yield "warp", f"{m} x {n} x {k} = {count} warps, at most {MAX_WARPS}"
    accumulators = row.warp.m * row.warp.n // WARP_SIZE
    if accumulators > MAX_ACCUMULATORS:
        what = f"{row.warp.m} x {row.warp.n} accumulators over {WARP_SIZE} threads are {accumulators} registers per thread"
        yield "warp", f"{what}, at most {MAX_ACCUMULATORS} stay out of local memory"
    per_load = count * WARP_SIZE * _ACCESS_BYTES
    for axis, size in (("m", row.tile.m), ("n", row.tile.n)):
        if size * row.tile.k % per_load:
            yield "tile", f"tile {axis} * k = {size * row.tile.k} bytes; {count} warps load {per_load} at a time"
    if not all(_stores_whole_rows(row, out_bytes) for out_bytes in _OUT_BYTES):
        yield "warp", f"{count // m} warps share 8 rows of {row.tile.n} columns: too few to store 16 bytes per thread; use fewer"


def _stores_whole_rows(row: KernelRow, out_bytes: int) -> bool:
    """Whether CUTLASS's OutputTileOptimalThreadMap covers the 8 rows of a step, each thread with 16 bytes of a row."""
    _, n, k = warps(row)
    if n * k not in (1, 2, 4):
        return False
    rows, width = _EXCHANGE_ROWS // (n * k), row.tile.n * out_bytes // _ACCESS_BYTES
    lanes_wide = min(width, 16)  # 256 bytes of a row
    lanes_high = min(_EXCHANGE_ROWS, WARP_SIZE // lanes_wide)
    return lanes_wide * lanes_high == WARP_SIZE and rows % lanes_high == 0 and width % lanes_wide == 0
