"""Selects the kernel config of a tile table for one product, and gives the reason."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from scaled_mm.errors import K_BOUNDS, BadParamError, InternalError
from scaled_mm.gguf_formats import BLOCK, lookup
from scaled_mm.kernels.arch import ARCHES
from scaled_mm.kernels.dtypes import GGUF_MODES
from scaled_mm.kernels.sections import SECTIONS, TOP_LEVEL

if TYPE_CHECKING:
    from scaled_mm.kernels.config import KernelConfig
    from scaled_mm.kernels.gpu import GpuFacts
    from scaled_mm.tables.schema import Bucket, TileTable

MODES = GGUF_MODES[1:]
"""Of GGUF products, without "auto"."""

FASTEST = "fastest"
"""Instead of a kernel config's name, in a bucket: the one with the least predicted time."""

_LARGEST_SIZE = 2**31 - 1
_LARGEST_REACH = 2**60  # elements from the first to the last of a tensor


@dataclasses.dataclass(frozen=True)
class Selection:
    """A selected kernel config. bucket_index: from 0, in the order of the table; -1 if no bucket was used."""

    row: KernelConfig
    bucket_index: int
    reason: str


def describe_bucket(bucket: Bucket) -> str:
    """`M <= 16, 4096 <= N <= 8448, any K`, and `, constant b`, `, mode w4a8` or `, formats with minima`."""
    bounds = (("M", bucket.m_min, bucket.m), ("N", bucket.n_min, bucket.n), ("K", bucket.k_min, bucket.k))
    return ", ".join([*(_describe_bound(*bound) for bound in bounds), *describe_conditions(bucket)])


def describe_conditions(bucket: Bucket) -> list[str]:
    """What a bucket requires of a product besides sizes."""
    said = {
        "constant b": bucket.constant_b,
        f"mode {bucket.mode}": bucket.mode is not None,
        "formats with minima": bucket.minima,
    }
    return [condition for condition, required in said.items() if required]


def _describe_bound(axis: str, least: int, most: int | None) -> str:
    if least and least == most:
        return f"{axis} = {least}"
    if most is None:
        return f"{axis} >= {least}" if least else f"any {axis}"
    return f"{least} <= {axis} <= {most}" if least else f"{axis} <= {most}"


