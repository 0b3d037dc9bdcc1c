"""Kernels compiled by a real nvcc, which needs no GPU: one of each template."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scaled_mm.cli import main
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.jit import cache, check, codegen, compile, library, toolchain
from scaled_mm.jit.paths import csrc_dir
from scaled_mm.kernels.registry import config_cost
from scaled_mm.tables import KernelRow, TileTable, load_table

TABLE = load_table("sm90")
pytestmark = pytest.mark.skipif(
    toolchain.find_nvcc() is None or toolchain.find_cutlass() is None,
    reason="no nvcc or no CUTLASS here: `scaled-mm doctor` says how to get them",
)


@pytest.fixture
def compiler_says(monkeypatch) -> list[str]:
    """What ptxas reports about every kernel that is built: registers, spills."""
    flags, run, said = compile.nvcc_flags, compile.run_program, []

    def listening(*arguments):
        done = run(*arguments)
        said.append(done.stdout + done.stderr)
        return done

    monkeypatch.setattr(compile, "nvcc_flags", lambda *arguments: [*flags(*arguments), "-Xptxas=-v"])
    monkeypatch.setattr(compile, "run_program", listening)
    return said


def check_no_spill(said: list[str]) -> None:
    text = "\n".join(said)
    spills = [int(count) for pair in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text) for count in pair]
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", text)]
    assert registers and spills, text
    assert max(registers) <= 255 and max(spills) == 0, text


def check_loads(path: Path) -> None:
    """The core takes the library, in a process of its own: what is loaded stays."""
    program = "import sys; from scaled_mm.core import binding; binding.call('scaledMMLoadKernels', sys.argv[1].encode())"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=120)


def most_accumulators() -> str:
    """The c3x row that needs the most registers per thread, where a spill would show first."""
    rows = [row for row in TABLE.rows if row.family == "c3x"]
    return max(rows, key=lambda row: config_cost(row, TABLE.arch).accumulators).name


@pytest.mark.parametrize("name", [(TABLE.fallback, "bf16"), ("zero_point_terms", None)], ids=lambda name: name[0])
def test_a_generic_kernel_and_the_zero_point_terms_compile_without_spills(cache_root, compiler_says, name):
    path = library.build_kernel(TABLE, name)
    check_no_spill(compiler_says)
    check_loads(path)
    assert [entry.path for entry in cache.entries() if entry.kind == "kernel"] == [path.parent]


def test_the_kernels_of_a_kernel_config_are_compiled_together_and_found_one_by_one(cache_root, compiler_says, monkeypatch):
    names = [(TABLE.fallback, out) for out in ("bf16", "fp16", "fp32", "int32")]
    done = []
    built = library.build_kernels(TABLE, names, 2, lambda name, count, total: done.append((name, count, total)))
    assert len(compiler_says) == 1 and list(built) == names and len(set(built.values())) == 1
    assert done == [(name, i + 1, 4) for i, name in enumerate(names)]
    check_no_spill(compiler_says)
    check_loads(built[names[0]])
    assert [library.build_kernel(TABLE, name) for name in names] == list(built.values()) and len(compiler_says) == 1
    assert library.build_kernels(TABLE, names[1:]) == {name: built[name] for name in names[1:]} and len(compiler_says) == 1
    assert [entry.kind for entry in cache.entries() if entry.kind != "core"] == ["row"]


def test_one_kernel_that_is_missing_is_compiled_alone(cache_root, compiler_says):
    first, second = ((TABLE.fallback, out) for out in ("bf16", "int32"))
    alone = library.build_kernel(TABLE, first)
    built = library.build_kernels(TABLE, [first, second])
    assert built[first] == alone != built[second] and len(compiler_says) == 2
    assert [entry.kind for entry in cache.entries()] == ["kernel", "kernel"]


def test_kernels_that_are_checked_as_one_translation_unit_get_the_reports_that_they_get_alone():
    """By the names of their device functions, as this compiler mangles them: the table of one GPU, and a row of two output dtypes."""
    table = load_table("sm75")
    row = next(row.name for row in table.rows if row.family == "c2x")
    names = [(row, "bf16"), (row, "int32")]

    def without_times(compiled):
        return {name: [dataclasses.replace(kernel, seconds=0) for kernel in kernels] for name, kernels in compiled.items()}

    with ThreadPoolExecutor(2) as pool:
        together, *alone = pool.map(lambda unit: check.compile_together(table, unit), (names, names[:1], names[1:]))
    assert without_times(together) == without_times(alone[0] | alone[1])
    assert all(len(kernels) == 1 for kernels in together.values())  # none is shared, or reported twice


def check_two_at_a_time(table: TileTable, names: list[library.KernelName], compiler_says: list[str]) -> None:
    """Half a minute of a core each: both cores work."""
    paths = library.build_kernels(table, names, 2)
    check_no_spill(compiler_says)
    assert "wgmma" not in "\n".join(compiler_says)  # ptxas says so where it has to serialise wgmma
    assert set(paths) == set(names)
    for path in paths.values():
        check_loads(path)


def test_decode_rows_compile_without_spills_within_their_shared_memory(cache_root, compiler_says):
    rows = [
        KernelRow.model_validate({"name": f"decode_{i}", "family": "decode", "swap_ab": True, **fields})
        for i, fields in enumerate(
            [
                dict(tile=[64, 16, 128], split_k=4, stages=8),
                dict(tile=[128, 128, 128], split_k=8, stages=5),
                dict(tile=[64, 64, 128], split_k=2, stages=4, cluster=[2, 1], schedule="cooperative"),
                dict(tile=[128, 8, 128], stages=6, schedule="cooperative"),
            ]
        )
    ]
    check_two_at_a_time(TABLE.model_copy(update={"rows": (*TABLE.rows, *rows)}), [(row.name, "fp32") for row in rows], compiler_says)


def test_the_largest_sm90_row_compiles_without_spills(cache_root, compiler_says):
    check_two_at_a_time(TABLE, [(most_accumulators(), out_dtype) for out_dtype in ("bf16", "fp32")], compiler_says)


def test_the_build_command_builds_a_row_once_and_names_its_libraries(cache_root, capsys):
    def build():
        status = main(["build", "--row", TABLE.fallback, "--out-dtype", "bf16", "--out-dtype", "int32", "--jobs", "2", "--json"])
        return status, json.loads(capsys.readouterr().out)

    status, first = build()
    assert status == 0 and first["arch"] == "sm90" and first["row"] == [TABLE.fallback]
    paths = [Path(built["path"]) for built in first["libraries"]]
    assert len(paths) == 1 and all(path.stat().st_size == built["bytes"] for path, built in zip(paths, first["libraries"]))
    assert sorted(entry.path for entry in cache.entries()) == sorted(path.parent for path in paths)
    written = {path: path.stat().st_mtime_ns for path in paths}

    status, second = build()
    assert status == 0 and sorted(built["path"] for built in second["libraries"]) == sorted(map(str, paths))
    assert {path: path.stat().st_mtime_ns for path in paths} == written


def test_a_format_of_a_gguf_row_is_built_alone(cache_root, capsys):
    assert main(["build", "--arch", "sm75", "--row", "gguf_mma_16x8_x1", "--format", "q4_0", "--json"]) == 0
    (library,) = json.loads(capsys.readouterr().out)["libraries"]
    assert "gguf_mma_16x8_x1" in library["path"] and "q4_0" in library["path"] and library["bytes"] > 0


def test_a_row_that_the_table_does_not_have_exits_2_with_those_that_it_has(cache_root, capsys):
    assert main(["build", "--row", "c3x_1x1x1"]) == 2
    message = capsys.readouterr().err
    assert "KERNEL_NOT_FOUND" in message and "c3x_1x1x1" in message and TABLE.fallback in message
    assert main(["build", "--row", "gguf_mma_16x8_x2", "--out-dtype", "bf16"]) == 2
    assert f"--out-dtype, --format: expected some of {', '.join(WEIGHT_FORMATS)}, which these rows of" in capsys.readouterr().err
    assert main(["build", "--arch", "sm10"]) == 2
    assert "ARCHITECTURE_NOT_SUPPORTED" in capsys.readouterr().err


def test_a_whole_architecture_becomes_one_library_with_its_table(cache_root, monkeypatch, tmp_path, capsys):
    """On a table of one row and with two of the row-wise kernels: all of them are the same code and many minutes."""
    names = codegen.rowwise_names()
    monkeypatch.setattr(codegen, "rowwise_names", lambda: [names[0], names[-1]])
    small = tmp_path / "small.yaml"
    small.write_text(
        f"arch: sm90\nfallback: {TABLE.fallback}\nbuckets: [{{kernel: {TABLE.fallback}}}]\n"
        f"rows: [{{name: {TABLE.fallback}, family: generic, tile: [64, 64, 64]}}]\n"
    )
    copy = tmp_path / "out" / "libkernels.so"
    assert main(["build", "--arch", str(small), "--out", str(copy), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    [built] = answer["libraries"]
    assert copy.read_bytes() == Path(built["path"]).read_bytes()
    assert library.arch_library(load_table(small)) == Path(built["path"])
    assert library.arch_library(TABLE) is None  # another table's kernels are not taken for these
    check_loads(copy)
    installed = library.install_arch(load_table(small), tmp_path / "lib")
    assert installed.name == "kernels_sm90.so" and os.path.getsize(installed) == built["bytes"]
    assert json.loads(installed.with_suffix(".json").read_text()).keys() == {"key"}


def run_on_the_host(source: str, tmp_path) -> str:
    """What a program of this folder prints that is compiled by nvcc and needs no GPU."""
    includes = [f"-I{path}" for path in (csrc_dir(), csrc_dir() / "include", toolchain.find_cutlass())]
    flags = ["-std=c++17", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]
    command = [toolchain.find_nvcc().path, *flags, *includes, Path(__file__).with_name(source), "-o", tmp_path / "program"]
    subprocess.run(command, check=True, env=toolchain.environment())
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_swizzle_counts_the_tiles_that_cutlass_schedules_and_adds_next_to_none(tmp_path):
    assert run_on_the_host("swizzle.cu", tmp_path) == "8 1 8\n"


def test_the_blocks_of_a_decode_cluster_own_slices_that_make_up_the_tile(tmp_path):
    assert run_on_the_host("decode_slices.cu", tmp_path) == "0 0 0 0 0 0 0\n"


def test_every_step_of_every_tile_of_a_block_product_is_dealt_once(tmp_path):
    assert run_on_the_host("shares.cu", tmp_path) == "0 1 1 0\n"
