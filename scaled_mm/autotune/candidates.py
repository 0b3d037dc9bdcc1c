"""Candidate rows: every legal combination of the fields of a row, named as the tables name theirs. No nvcc, no GPU.

`candidates("sm90")` crosses the values below and keeps what `tables.rules` finds nothing against. There are thousands;
`model` says which of them are worth compiling for a product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from scaled_mm.tables import KernelRow, TileTable
from scaled_mm.tables.rules import C3X_ARCHES, KIB, SHARED_MEMORY, row_findings
from scaled_mm.tables.rules_c2x import TURING
from scaled_mm.tables.rules_decode import MAX_CLUSTER
from scaled_mm.tables.rules_decode import cost as decode_cost

SCHEDULES = {"warp_specialized": "ws", "pingpong": "pp", "cooperative": "co"}

# c3x (wgmma). Tile n in steps that the epilogue stores in pieces of 8, 16 or 32 columns.
_C3X_TILE_M = (64, 128, 256)
_C3X_TILE_N = (8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_C3X_TILE_K = (128, 256)
_C3X_CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2))
_C3X_STAGES = ("auto", 3, 4, 5, 6, 8, 10)  # fewer than fit: two blocks share a multiprocessor
_C3X_SWIZZLES = (1, 2, 4, 8)
_C3X_PREFETCH = (0, 1024)

# decode (csrc/int8/decode): as many stages as fit with one block on a multiprocessor, with two, with three and with four.
_DECODE_TILE_M = (64, 128)
_DECODE_TILE_N = (8, 16, 32, 48, 64, 96, 128)
_DECODE_SPLITS = (1, 2, 4, 8)
_DECODE_SHARES = (1, 2, 4)
_DECODE_RESIDENT = (1, 2, 3, 4)

# c2x (mma.sync).
_C2X_TILE_MN = (16, 32, 64, 128, 256)
_C2X_TILE_K = (64, 128)
_C2X_WARP_MN = (16, 32, 64)
_C2X_STAGES = (3, 4, 5, 6)
_C2X_SWIZZLES = (1, 4, 8)
_C2X_SPLITS = (1, 2, 4, 8)


def candidates(table: TileTable) -> list[KernelRow]:
    """The legal rows for the products of a table: its own, then every other combination that its rules let through.

    A table serves several architectures; a candidate is legal on all of them, as the table's own rows are. No generic rows:
    they are the fallback, not rivals. Names are unique; one that the table has means the table's row.
    """
    own = {row.name: row for row in table.rows if row.family != "generic"}
    served = table.serves or (table.arch,)
    found = dict(own)
    rows = itertools.chain(_decode_rows(), _c3x_rows()) if table.arch in C3X_ARCHES else _c2x_rows(table.arch)
    for row in rows:
        if row.name not in found and not any(row_findings(row, arch) for arch in served):
            found[row.name] = row
    return list(found.values())


def row_name(row: KernelRow) -> str:
    """The canonical name of a row, from its fields: what makes two rows of a table different is in it.

    Not in it: raster, which stays heuristic here, and early_weights, which `early_weights` sets from the other fields.
    """
    if row.family == "generic":
        return f"generic_{row.tile}"
    if row.family == "c2x":
        options = "".join(f"_{letter}{value}" for letter, value in (("z", row.swizzle), ("k", row.split_k)) if value > 1)
        return f"c2x_{row.tile}_w{row.warp}_s{row.stages}{options}"
    cluster = "" if row.cluster == (1, 1) else f"_c{row.cluster.m}{row.cluster.n}"
    if row.family == "decode":
        return f"decode_{row.tile}{'_co' if row.schedule else ''}{cluster}_k{row.split_k}_x{row.stages}"
    swizzle = "" if row.swizzle == 1 else f"_s{row.swizzle}"
    prefetch = "" if row.prefetch == 0 else f"_p{row.prefetch}"
    stages = "" if row.stages == "auto" else f"_x{row.stages}"
    return f"c3x_{row.tile}_{SCHEDULES[row.schedule]}{cluster}{'_swap' if row.swap_ab else ''}{swizzle}{prefetch}{stages}"


def early_weights(tile_m: int, tile_n: int, swap_ab: bool, prefetch: int) -> bool:
    """Whether a c3x candidate loads constant weights early: the habit of sm90.yaml, whose own rows may differ from it.

    Decode rows do: swapped ones of a narrow tile, and 64-row tiles that do not ask L2 for them instead.
    """
    return tile_n <= 64 if swap_ab else tile_m == 64 and not prefetch


def _row(**fields) -> KernelRow:
    row = KernelRow.model_validate({"name": "candidate", **fields})
    return row.model_copy(update={"name": row_name(row)})


def _c3x_rows() -> Iterator[KernelRow]:
    grid = itertools.product(
        _C3X_TILE_M, _C3X_TILE_N, _C3X_TILE_K, SCHEDULES, _C3X_CLUSTERS, (False, True), _C3X_SWIZZLES, _C3X_PREFETCH, _C3X_STAGES
    )
    for m, n, k, schedule, cluster, swap_ab, swizzle, prefetch, stages in grid:
        # Rows that the rules would refuse anyway, or that differ in nothing from another: not worth a KernelRow each.
        if schedule == "warp_specialized" and swizzle > 1:
            continue
        if stages != "auto" and (stages * (m + n) * k > 113 * 1024 or schedule != "warp_specialized"):
            continue  # a persistent block has its multiprocessor to itself, and two blocks have half of the shared memory each
        if prefetch and schedule == "pingpong":
            continue  # it has several tiles a block: the first one's loads are a small part
        early = early_weights(m, n, swap_ab, prefetch)
        yield _row(
            family="c3x",
            tile=[m, n, k],
            schedule=schedule,
            cluster=list(cluster),
            swap_ab=swap_ab,
            swizzle=swizzle,
            prefetch=prefetch,
            stages=stages,
            early_weights=early,
        )


def _decode_rows() -> Iterator[KernelRow]:
    for m, n, split_k, share, schedule in itertools.product(_DECODE_TILE_M, _DECODE_TILE_N, _DECODE_SPLITS, _DECODE_SHARES, (None, "cooperative")):
        if n % (8 * share) or share * split_k > MAX_CLUSTER:
            continue
        fields = dict(family="decode", tile=[m, n, 128], swap_ab=True, split_k=split_k, cluster=[share, 1], schedule=schedule)
        for stages in {_decode_stages(_row(**fields, stages=2), blocks) for blocks in _DECODE_RESIDENT}:
            if stages >= 2:
                yield _row(**fields, stages=stages)


def _decode_stages(row: KernelRow, blocks: int) -> int:
    """The most stages with which `blocks` of a decode row's blocks share a multiprocessor, for 16-bit out: one block, for any out."""
    cost = decode_cost(row, 4 if blocks == 1 else 2)
    return ((SHARED_MEMORY["sm90"] + KIB) // blocks // KIB * KIB - KIB - cost.epilogue_bytes) // cost.stage_bytes


def _c2x_rows(arch: str) -> Iterator[KernelRow]:
    stages_of = (2,) if arch in TURING else _C2X_STAGES
    for m, n, k in itertools.product(_C2X_TILE_MN, _C2X_TILE_MN, _C2X_TILE_K):
        for warp_m, warp_n in itertools.product(_C2X_WARP_MN, _C2X_WARP_MN):
            if warp_m > m or warp_n > n:
                continue
            for stages, swizzle, split_k in itertools.product(stages_of, _C2X_SWIZZLES, _C2X_SPLITS):
                for warp_k in {64, k}:
                    yield _row(family="c2x", tile=[m, n, k], warp=[warp_m, warp_n, warp_k], stages=stages, swizzle=swizzle, split_k=split_k)