def select_bucket(
    table: TileTable,
    M: int,
    N: int,
    K: int,
    constant_b: bool = False,
    mode: str | None = None,
    gpu: GpuFacts | None = None,
    count: int = 1,
    minima: bool = False,
) -> Selection:
    """See `TileTable.select`."""
    for axis, size in (("M", M), ("N", N), ("K", K)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise BadParamError(f"{axis}: expected an integer >= 0, got {size!r}")
    if mode is not None and mode not in MODES:
        raise BadParamError(f"mode: expected {', '.join(MODES)} or None, got {mode!r}")
    if K == 0 and not table.auto:  # GGUF kernels take K = 0
        return Selection(table.row(table.fallback), -1, "K = 0: the fallback row, there is nothing to multiply")
    for index, bucket in enumerate(table.buckets):
        if bucket.covers(M, N, K, constant_b, mode, minima):
            reason = f"bucket {index} ({describe_bucket(bucket)}) of {table.source}"
            if bucket.kernel != FASTEST:
                return Selection(table.row(bucket.kernel), index, reason)
            if not (M and N):
                return Selection(table.row(table.fallback), index, f"{reason}; there is nothing to compute")
            fastest = table.fastest(M, N, K, constant_b, gpu, count=count)
            if not fastest:
                return Selection(table.row(table.fallback), index, f"{reason}; only the fallback writes rows of {N} elements")
            us, row = fastest[0]
            return Selection(row, index, f"{reason}; the fastest by prediction, {us:.4g} us")
    # The rules refuse such a table, but a TileTable constructed without the loader can get here.
    raise InternalError(f"{table.source}: no bucket takes M={M}, N={N}, K={K}; the last bucket must be open")


def contiguous_row(
    table: TileTable, M: int, N: int, K: int, constant_b: bool = False, out_bytes: int = 2, gpu: GpuFacts | None = None
) -> KernelConfig:
    """The kernel config that the core selects for contiguous operands. For the other arguments: `TileTable.select`."""
    selection = table.select(M, N, K, constant_b, gpu=gpu)
    if not contiguous_misfits(selection.row, M, N, K, out_bytes):
        return selection.row
    rows = [row for _, row in table.fastest(M, N, K, constant_b, gpu, out_bytes)] if M and N and K else []
    return next((row for row in rows if not contiguous_misfits(row, M, N, K, out_bytes)), table.row(table.fallback))


def time_fields(table: TileTable, row: KernelConfig) -> tuple[int | float, ...]:
    """The fields of scaledMMTimeModel_t of one of a table's kernel configs; all 0 where kernels are not chosen by time, and for
    an architecture of which no GPU is known."""
    arch = ARCHES.get(table.arch)
    if arch is None or arch.typical is None or not table.has_predicted_time(row):
        return (0,) * 17
    model = table.time_model(row)
    sizes = (
        model.unit_m,
        model.unit_n,
        model.unit_k,
        model.blocks,
        model.cluster,
        model.resident,
        model.least_steps,
        int(model.epilogue_overlaps),
        model.most_parts,
    )
    rates = (model.start_us, model.step_us, model.tile_us, model.memory, model.wait_us, model.l2)
    return *sizes, *rates, model.sharing_us, model.two_tiles_us


def refusal(M: int, N: int, K: int, section: str = TOP_LEVEL) -> str | None:
    """Why the C core refuses contiguous operands of these sizes, whatever the kernel config: the expectation that is not met. None if it does
    not refuse them."""
    if max(M, N, K) > _LARGEST_SIZE:
        return f"M, N and K <= {_LARGEST_SIZE}"
    if SECTIONS[section].k_bounded and K > K_BOUNDS[0]:
        return f"K <= {K_BOUNDS[0]}, beyond which a 32-bit accumulator is not exact"
    if M * N - 1 > _LARGEST_REACH:  # a and b are smaller: K is
        return "M * N <= 2^60, beyond which out is larger than any memory"
    return None


def block_refusal(M: int, N: int, K: int, fmt: str) -> str | None:
    """The same for a weight [N, K] in a GGUF format and float16 activations of M tokens."""
    if max(M, N, K) > _LARGEST_SIZE:
        return f"M, N and K <= {_LARGEST_SIZE}"
    if K % BLOCK:
        return f"K a multiple of {BLOCK}, the values of a block"
    row_bytes = K // BLOCK * lookup(fmt).block_bytes
    for name, rows, columns, stride in (("out", M, N, N), ("activation", M, K, K), ("weight", N, K, row_bytes)):
        if max(rows - 1, 0) * stride + max(columns - 1, 0) > _LARGEST_REACH:
            return f"tensors that reach to 2^60 at most, {name} reaches beyond"
    return None


def output_tiles(row: KernelConfig, M: int, N: int) -> int:
    """The number of tiles that cover an M x N output, to be distributed over the SMs."""
    over_m, over_n = (row.tile.n, row.tile.m) if row.swap_ab else (row.tile.m, row.tile.n)
    return -(-M // over_m) * -(-N // over_n)


def contiguous_misfits(row: KernelConfig, M: int, N: int, K: int, out_bytes: int = 2) -> list[str]:
    """Why contiguous operands of these sizes are not aligned enough for a kernel config; empty if they are.

    a [M, K] and b [K, N], int8 and contiguous along K, have row strides of K bytes; out [M, N] has N * out_bytes. Operands with padded rows
    may be aligned nevertheless.
    """
    align_a, align_b, align_out = row.alignment
    row_bytes = N * out_bytes
    # With a single row, or a single column of b, the stride is not used.
    strides = (("a", M, K, align_a), ("b", N, K, align_b), ("out", M, row_bytes, align_out))
    misfits = [
        f"{name}: contiguous rows are {stride} bytes apart, {row.name} needs a multiple of {align}"
        for name, count, stride, align in strides
        if count > 1 and stride % align
    ]
    if row_bytes % row.store_bytes and not any(misfit.startswith("out") for misfit in misfits):
        misfits.append(f"out: a row has {row_bytes} bytes, {row.name} writes whole pieces of {row.store_bytes}")
    return misfits
