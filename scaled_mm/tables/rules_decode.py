"""The rules of decode rows (csrc/int8/decode): what their kernel takes, and what it occupies."""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.tables.schema import KernelRow, RowCost

COLUMNS = (64, 128)  # of b, the wide side of the MMA: 64 to a warpgroup
STEP_K = 128  # the width of the shared memory swizzle
MAX_ROWS = 256  # of a, the narrow side of the MMA
SPLITS = (1, 2, 4, 8)  # blocks of a cluster that share K
SHARES = (1, 2, 4, 8)  # tiles of columns in a cluster
MAX_CLUSTER = 8  # blocks: the most that every GPU can schedule
_FIELDS = ("name", "family", "tile", "swap_ab", "split_k", "stages", "cluster", "schedule")
_WARPGROUP = 128  # threads


def owners(row: KernelRow) -> int:
    """Blocks of a cluster that own rows of a tile: as many as divide it into whole fragments of 8 rows."""
    split = row.split_k
    while split > 1 and row.tile.n // 8 % split:
        split //= 2
    return split


def cost(row: KernelRow, out_bytes: int = 4) -> RowCost:
    """Bytes of shared memory, as `Shared` in csrc/int8/decode/storage.cuh has them, and accumulators per thread.

    A stage has a tile of both operands and two barriers. Beside the stages there are, for the rows that a block owns, an output tile,
    scales, bias and zero-point terms, and where K is split the other blocks' sums with two barriers, of two tiles if the kernel is
    persistent; all of it is rounded up to 1024. out_bytes: of an element of the output.
    """
    columns, rows = row.tile.m, row.tile.n
    stage = (columns + rows) * STEP_K + 16
    stages = 0 if row.stages == "auto" else row.stages
    owned = rows // owners(row)
    out = owned * (columns * out_bytes + 16)
    exchange = (2 if row.schedule else 1) * ((row.split_k - 1) * columns * owned * 4 + 16) if row.split_k > 1 else 8
    epilogue = out + exchange + (2 * columns + owned) * 4 + (columns + owned) * 8
    return RowCost(stage, epilogue, stages, -(-(stages * stage + epilogue) // 1024) * 1024, 64 * rows // _WARPGROUP)


def findings(row: KernelRow, limit: int) -> Iterator[tuple[str, str]]:
    """(field, reason) for every rule broken; `limit`: bytes of shared memory that a block may have."""
    for field, info in KernelRow.model_fields.items():
        if field not in _FIELDS and getattr(row, field) != info.default:
            yield field, "a decode row has none: leave it out"
    if not row.swap_ab:
        yield "swap_ab", "a decode row computes out^T: swap_ab: true"
    if row.tile.m not in COLUMNS or row.tile.k != STEP_K:
        yield "tile", f"tile {row.tile}; a decode row has m = 64 or 128 and k = {STEP_K}"
    if row.tile.n % (8 if row.tile.n <= 32 else 16) or row.tile.n > MAX_ROWS:
        yield "tile", f"tile n = {row.tile.n}, expected a multiple of 8, from 32 on of 16, at most {MAX_ROWS}: wgmma's shapes for int8"
    if row.split_k not in SPLITS:
        yield "split_k", f"split_k = {row.split_k}, expected one of {', '.join(map(str, SPLITS))}: blocks of a cluster"
    if row.cluster.n != 1 or row.cluster.m not in SHARES:
        yield "cluster", f"cluster {row.cluster}; expected m of {', '.join(map(str, SHARES))}, tiles of columns that share rows of a, and n = 1"
    elif row.cluster.m * row.split_k > MAX_CLUSTER:
        yield (
            "cluster",
            f"{row.cluster.m} tiles of {row.split_k} blocks each; a cluster of {MAX_CLUSTER} blocks is the most that every GPU can schedule",
        )
    elif row.tile.n % (8 * row.cluster.m):
        yield "cluster", f"tile n = {row.tile.n}: each of {row.cluster.m} blocks loads a part of the rows, whole groups of 8"
    if row.schedule not in (None, "cooperative"):
        yield "schedule", f"{row.schedule}; a decode row has cooperative, a persistent kernel, or none: each cluster has one tile"
    if row.stages == "auto" or row.stages < 2:
        yield "stages", f"stages = {row.stages}, expected a number of at least 2: how many decides how many blocks share a multiprocessor"
    elif cost(row).shared_memory > limit:
        yield "stages", f"{row.stages} stages are {cost(row).shared_memory} bytes of shared memory, there are {limit}"
