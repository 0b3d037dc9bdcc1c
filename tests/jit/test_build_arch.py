"""What a table's kernels are compiled for, and an nvcc that does not know it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scaled_mm.errors import KernelNotBuiltError
from scaled_mm.jit import check, codegen, compile, library, toolchain
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


@pytest.mark.parametrize("serialized", [False, True])
def test_the_compilers_report_is_read_for_each_gpu(tmp_path, monkeypatch, serialized):
    reason = "serialized due to insufficient register resources for the function '_Z6kernel_sm_89'"
    report = f"ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are {reason}\n" if serialized else ""
    report += "".join(
        f"ptxas info    : Compiling entry function '_Z6kernel_{code}' for '{code}'\n"
        f"ptxas info    : Function properties for _Z6kernel_{code}\n"
        f"    64 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers, 584 bytes cmem[0]\n"
        for code, registers, stores, loads in (("sm_86", 128, 172, 72), ("sm_89", 160, 0, 0))
    )
    path = tmp_path / "nvcc"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{report}END\n")
    path.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Nvcc(path, "13.0.88", "test"))
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: tmp_path)
    table = load_table("sm89")
    compiled = check.compile_kernel(table, (table.fallback, "bf16"))
    assert [(kernel.code, kernel.registers, kernel.spilled) for kernel in compiled] == [("sm_86", 128, 244), ("sm_89", 160, 0)]
    assert [kernel.serialized for kernel in compiled] == [False, serialized]


def test_a_report_that_cannot_be_read_is_no_clean_one(tmp_path, monkeypatch):
    path = tmp_path / "nvcc"
    path.write_text("#!/bin/sh\necho 'ptxas info    : Used 128 registers'\n")
    path.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Nvcc(path, "13.0.88", "test"))
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: tmp_path)
    table = load_table("sm80")
    with pytest.raises(KernelNotBuiltError, match="expected ptxas to report on sm_80, got"):
        check.compile_kernel(table, (table.fallback, "bf16"))


def test_the_environment_adds_no_flags_to_a_compiler(monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-use_fast_math")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ftz=true")
    assert not {"NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"} & toolchain.environment().keys() and "PATH" in toolchain.environment()


def test_every_row_is_among_the_kernels_that_are_checked():
    for table in TABLES:
        names = check.kernels_to_check(table)
        assert set(codegen.rowwise_names()) <= set(names)
        assert {row for row, out in names if out in ("bf16", "q4_0")} == {*(row.name for row in table.all_rows), *codegen.ROWWISE}
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
