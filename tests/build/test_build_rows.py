"""Every row of every table that mma.sync serves, compiled for every GPU of its table. Needs nvcc, no GPU; about three minutes of
two cores. SM90's rows take half a minute each: `test_build_nvcc` compiles the largest, `scaled-mm table check --compile` all of them.
"""

from __future__ import annotations

import pytest

from scaled_mm.build import check, library, toolchain
from scaled_mm.tables import available_tables, load_table

TABLES = [table for table in (load_table(arch) for arch, _ in available_tables()) if all(row.generation != "c3x" for row in table.rows)]
pytestmark = pytest.mark.skipif(
    toolchain.find_nvcc() is None or toolchain.find_cutlass() is None,
    reason="no nvcc or no CUTLASS here: `scaled-mm doctor` says how to get them",
)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.arch)
def test_every_row_compiles_without_spills_for_every_gpu_of_its_table(table, record_property):
    names = check.kernels_to_check(table)
    codes = check.codes(table, library.nvcc_and_flags(table.arch)[0])
    compiled = check.compile_kernels(table, names, jobs=2)
    for kernel in compiled:
        record_property(f"{kernel.row} {kernel.out_dtype} {kernel.code}", f"{kernel.registers} registers, {kernel.seconds:.1f} s")
    assert {(kernel.row, kernel.out_dtype, kernel.code) for kernel in compiled} == {(*name, code) for name in names for code in codes}
    assert [kernel for kernel in compiled if kernel.spilled or kernel.registers > 255] == []
