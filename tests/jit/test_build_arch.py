"""What a table's kernels are compiled for, and an nvcc that does not know it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from scaled_mm.errors import KernelNotBuiltError
from scaled_mm.gguf_formats import WEIGHT_FORMATS
from scaled_mm.jit import check, codegen, compile, library, toolchain
from scaled_mm.kernels.registry import family_of
from scaled_mm.tables import available_tables, load_table

TABLES = [load_table(arch) for arch, _ in available_tables()]


def capability(arch: str) -> int:
    return int(arch.removeprefix("sm"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.arch)
def test_kernels_are_compiled_for_the_oldest_gpu_that_the_table_serves(table):
    oldest = min(map(capability, table.serves))
    assert int(compile.target(table.arch).removesuffix("a")) == oldest
    flags = [flag for flag in compile.nvcc_flags(table.arch, Path("cutlass"), "13.0.88") if flag.startswith("-gencode")]
    if table.arch == "sm90":
        assert flags == ["-gencode=arch=compute_90a,code=sm_90a"]
    else:  # PTX beside the machine code: a newer GPU runs it, and so can any that is told to by SCALED_MM_ARCH
        assert flags == [f"-gencode=arch=compute_{oldest},code=[sm_{oldest},compute_{oldest}]"]


def test_a_table_of_another_name_is_compiled_for_what_its_name_says():
    assert compile.gencode("sm86") == "arch=compute_86,code=[sm_86,compute_86]"


def nvcc(tmp_path: Path, lists: str) -> toolchain.Nvcc:
    """A compiler that lists architectures and can do nothing else."""
    path = tmp_path / "nvcc"
    path.write_text(f"#!/bin/sh\ncase $1 in --list-gpu-*) printf '{lists}';; *) exit 3;; esac\n")
    path.chmod(0o755)
    return toolchain.Nvcc(path, "12.4.131", "test")


def test_an_nvcc_that_does_not_know_the_architecture_is_refused_before_it_runs(tmp_path, cache_root, monkeypatch):
    old = nvcc(tmp_path, "compute_75\\ncompute_80\\ncompute_90\\n")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: old)
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: tmp_path)
    monkeypatch.setattr(toolchain, "cutlass_version", lambda: "4.2.0")
    table = load_table("sm103")
    expected = r"nvcc: expected one that compiles for compute_100, got 12.4.131 \(.*\), which knows compute_75, compute_80, compute_90; "
    for build in (library.build_kernel, check.compile_kernel):
        with pytest.raises(KernelNotBuiltError, match=expected):
            build(table, (table.fallback, "bf16"))
    toolchain.require_architecture(old, "compute_80")
    toolchain.require_architecture(old, "compute_90a")  # the list names no variants


def test_an_nvcc_that_lists_nothing_is_left_to_speak_for_itself(tmp_path):
    toolchain.require_architecture(nvcc(tmp_path, ""), "compute_100")
    toolchain.require_architecture(toolchain.Nvcc(tmp_path / "none", "13.0.88", "test"), "compute_100")


def test_a_table_is_checked_for_every_gpu_it_serves_that_the_nvcc_knows(tmp_path):
    knows = nvcc(tmp_path, "sm_80\\nsm_86\\nsm_89\\nsm_90\\nsm_100\\n")
    assert check.codes(load_table("sm89"), knows) == ["sm_86", "sm_89"]
    assert check.codes(load_table("sm100"), knows) == ["sm_100"]
    assert check.codes(load_table("sm90"), knows) == ["sm_90a"]


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """compiler(script): a compiler that is this shell script is found, and the CUTLASS that it needs."""

    def write(script: str) -> None:
        path = tmp_path / "nvcc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Nvcc(path, "13.0.88", "test"))
        monkeypatch.setattr(toolchain, "find_cutlass", lambda: tmp_path)

    return write


def report_of(function: str, code: str, registers: int, stores: int = 0, loads: int = 0) -> str:
    return (
        f"ptxas info    : Compiling entry function '{function}' for '{code}'\n"
        f"ptxas info    : Function properties for {function}\n"
        f"    64 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers, 584 bytes cmem[0]\n"
    )


def serialized_in(function: str) -> str:
    reason = f"serialized due to insufficient register resources for the function '{function}'"
    return f"ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are {reason}\n"


@pytest.mark.parametrize("serialized", [False, True])
def test_the_compilers_report_is_read_for_each_gpu(compiler, serialized):
    report = serialized_in("_Z6kernel_sm_89") if serialized else ""
    report += report_of("_Z6kernel_sm_86", "sm_86", 128, 172, 72) + report_of("_Z6kernel_sm_89", "sm_89", 160)
    compiler(f"cat <<'END'\n{report}END")
    table = load_table("sm89")
    compiled = check.compile_kernel(table, (table.fallback, "bf16"))
    assert [(kernel.code, kernel.registers, kernel.spilled) for kernel in compiled] == [("sm_86", 128, 244), ("sm_89", 160, 0)]
    assert [kernel.serialized for kernel in compiled] == [False, serialized]


@pytest.mark.parametrize("report", ["ptxas info    : Used 128 registers\n", report_of("_Z6kernel", "sm_80", 128).replace("Used", "used")])
def test_a_report_that_cannot_be_read_is_no_clean_one(compiler, report):
    compiler(f"cat <<'END'\n{report}END")
    table = load_table("sm80")
    with pytest.raises(KernelNotBuiltError, match=r"expected ptxas to report (on sm_80|registers and spills of _Z6kernel on sm_80), got"):
        check.compile_kernel(table, (table.fallback, "bf16"))


# ---- kernels that are checked as one translation unit -------------------------------------------------------------------

TURING = load_table("sm75")  # one GPU
ROW = next(row for row in TURING.rows if row.family == "c2x")
SIZES = (*ROW.tile, *ROW.warp, ROW.stages, ROW.swizzle, ROW.split_k)
BF16, INT32 = ((ROW.name, out) for out in ("bf16", "int32"))


def function_of(mangled_dtype: str) -> str:
    """The name of a device function of ROW, as nvcc 13.0 mangles it. `test_build_nvcc` compares the reports of a real compiler."""
    return f"_ZN9scaled_mm3c2x11gemm_kernelINS0_4GemmI{''.join(f'Li{size}E' for size in SIZES)}{mangled_dtype}EEEEvNS0_7ProblemIT_EE"


OF_BF16, OF_INT32 = function_of("13__nv_bfloat16"), function_of("i")


def found(compiled: list[check.Compiled]) -> list[tuple]:
    return [(kernel.row, kernel.out_dtype, kernel.code, kernel.registers, kernel.spilled, kernel.serialized) for kernel in compiled]


def test_each_kernel_of_a_translation_unit_gets_its_own_report_and_that_of_functions_that_it_shares(compiler):
    reports = report_of(OF_INT32, "sm_75", 100, 8, 4) + report_of("_Z4sums", "sm_75", 32) + report_of(OF_BF16, "sm_75", 90)
    compiler(f"cat <<'END'\n{serialized_in(OF_BF16)}{reports}END")
    together = check.compile_together(TURING, [BF16, INT32])
    assert found(together[BF16]) == [(*BF16, "sm_75", 32, 0, False), (*BF16, "sm_75", 90, 0, True)]
    assert found(together[INT32]) == [(*INT32, "sm_75", 100, 12, False), (*INT32, "sm_75", 32, 0, False)]
    assert len({kernel.seconds for kernels in together.values() for kernel in kernels}) == 1
    compiled = []
    assert found(check.compile_kernels(TURING, [BF16, INT32], jobs=1, on_kernel=compiled.append)) == found([*together[BF16], *together[INT32]])
    assert [{kernel.out_dtype for kernel in kernels} for kernels in compiled] == [{"bf16"}, {"int32"}]


def test_a_kernel_without_a_report_of_its_own_is_not_taken_for_clean(compiler):
    compiler(f"cat <<'END'\n{report_of('_Z4sums', 'sm_75', 32)}{report_of(OF_BF16, 'sm_75', 90)}END")
    with pytest.raises(KernelNotBuiltError, match=f"^{ROW.name} int32: expected ptxas to report on sm_75, got"):
        check.compile_together(TURING, [BF16, INT32])


def test_kernels_that_do_not_compile_together_are_compiled_alone_and_the_error_names_one(compiler):
    compiler(f"grep -q int32_t kernel.cu && {{ echo no int32; exit 2; }}\ncat <<'END'\n{report_of(OF_BF16, 'sm_75', 90)}END")
    compiled = []
    with pytest.raises(KernelNotBuiltError, match=f"^{ROW.name} int32: the compiler failed \\(status 2\\)\nno int32$"):
        check.compile_kernels(TURING, [BF16, INT32], jobs=1, on_kernel=compiled.append)
    assert compiled == []
    assert found(check.compile_kernels(TURING, [BF16], jobs=1)) == [(*BF16, "sm_75", 90, 0, False)]


@pytest.mark.parametrize("jobs", [1, 2, 99])
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.arch)
def test_each_kernel_is_in_one_translation_unit_whose_reports_can_be_told_apart_and_no_core_is_left_idle(table, jobs):
    of_formats = [(row.name, fmt) for row in table.gguf.rows for fmt in codegen.out_dtypes(row)]
    names = list(dict.fromkeys([*check.kernels_to_check(table), *of_formats]))
    units = check.units(table, names, jobs)
    assert sorted(map(str, (name for unit in units for name in unit))) == sorted(map(str, names))
    assert len(units) >= min(jobs, len(names)) and len(units[0]) == max(map(len, units)) <= 8
    for unit in (unit for unit in units if len(unit) > 1):
        codes = [family_of(table.row(row)).code(table.row(row), out, 1 << 20) for row, out in unit]
        assert len({code.header for code in codes}) == 1 and len({code.mark for code in codes}) == len(codes)
        assert not [pair for pair in itertools.permutations(codes, 2) if pair[0].mark in pair[1].mark]
        assert codegen.together([(table.row(row), out) for row, out in unit], 1 << 20).count("#include") == 1
    if jobs < 99:
        whole = [{out for _, out in unit} for unit in units if table.row(unit[0][0] if unit[0][1] else table.fallback).section == "gguf"]
        assert whole == [set(WEIGHT_FORMATS)] * len(table.gguf.rows)


def test_the_environment_adds_no_flags_to_a_compiler(monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-use_fast_math")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ftz=true")
    assert not {"NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"} & toolchain.environment().keys() and "PATH" in toolchain.environment()


def test_every_row_is_among_the_kernels_that_are_checked():
    for table in TABLES:
        names = check.kernels_to_check(table)
        assert {row for row, out in names if out in ("bf16", "q4_0")} == {row.name for row in table.all_rows}
        for section in table.sections:
            whole = {row.name for row in section.rows if {out for name, out in names if name == row.name} == set(codegen.out_dtypes(row))}
            assert len(whole) == 1, section.rows


@pytest.mark.parametrize("version, compressed", [("12.0.140", False), ("12.9.86", False), ("13.0.88", True), ("13.4.12", True)])
def test_kernels_are_compressed_where_every_driver_reads_it(version, compressed):
    assert ("--compress-mode=size" in compile.nvcc_flags("sm90", Path("cutlass"), version)) is compressed


_WITHOUT_TORCH = """
import sys, types

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoTorch())
package = types.ModuleType("scaled_mm")
package.__path__ = [sys.argv[1]]
sys.modules["scaled_mm"] = package
from scaled_mm.jit import library
from scaled_mm.tables import load_table
print(len(library.kernel_names(load_table("sm90"))))
"""


def test_the_room_that_builds_needs_no_torch_as_setup_py_has_none():
    package = Path(library.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", _WITHOUT_TORCH, str(package)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(library.kernel_names(load_table("sm90")))


def test_kernel_configs_of_a_whole_architecture_are_compiled_in_pairs_while_every_job_has_one(monkeypatch):
    monkeypatch.setattr(library, "find_kernel", lambda table, name: None)
    table = load_table("sm90")
    names = library.kernel_names(table)
    units = library._by_row(names)
    for jobs in (2, 50, len(units)):
        paired = library._paired(table, [list(unit) for unit in units], jobs)
        assert sorted(map(str, names)) == sorted(str(name) for unit in paired for name in unit)
        rows = [list(dict.fromkeys(row for row, _ in unit)) for unit in paired]
        assert all(len(unit) <= 2 and len({(table.row(row).family, table.row(row).section) for row in unit}) == 1 for unit in rows if len(unit) > 1)
        pairs = sum(len(unit) > 1 for unit in rows)
        assert len(paired) == len(units) - pairs >= min(jobs, len(units)) or jobs == 2
        assert (pairs > 0) == (jobs < len(units))
    built = next(row.name for row in table.rows if row.family == "c3x")
    monkeypatch.setattr(library, "find_kernel", lambda table, name: Path("here") if name[0] == built else None)
    alone = next(unit for unit in library._paired(table, [list(unit) for unit in units], 2) if unit[0][0] == built)
    assert {row for row, _ in alone} == {built}  # its kernels are there already
