"""Provides the core with the kernels that it asks for, as `SCALED_MM_JIT` says."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path

from scaled_mm.errors import KernelNotBuiltError
from scaled_mm.jit import background, cache, dispatch, library, mode, toolchain
from scaled_mm.kernels.sections import SECTIONS
from scaled_mm.tables.schema import TileTable


class When(enum.IntEnum):
    """`scaledMMProvide_t`: what the core asks for."""

    NOW = 0
    LATER = 1
    BUILT = 2


def provide(table: TileTable, name: library.KernelName, when: When, load: Callable[[Path], None]) -> None:
    """Loads a kernel of a table, and builds it first if that is needed, now or beside the program.

    `load` may be called later, on another thread. Raises KernelNotBuiltError, for NOW also if nothing may be compiled.
    """
    how = mode.current()
    if when is When.LATER and how == "background" and not _may_be_replaced(table, name):
        when = When.NOW
    if how != "off" and (when is When.NOW or (when is When.LATER and how == "wait")):
        return load(library.build_kernel(table, name))
    if found := built(table, name):
        return load(found)
    if when is When.NOW:
        raise KernelNotBuiltError(_not_built(table, name))
    if when is When.LATER and how == "background":
        background.start(table, name, load)


def start_fallbacks(arch: str, load: Callable[[Path], None]) -> None:
    """Starts to compile an architecture's fallback for 16-bit outputs in the background, on a new machine: one where neither the package nor the
    cache has any kernel of the architecture, of whatever version. Does nothing if `SCALED_MM_JIT` is not `background`, without nvcc or CUTLASS,
    or with fewer than four cores."""
    known = cache.has("arch", arch) or cache.has("kernel", arch) or cache.has("row", arch) or arch in dict(library.shipped_kernels())
    if known or mode.current() != "background" or background.workers() < 2 or toolchain.find_nvcc() is None or toolchain.find_cutlass() is None:
        return
    table = dispatch.callable_table(arch)
    for out_dtype in ("bf16", "fp16"):
        background.start(table, (table.fallback, out_dtype), load)


def _may_be_replaced(table: TileTable, name: library.KernelName) -> bool:
    """Whether another kernel config, or torch operations, give the same bits, so that the kernel may replace them between two calls."""
    return name[0] in library.codegen.ROWWISE or SECTIONS[table.row(name[0]).section].same_bits


def built(table: TileTable, name: library.KernelName) -> Path | None:
    """A library in the cache that has the kernel. None without nvcc and CUTLASS, because their versions are part of the keys."""
    if name not in library.kernel_names(table):
        return None  # the core was given another table
    if toolchain.find_nvcc() is None or toolchain.find_cutlass() is None or not library.may_be_built(table, name):
        return None
    return library.find_kernel(table, name)


def _not_built(table: TileTable, name: library.KernelName) -> str:
    row, out_dtype = name
    option = f" --{'format' if out_dtype in library.codegen.WEIGHT_FORMATS else 'out-dtype'} {out_dtype}" if out_dtype else ""
    only = f", `--row {row}{option}` only this kernel" if out_dtype else ""
    return (
        f"kernel {row}{f' ({out_dtype})' if out_dtype else ''} of {table.arch}: expected a built kernel, got none, and {mode.JIT}=off forbids "
        f"compiling it; `scaled-mm build --arch {table.arch}` builds all{only}"
    )
