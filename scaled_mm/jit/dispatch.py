"""Which table a machine's calls use: the one tuned for its GPU, or its architecture's."""

from __future__ import annotations

from scaled_mm import __version__, tables
from scaled_mm.jit import library, toolchain
from scaled_mm.tables import TileTable
from scaled_mm.tables.tuned import gpus_served, usable_tuned, warn_once, with_rows_of


def machine_table(arch: str) -> TileTable:
    """The table that serves calls for an architecture on this machine, read anew. What `tables.load_table` raises.

    A table tuned for the GPU comes first, if it can be read and its kernels can be had: from nvcc, or a library of that very table.
    Otherwise the architecture's serves, with a warning: a wheel's kernels are that table's.
    """
    base = tables.load_table(arch)
    tuned = usable_tuned(base.arch, gpus_served(base.arch))
    if tuned is None:
        return base
    if tuned.version != __version__:
        warn_once(
            f"{tuned.source} was measured with scaled_mm {tuned.version}, this is {__version__}: its rows may no longer be the fastest; "
            "`scaled-mm autotune` measures again, and without the file the architecture's table serves"
        )
    if (toolchain.find_nvcc() and toolchain.find_cutlass()) or library.arch_library(tuned):
        return tuned
    warn_once(f"{tuned.source} is not used: no library was built from it, and there is no nvcc to compile its kernels")
    return base


def callable_table(arch: str) -> TileTable:
    """`machine_table` as calls see it: a tuned one with the architecture's other rows, which a call may ask for by name."""
    table = machine_table(arch)
    return with_rows_of(table, tables.load_table(arch)) if table.tuned else table
