"""Every row of every table but SM90's INT8 rows, compiled for the oldest GPU of its table; with SCALED_MM_NEWEST_GPU=1 for the newest, too, in twice
the time. wgmma kernels of GGUF products in three formats; with SCALED_MM_EVERY_FORMAT=1 in all five. Needs nvcc, no GPU; several minutes of two
cores. SM90's INT8 rows take half a minute each: `test_build_nvcc` compiles the largest, `scaled-mm table check --compile` all of them for every GPU.
"""

from __future__ import annotations

import os

import pytest

from scaled_mm.jit import check, codegen, library, toolchain
from scaled_mm.kernels.registry import config_findings
from scaled_mm.tables import KernelRow, TileTable, available_tables, load_table


def of_one_gpu(table: TileTable) -> TileTable:
    """The table for its oldest GPU, which `check.codes` always adds; by the variable also for the newest that this nvcc knows."""
    nvcc = toolchain.find_nvcc() if os.environ.get("SCALED_MM_NEWEST_GPU") == "1" else None
    newest = check.codes(table, nvcc)[-1] if nvcc else table.arch
    return table.model_copy(update={"serves": (newest.replace("_", "").rstrip("a"),)})


ALL = [of_one_gpu(load_table(arch)) for arch, _ in available_tables()]
TABLES = [table for table in ALL if all(row.family != "c3x" for row in table.rows)]
pytestmark = pytest.mark.skipif(
    toolchain.find_nvcc() is None or toolchain.find_cutlass() is None,
    reason="no nvcc or no CUTLASS here: `scaled-mm doctor` says how to get them",
)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.arch)
def test_every_row_compiles_without_spills_for_the_gpus_of_its_table(table, record_property):
    block = {row.name for row in table.gguf.rows}  # those have a test of their own, with every format
    names = [name for name in check.kernels_to_check(table) if name[0] not in block]
    codes = check.codes(table, library.nvcc_and_flags(table.arch)[0])
    compiled = check.compile_kernels(table, names, jobs=2)
    for kernel in compiled:
        record_property(f"{kernel.row} {kernel.out_dtype} {kernel.code}", f"{kernel.registers} registers, {kernel.seconds:.1f} s")
    assert {(kernel.row, kernel.out_dtype, kernel.code) for kernel in compiled} == {(*name, code) for name in names for code in codes}
    assert [kernel for kernel in compiled if kernel.spilled or kernel.registers > 255] == []


def test_the_block_scaled_rows_of_sm90_compile_without_spills(record_property):
    """The table's other rows take half a minute each; these take seconds."""
    table = load_table("sm90")
    names = [(row.name, out) for row in table.block_scaled.rows for out in codegen.out_dtypes(row)]
    compiled = check.compile_kernels(table, names, jobs=2)
    for kernel in compiled:
        record_property(f"{kernel.row} {kernel.out_dtype} {kernel.code}", f"{kernel.registers} registers, {kernel.seconds:.1f} s")
    assert {(kernel.row, kernel.out_dtype) for kernel in compiled} == set(names)
    assert [kernel for kernel in compiled if kernel.spilled or kernel.registers > 255] == []


def formats_to_compile(row: KernelRow) -> tuple[str, ...]:
    """For wgmma, whose kernels take longest: q5_1 has all that q4_1 and q5_0 have, a fifth bit and a minimum."""
    some = row.family.startswith("gguf_wgmma") and os.environ.get("SCALED_MM_EVERY_FORMAT") != "1"
    return ("q4_0", "q5_1", "q8_0") if some else tuple(codegen.out_dtypes(row))


@pytest.mark.parametrize("table", ALL, ids=lambda table: table.arch)
def test_the_block_rows_compile_without_spills_or_waits(table, record_property):
    names = [(row.name, fmt) for row in table.gguf.rows for fmt in formats_to_compile(row)]
    compiled = check.compile_kernels(table, names, jobs=2)
    for kernel in compiled:
        record_property(f"{kernel.row} {kernel.out_dtype} {kernel.code}", f"{kernel.registers} registers, {kernel.seconds:.1f} s")
    codes = check.codes(table, library.nvcc_and_flags(table.arch)[0])
    assert {(kernel.row, kernel.out_dtype, kernel.code) for kernel in compiled} == {(*name, code) for name in names for code in codes}
    assert [kernel for kernel in compiled if kernel.spilled or kernel.serialized or kernel.registers > 255] == []


@pytest.mark.parametrize("arch, dtypes", [("sm75", ("bf16",)), ("sm90", ("bf16", "fp32"))])
def test_the_row_wise_kernels_compile_without_spills(arch, dtypes, record_property):
    """No table lists them. They differ between architectures in little but programmatic dependent launch, those of float16 from those of bfloat16 in
    the conversion alone."""
    table = load_table(arch)
    names = [(name, dtype) for name, dtype in codegen.rowwise_names() if dtype in dtypes or dtype not in ("fp16", "bf16", "fp32")]
    compiled = check.compile_kernels(table, names, jobs=2)
    for kernel in compiled:
        record_property(f"{kernel.row} {kernel.out_dtype} {kernel.code}", f"{kernel.registers} registers, {kernel.seconds:.1f} s")
    assert {(kernel.row, kernel.out_dtype) for kernel in compiled} == set(names)
    assert [kernel for kernel in compiled if kernel.spilled or kernel.registers > 255] == []


EDGES = [
    # architecture, tile, warp tile, stages: legal rows of shapes that no table has
    ("sm75", [64, 32, 64], [32, 32, 64], 2),
    ("sm80", [16, 128, 64], [16, 64, 64], 8),
    ("sm80", [32, 256, 64], [32, 64, 64], 3),
    ("sm80", [48, 64, 64], [48, 64, 64], 3),
    ("sm80", [64, 64, 128], [32, 32, 128], 4),
]


def edges(arch: str) -> TileTable:
    """The table of an architecture, for its one GPU, with these rows instead of its own."""
    of_arch = [(i, edge) for i, (of, *edge) in enumerate(EDGES) if of == arch]
    rows = [KernelRow(name=f"edge{i}", family="c2x", tile=tile, warp=warp, stages=stages, swizzle=4) for i, (tile, warp, stages) in of_arch]
    return load_table(arch).model_copy(update={"rows": tuple(rows), "serves": (arch,)})


@pytest.fixture(scope="module")
def compiled_edges() -> dict[str, list[check.Compiled]]:
    """What the compiler reports of each edge. Those of an architecture share the parsing of their headers."""
    found: dict[str, list[check.Compiled]] = {}
    for arch in dict.fromkeys(arch for arch, *_ in EDGES):
        table = edges(arch)
        for kernel in check.compile_kernels(table, [(row.name, "bf16") for row in table.rows], jobs=2):
            found.setdefault(kernel.row, []).append(kernel)
    return found


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_what_the_rules_let_pass_compiles_with_the_shared_memory_that_they_reckon_with(edge, compiled_edges):
    arch, name = edge[0], f"edge{EDGES.index(edge)}"
    assert config_findings(edges(arch).row(name), arch) == []
    assert [(kernel.out_dtype, kernel.code, kernel.spilled) for kernel in compiled_edges[name]] == [("bf16", arch.replace("sm", "sm_"), 0)]
