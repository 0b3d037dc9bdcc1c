"""Which rows of block products are legal, decided without nvcc: `gguf_mma` by mma.sync, `gguf_wgmma` on SM90.

A tile is [tokens, rows of the weight, 256 k]. The numbers are those of csrc/gguf, from above; the generated sources assert that a
kernel's shared memory is at most what is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator

from scaled_mm.gguf_formats import BLOCK, TILE_BLOCKS, TILE_ROWS, WEIGHT_FORMATS
from scaled_mm.tables.schema import KernelRow, RowCost

FAMILIES = ("gguf_mma", "gguf_wgmma")
WGMMA_ARCHES = ("sm90",)
TILE_K = TILE_BLOCKS * BLOCK
BAND_ROWS = 16  # of an instruction: a warp of a gguf_mma row multiplies one or two bands
MOST_SHARES = 16  # thread blocks that share a tile of a gguf_wgmma row, on average
_BARRIERS = 2048
_TOKENS = {"gguf_mma": (8, 16, 32), "gguf_wgmma": (8, 16, 32, 64, 128, 256)}
_MMA_TOKENS = 16  # a gguf_wgmma row of at most as many multiplies by mma.sync, and a stage holds the activations of a whole tile
_FIELDS = {
    "gguf_mma": ("name", "family", "tile", "stages", "gguf"),
    "gguf_wgmma": ("name", "family", "tile", "split_k", "stages", "gguf"),
}


def warps(row: KernelRow) -> int:
    """Of a gguf_mma row's thread block. More tokens take more registers."""
    return 8 if row.tile.m > 16 else 16


def _value_stages(row: KernelRow) -> tuple[int, int]:
    """(most stages of activations that a gguf_wgmma row has whatever its `stages`, bytes of one): halves and two floats a block."""
    tokens = row.tile.m
    return (0, 0) if tokens <= _MMA_TOKENS else (6 if tokens <= 128 else 4, tokens * (2 * 64 + 2 * 8))


def stage_bytes(row: KernelRow, fmt: str) -> int:
    """Of one stage: a tile's rows for each warp of a gguf_mma row; tiles of the weight of a gguf_wgmma row, sums, activations."""
    weight = WEIGHT_FORMATS[fmt].tile_bytes
    if row.family == "gguf_mma":
        return warps(row) * weight * row.tile.n // TILE_ROWS
    values = row.tile.m * TILE_BLOCKS * (2 * BLOCK + 8) if row.tile.m <= _MMA_TOKENS else 0
    sums = row.tile.m * TILE_BLOCKS * 8 if WEIGHT_FORMATS[fmt].second == "m" and not values else 0
    return row.tile.n // TILE_ROWS * weight + values + sums


def _beside_stages(row: KernelRow) -> int:
    if row.family == "gguf_mma":
        return 0
    count, size = _value_stages(row)
    return _BARRIERS + count * size


def stages(row: KernelRow, fmt: str, limit: int) -> int:
    """How many stages a row has for a format: its own number, or what fits `limit` bytes of shared memory.

    1 of a gguf_mma row: it has none, and reads the weight from memory as it goes.
    """
    fit = min(row.stages, max(0, limit - _beside_stages(row)) // stage_bytes(row, fmt))
    return max(fit, 1) if row.family == "gguf_mma" else fit


def shared_memory(row: KernelRow, fmt: str, limit: int) -> int:
    """Dynamic shared memory in bytes, from above, of a row that is built for a format and a GPU with `limit` bytes.

    Without what `notes` says of activations that lie well.
    """
    count = stages(row, fmt, limit)
    if row.family == "gguf_mma":  # the warps' sums meet where the stages were
        return max(count * stage_bytes(row, fmt) if count > 1 else 0, warps(row) * row.tile.n * row.tile.m * 4)
    return count * stage_bytes(row, fmt) + _beside_stages(row)


def notes(row: KernelRow, fmt: str, limit: int) -> Iterator[str]:
    """What a row does otherwise than its fields say, for people."""
    count = stages(row, fmt, limit)
    if row.family == "gguf_mma" and row.tile.m <= 16 and count > 1:
        yield "float16 and bfloat16 activations that lie well take shared memory too, if they fit (since SM80)"
        if row.tile.m == 8 and row.tile.n == BAND_ROWS:
            more = ", with one stage more, if that fits" if (count + 1) * stage_bytes(row, fmt) < limit else ""
            yield f"one or two such tokens have a kernel of their own{more} (since SM80)"
    if row.family == "gguf_wgmma" and row.tile.m > 128:
        idle = " and where such tiles would leave multiprocessors idle" if WEIGHT_FORMATS[fmt].second == "m" else ""
        yield f"with q8_1 activations{idle} a tile has 128 tokens"


def cost(row: KernelRow, limit: int) -> RowCost:
    """What it takes with the format that takes most."""
    if row.stages == "auto":
        return RowCost(0, 0, 1, 0, None)
    largest = max(WEIGHT_FORMATS, key=lambda fmt: shared_memory(row, fmt, limit))
    return RowCost(stage_bytes(row, largest), _beside_stages(row), stages(row, largest, limit), shared_memory(row, largest, limit), None)


def findings(row: KernelRow, arch: str, limit: int) -> Iterator[tuple[str, str]]:
    """(field, reason) for every rule broken; `limit`: bytes of shared memory that a block may have."""
    if row.family not in FAMILIES:
        yield "family", f"no kernel of block products is a {row.family} one; expected {' or '.join(FAMILIES)}"
        return
    if row.family == "gguf_wgmma" and arch not in WGMMA_ARCHES:
        yield "family", f"gguf_wgmma rows use wgmma, which {arch} lacks; they run on {', '.join(WGMMA_ARCHES)}"
        return
    for field, info in KernelRow.model_fields.items():
        if field not in _FIELDS[row.family] and getattr(row, field) != info.default:
            yield field, f"a {row.family} row has none: leave it out"
    tokens, rows, k = row.tile
    if tokens not in _TOKENS[row.family]:
        yield "tile", f"tile m = {tokens} tokens, expected {', '.join(map(str, _TOKENS[row.family]))}"
    allowed = (BAND_ROWS, 2 * BAND_ROWS) if row.family == "gguf_mma" else (TILE_ROWS, 2 * TILE_ROWS)
    if rows not in allowed:
        yield "tile", f"tile n = {rows} rows of the weight, expected {' or '.join(map(str, allowed))}"
    if k != TILE_K:
        yield "tile", f"tile k = {k}, expected {TILE_K}: a tile of a packed weight has {TILE_BLOCKS} blocks of {BLOCK}"
    if row.stages == "auto" or (row.stages < 2 and row.family == "gguf_wgmma"):
        least = "at least 2" if row.family == "gguf_wgmma" else "1 for none"
        yield "stages", f"stages = {row.stages}; a {row.family} row says how many, {least}"
        return
    if not 1 <= row.split_k <= MOST_SHARES:
        yield "split_k", f"split_k = {row.split_k}, expected 1 to {MOST_SHARES}: thread blocks that share the K of a tile that is left over"
    if rows in allowed and max(stages(row, fmt, limit) for fmt in WEIGHT_FORMATS) < row.stages:
        least = min(WEIGHT_FORMATS, key=lambda fmt: stage_bytes(row, fmt))
        what = f"{row.stages} stages of {stage_bytes(row, least)} bytes and {_beside_stages(row)} beside them, for {least}, which takes least"
        yield "stages", f"{what}, are more shared memory than the {limit} bytes of {arch}"
