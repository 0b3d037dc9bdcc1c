"""Which rows and tables are legal on an architecture, decided without nvcc.

Every rule answers with the field to look at and a reason in numbers; the loader adds file and line. Sources: the CUDA
C++ Programming Guide's table of technical specifications (shared memory per block), the static assertions of CUTLASS's
SM90 kernels (schedules, tile sizes) and the PTX ISA's wgmma shapes for s8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from scaled_mm.tables import rules_block_scaled, rules_c2x, rules_decode, rules_gguf
from scaled_mm.tables.schema import Bucket, KernelRow, ModeRule, RowCost, TileTable
from scaled_mm.tables.select import describe_bucket

KIB = 1024
# Bytes that one thread block may opt in to.
SHARED_MEMORY = {
    "sm75": 64 * KIB,
    "sm80": 163 * KIB,
    "sm86": 99 * KIB,
    "sm87": 163 * KIB,
    "sm88": 99 * KIB,
    "sm89": 99 * KIB,
    "sm90": 227 * KIB,
    "sm100": 227 * KIB,
    "sm103": 227 * KIB,
    "sm110": 227 * KIB,
    "sm120": 99 * KIB,
    "sm121": 99 * KIB,
}
C3X_ARCHES = ("sm90",)

THREADS_PER_WARPGROUP = 128
# CUTLASS gives a consumer thread 240 registers; with more accumulators too few are left for addresses and epilogue.
MAX_ACCUMULATORS = 224
MAX_CLUSTER = 8
CLUSTER_SIZES = (1, 2, 4, 8)
SWIZZLE_ROWS = 8  # the 128-byte shared memory swizzle repeats every 8 rows
MAX_OUT_BYTES = 4  # a row is built for every out dtype; float32 and int32 need the most
_STATIC_SHARED_MEMORY = 48 * KIB


@dataclasses.dataclass(frozen=True)
class Finding:
    """A broken rule: `where` leads to the node, e.g. ("rows", 3, "tile") or ("buckets", 5, "kernel")."""

    where: tuple[str | int, ...]
    reason: str


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def consumer_warpgroups(row: KernelRow) -> int:
    """Warpgroups that share one tile's accumulators. Pingpong also has two, but each works on a tile of its own."""
    return 2 if row.schedule == "cooperative" else 1


