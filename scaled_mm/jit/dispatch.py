"""The table that calls on this machine use: the one tuned for its GPU, or its architecture's."""

from __future__ import annotations

from scaled_mm import __version__, tables
from scaled_mm.jit import library, toolchain
from scaled_mm.tables import TileTable
from scaled_mm.tables.tuned import gpus_served, usable_tuned, warn_once, with_rows_of


def machine_table(arch: str) -> TileTable:
    """The table that serves calls for an architecture on this machine. It is read again on every call. Raises the errors of `tables.load_table`.

    A table tuned for the GPU is used if it is valid and its kernels are available, from nvcc or from a library built from that table. Otherwise
    the architecture's table is used, with a warning. A wheel contains the kernels of the architecture's table only.
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
    """`machine_table` for calls. A tuned table also gets the architecture's other kernel configs, which a call may force by name."""
    table = machine_table(arch)
    return with_rows_of(table, tables.load_table(arch)) if table.tuned else table
