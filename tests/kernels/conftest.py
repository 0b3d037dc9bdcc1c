"""Handles: `handle` of the GPU at hand, if it is an sm90; of forced architectures `handle_of` and `handle_for`."""

from __future__ import annotations

import pytest
import torch
from forced import BORROWER, SUFFIXES, TABLES

import scaled_mm as sm
from scaled_mm.core import binding
from scaled_mm.errors import ArchitectureNotSupportedError
from scaled_mm.jit import library


@pytest.fixture(scope="module")
def handle() -> sm.Handle:
    handle = sm.Handle("cuda:0")
    if handle.arch != "sm90":
        pytest.skip(f"the rows of sm90 need compute capability 9.0, this GPU is {handle.arch}")
    return handle


@pytest.fixture(scope="module")
def handle_of():
    """handle_of(arch): a handle of that architecture on the GPU at hand; ArchitectureNotSupportedError where it is newer.

    All of its kernels are built when it is first asked for, as many at a time as there are cores.
    """
    handles = {}

    def handle_of(arch: str) -> sm.Handle:
        if arch not in handles:
            handles[arch] = sm.Handle("cuda:0", arch=arch)
            assert handles[arch].arch == arch
            if library.arch_library(TABLES[arch]) is None:
                library.build_kernels(TABLES[arch], library.kernel_names(TABLES[arch]))
        return handles[arch]

    return handle_of


@pytest.fixture(scope="module")
def handle_for(handle_of):
    """handle_for(arch, row, out_dtype): a handle that has this kernel, compiled for the architecture or for sm80."""
    extra = {row.name: row for table in TABLES.values() for row in table.rows if row.family == "c2x"}
    own = {row.name for row in TABLES[BORROWER].rows}
    merged = TABLES[BORROWER].model_copy(update={"rows": (*TABLES[BORROWER].rows, *(row for name, row in extra.items() if name not in own))})

    built = {}

    def handle_for(arch: str, row: str, out_dtype: torch.dtype) -> sm.Handle:
        try:
            return handle_of(arch)
        except ArchitectureNotSupportedError:
            handle = handle_of(BORROWER)
        binding.register_table(merged)
        if row not in own:
            if not built:
                have = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
                wanted = {row.name for arch, table in TABLES.items() if int(arch.removeprefix("sm")) > have for row in table.rows}
                names = [(name, suffix) for name in sorted(wanted & extra.keys() - own) for suffix in SUFFIXES.values()]
                built.update(library.build_kernels(merged, names))
            binding.call("scaledMMLoadKernels", str(built[row, SUFFIXES[out_dtype]]).encode())
        return handle

    yield handle_for
    binding.register_table(TABLES[BORROWER])