def epilogue_bytes(row: KernelRow, out_bytes: int = MAX_OUT_BYTES) -> int:
    """Shared memory that the epilogue keeps: two buffers for the TMA store and four fp32/int32 vectors.

    The store goes in pieces of (64, or 128 for cooperative) x 32 elements, as in CUTLASS's SM90 epilogue builder. The
    vectors run along the tile's n: scale, bias, zero point and the sums that correct for it.
    """
    piece_m = min(64 * consumer_warpgroups(row), row.tile.m)
    piece_n = next(n for n in (32, 16, 8, 4, 2, 1) if row.tile.n % n == 0)
    pieces = (row.tile.m // piece_m) * (row.tile.n // piece_n)
    return _round_up(min(pieces, 2) * piece_m * piece_n * out_bytes + 4 * 4 * row.tile.n, 128)


def shared_memory_of(table: TileTable) -> int:
    """Bytes that one thread block may opt in to on every GPU that a table serves."""
    return min(SHARED_MEMORY[served] for served in table.serves)


def row_cost(row: KernelRow, arch: str) -> RowCost:
    """Estimate a row's shared memory and registers on `arch` (a key of SHARED_MEMORY), whether it is legal or not.

    stages = (shared memory - epilogue) / (tile_m * tile_k + tile_n * tile_k + 16 bytes of barriers), as CUTLASS's
    StageCountAutoCarveout counts them. The generic kernel has one stage and no TMA epilogue.
    """
    if row.gguf:
        return rules_gguf.cost(row, SHARED_MEMORY[arch])
    if row.block_scaled:
        return rules_block_scaled.cost(row)
    if row.family == "c2x":
        return rules_c2x.cost(row)
    if row.family == "decode":
        return rules_decode.cost(row)
    stage = (row.tile.m + row.tile.n) * row.tile.k
    if row.family == "generic":
        return RowCost(stage, 0, 1, stage, None)
    stage = _round_up(stage, 128) + 16
    epilogue = epilogue_bytes(row)
    stages = max(0, SHARED_MEMORY[arch] - epilogue) // stage if row.stages == "auto" else row.stages
    threads = THREADS_PER_WARPGROUP * consumer_warpgroups(row)
    return RowCost(stage, epilogue, stages, epilogue + stages * stage, -(-row.tile.m * row.tile.n // threads))


def _tile_and_schedule(row: KernelRow) -> Iterator[tuple[str, str]]:
    m, n, k = row.tile
    if m % 64 or m > 256:
        yield "tile", f"tile m = {m}; wgmma needs a multiple of 64, TMA one of at most 256"
    if n % 8 or n > 256:
        yield "tile", f"tile n = {n}; wgmma needs a multiple of 8, at most 256"
    if k % 32:
        yield "tile", f"tile k = {k}; an INT8 wgmma takes 32 along k, so a multiple of 32"
    if row.schedule is None:
        yield "schedule", "a c3x row needs a schedule: warp_specialized, pingpong or cooperative"
    if row.schedule == "cooperative" and m % 128:
        yield (
            "schedule",
            f"cooperative splits the tile between two warpgroups of 64 rows: tile m = {m} is no multiple of 128",
        )
    if row.schedule == "pingpong" and m not in (64, 128):
        yield "schedule", f"pingpong gives a whole tile to one warpgroup: tile m = {m}, expected 64 or 128"
    if row.scheduler == "stream_k":
        yield "scheduler", "stream_k kernels are not part of this version; use persistent"
    if row.split_k > 1:
        yield "split_k", "split-K kernels are not part of this version; leave it out"
    if row.prefetch % k:
        yield "prefetch", f"prefetch = {row.prefetch} bytes of K; whole tiles of {k} are asked for"
    if row.schedule == "warp_specialized":
        for field, value, default in (("raster", row.raster, "heuristic"), ("swizzle", row.swizzle, 1)):
            if value != default:
                yield field, f"{value} orders the tiles of a persistent grid; warp_specialized gives each block one tile"


def _cluster(row: KernelRow) -> Iterator[tuple[str, str]]:
    for axis, size in zip("mn", row.cluster, strict=True):
        if size not in CLUSTER_SIZES:
            yield "cluster", f"cluster {axis} = {size}, expected one of {', '.join(map(str, CLUSTER_SIZES))}"
            return
    if row.cluster.m * row.cluster.n > MAX_CLUSTER:
        blocks = row.cluster.m * row.cluster.n
        yield (
            "cluster",
            f"{row.cluster} is {blocks} thread blocks; {MAX_CLUSTER} is the most that every GPU can schedule",
        )
    # TMA multicast: the blocks along m share the n side of the tile, each fetching its part, and the other way round.
    for side, size, axis, parts in (("n", row.tile.n, "m", row.cluster.m), ("m", row.tile.m, "n", row.cluster.n)):
        if size % (parts * SWIZZLE_ROWS) and size % SWIZZLE_ROWS == 0:
            yield (
                "cluster",
                (f"the {parts} blocks along {axis} share tile {side} = {size}: each part must be a multiple of {SWIZZLE_ROWS} rows"),
            )


def _resources(row: KernelRow, arch: str) -> Iterator[tuple[str, str]]:
    limit, cost = SHARED_MEMORY[arch], row_cost(row, arch)
    if cost.accumulators > MAX_ACCUMULATORS:
        shared_by = consumer_warpgroups(row) * THREADS_PER_WARPGROUP
        yield (
            "tile",
            (
                f"{row.tile.m} x {row.tile.n} accumulators over {shared_by} threads are {cost.accumulators} registers "
                f"per thread, at most {MAX_ACCUMULATORS} stay out of local memory"
            ),
        )
    if row.stages == "auto" and cost.stages < 2:
        yield (
            "tile",
            (
                f"one stage of {cost.stage_bytes} bytes beside an epilogue of {cost.epilogue_bytes}: "
                f"{cost.stages} fit in the {limit} bytes of {arch}, a pipeline needs 2"
            ),
        )
    elif row.stages != "auto" and row.stages < 2:
        yield "stages", f"stages = {row.stages}, a pipeline needs at least 2"
    elif cost.shared_memory > limit:
        yield (
            "stages",
            (
                f"{cost.stages} stages of {cost.stage_bytes} bytes and an epilogue of {cost.epilogue_bytes} are "
                f"{cost.shared_memory} bytes of shared memory, {arch} has {limit}"
            ),
        )


def _generic(row: KernelRow, arch: str) -> Iterator[tuple[str, str]]:
    # 2 x 2 warps of whole m16n8k32 fragments, and 128 threads that move whole 16-byte vectors.
    m, n, k = row.tile
    for axis, size, step in (("m", m, 32), ("n", n, 16), ("k", k, 32)):
        if size % step or size > 128:
            yield "tile", f"tile {axis} = {size}; a generic row needs a multiple of {step}, at most 128"
    for axis, size in (("m", m), ("n", n)):
        if size * k % 2048:
            yield "tile", f"tile {axis} * k = {size * k}; a generic row's 128 threads need a multiple of 2048 bytes"
    shared = row_cost(row, arch).shared_memory
    if shared > _STATIC_SHARED_MEMORY:
        yield "tile", f"{shared} bytes of shared memory, a generic row has {_STATIC_SHARED_MEMORY}"
    defaults = (("cluster", (1, 1)), ("schedule", None), ("scheduler", "persistent"), ("swap_ab", False))
    for field, default in (*defaults, ("stages", "auto"), ("split_k", 1), ("prefetch", 0), ("early_weights", False)):
        if getattr(row, field) != default:
            yield field, "a generic row has none: leave it out"


def serves_findings(arch: str, serves: Sequence[str] | None) -> Iterator[tuple[int | None, str]]:
    """(index in `serves`, or None for all of it, and the reason) for what keeps a table from serving an architecture."""
    if serves is None:
        return
    if arch not in serves:
        yield None, f"expected {arch} among the architectures served, got {', '.join(serves) or 'none'}"
    for index, served in enumerate(serves):
        if served not in SHARED_MEMORY:
            yield index, f"unknown architecture {served!r}; known: {', '.join(SHARED_MEMORY)}"
        elif served in serves[:index]:
            yield index, f"{served} stands twice"
        elif SHARED_MEMORY[served] < SHARED_MEMORY[arch]:
            yield index, f"{served} has {SHARED_MEMORY[served]} bytes of shared memory, the rows may use {arch}'s {SHARED_MEMORY[arch]}"
        elif arch in C3X_ARCHES and served != arch:
            yield index, f"wgmma kernels run on {arch} alone, not on {served}"


def _grouped(row: KernelRow) -> Iterator[tuple[str, str]]:
    if row.split_k > 1:
        yield "split_k", "a grouped row has none: leave it out"
    if row.prefetch:
        yield "prefetch", "a grouped row has none: its first tile is known on the device only"
    if row.early_weights:
        yield "early_weights", "a grouped row has none: its first tile is known on the device only"
    if row.schedule == "warp_specialized":
        yield "schedule", "warp_specialized gives each block one tile; the tiles of a grouped product are counted on the device"


def row_findings(row: KernelRow, arch: str) -> list[tuple[str, str]]:
    """(field, reason) for every rule of `arch` that the row breaks; `arch` is a key of SHARED_MEMORY."""
    if row.gguf:
        return list(rules_gguf.findings(row, arch, SHARED_MEMORY[arch]))
    if row.family in rules_gguf.FAMILIES:
        return [("family", f"{row.family} rows are those of block products: they stand in the section gguf")]
    if row.block_scaled:
        return list(rules_block_scaled.findings(row, arch, SHARED_MEMORY[arch]))
    return [*(_grouped(row) if row.grouped else ()), *_family_findings(row, arch)]


def _family_findings(row: KernelRow, arch: str) -> list[tuple[str, str]]:
    if row.family == "c2x":
        return list(rules_c2x.findings(row, arch, SHARED_MEMORY[arch]))
    if row.warp is not None:
        return [("warp", f"a {row.family} row has none: leave it out")]
    if row.family == "generic":
        return list(_generic(row, arch))
    if arch not in C3X_ARCHES:
        return [("family", f"{row.family} rows use wgmma, which {arch} lacks; they run on {', '.join(C3X_ARCHES)}")]
    if row.family == "decode":
        return list(rules_decode.findings(row, SHARED_MEMORY[arch]))
    return [*_tile_and_schedule(row), *_cluster(row), *_resources(row, arch)]


def _contains(outer: Bucket, inner: Bucket) -> bool:
    pairs = ((outer.m, inner.m), (outer.n, inner.n), (outer.k, inner.k))
    if outer.flags & ~inner.flags or any(least > inner_least for least, inner_least in zip(outer.least, inner.least)):
        return False
    return all(big is None or (small is not None and small <= big) for big, small in pairs)


def bucket_findings(buckets: Sequence[Bucket], row_names: Sequence[str]) -> list[Finding]:
    """Buckets that name no row, that nothing can reach, or that leave sizes unserved."""
    findings = []
    for index, bucket in enumerate(buckets):
        if bucket.kernel not in row_names:
            findings.append(Finding(("buckets", index, "kernel"), f"no row is named {bucket.kernel!r}"))
        for axis in "mnk":
            least, most = getattr(bucket, f"{axis}_min"), getattr(bucket, axis)
            if most is not None and least > most:
                findings.append(Finding(("buckets", index, f"{axis}_min"), f"expected {most} or less, which is {axis}, got {least}"))
        for earlier in range(index):
            if _contains(buckets[earlier], bucket):
                reason = f"unreachable: bucket {earlier} ({describe_bucket(buckets[earlier])}) comes first and takes all of {describe_bucket(bucket)}"
                findings.append(Finding(("buckets", index), reason))
                break
    if not buckets:
        findings.append(Finding(("buckets",), "a table needs at least one bucket"))
    elif (buckets[-1].m, buckets[-1].n, buckets[-1].k, *buckets[-1].least, buckets[-1].flags) != (None, None, None, 0, 0, 0, 0):
        reason = f"the last bucket must be open in m, n and k, this one takes {describe_bucket(buckets[-1])}"
        findings.append(Finding(("buckets", len(buckets) - 1), reason))
    return findings


def fallback_findings(fallback: str, rows: Sequence[KernelRow], row_names: Sequence[str]) -> list[Finding]:
    """The fallback must exist and take any alignment. `row_names` also has those of rows that did not validate."""
    if fallback not in row_names:
        return [Finding(("fallback",), f"no row is named {fallback!r}")]
    return [
        Finding(("fallback",), f"{fallback!r} is a {row.family} row; the fallback takes any strides: a generic row")
        for row in rows
        if row.name == fallback and row.alignment != (1, 1, 1)
    ]


def mode_findings(modes: Sequence[ModeRule]) -> list[Finding]:
    """Rules of `auto` that nothing can reach, or that leave numbers of tokens without a mode."""
    findings = []
    for index, rule in enumerate(modes):
        if index and (modes[index - 1].m is None or (rule.m is not None and rule.m <= modes[index - 1].m)):
            findings.append(Finding(("auto", index), f"unreachable: expected more tokens than the rule before, m <= {modes[index - 1].m or 'open'}"))
    if not modes or modes[-1].m is not None:
        findings.append(Finding(("auto",), "the last rule must be open: a mode without m"))
    return findings
