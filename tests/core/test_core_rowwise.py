"""Row-wise operators through the C interface on a machine that pretends to have a GPU: what a launch is handed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from core.test_core_block_scaled_emulated import cuda_include

from scaled_mm.jit import cache, codegen, compile, toolchain

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def rowwise(tmp_path_factory) -> Path:
    """A library of the row-wise kernels, whose device code coroutines run (rowwise_host_kernels.cpp)."""
    cxx, include = toolchain.find_cxx(), cuda_include()
    if cxx is None or include is None:
        pytest.skip("needs a C++ compiler and the headers of a CUDA toolkit")
    folder = tmp_path_factory.mktemp("rowwise")
    lines, symbols = ['#include "rowwise_host_kernels.cpp"'], []
    for row, dtype in codegen.rowwise_names():
        symbols.append(codegen.symbol(row, dtype))
        of = codegen.OUT_DTYPES[dtype]
        lines.append(f'HOST_ROWWISE_KERNEL({symbols[-1]}, "{row}", {of.cxx}, {codegen.ROWWISE[row]}, {of.code})')
    (folder / "entries.cpp").write_text("\n".join(lines) + "\n")
    (folder / "index.cpp").write_text(codegen.library_source("sm90", symbols))
    checks = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    includes = [f"-I{HERE / 'emulated'}", f"-I{HERE}", f"-isystem{include}"]
    flags = [*compile.cxx_flags(), "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", *checks, *includes]
    compile.run_ninja(folder, "host", cxx, [folder / "entries.cpp", folder / "index.cpp"], flags, ["-shared"])
    return folder / cache.LIBRARY


@pytest.fixture
def ask(fake_gpu):
    def ask(function: str, *arguments):
        done = fake_gpu.python(function, *arguments, script="fake_gpu_rowwise.py")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    return ask


def test_every_operator_is_launched_with_what_gives_the_bits_of_the_cpu(ask, fake_gpu, rowwise):
    met = ask("operators", fake_gpu.kernels, rowwise, 300)
    assert sum(met.values()) == 300 and len(met) == 4 + 2 * 3 + 3 * 3, met
