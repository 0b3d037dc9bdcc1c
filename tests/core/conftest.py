"""C programs linked with the core, and the fake GPU."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from fake_gpu import HERE, FakeGpu, compile_c

from scaled_mm.jit import cache, codegen, compile, library, toolchain
from scaled_mm.jit.paths import csrc_dir


@pytest.fixture(scope="session")
def c_program(tmp_path_factory):
    """c_program("validate"): the program, linked with the core and nothing else of ours."""
    folder = tmp_path_factory.mktemp("programs")

    def build(name: str) -> Path:
        target = folder / name
        return target if target.exists() else compile_c(f"{name}.c", target, str(library.core_library()), "-ldl")

    return build


@pytest.fixture(scope="session")
def fake_gpu(tmp_path_factory) -> FakeGpu:
    if sys.platform != "linux":
        pytest.skip("the fake driver takes the place of libcuda.so.1, which is Linux's")
    return FakeGpu(tmp_path_factory.mktemp("fake_gpu"))


@pytest.fixture(scope="session")
def short_path(tmp_path_factory) -> Path:
    """The extension of csrc/python for the fake GPU: which takes CPU tensors for the device's."""
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        pytest.skip("needs Python's headers")
    folder = tmp_path_factory.mktemp("short_path")
    made = folder / "scaled_mm_fast.so"
    flags = [*compile.cxx_flags(), "-DSCALED_MM_DLPACK_CUDA=1", f"-isystem{headers}", "-shared"]
    subprocess.run([toolchain.find_cxx(), *flags, str(csrc_dir() / "python" / "fast.cpp"), "-o", str(made)], check=True)
    return made


@pytest.fixture(scope="session")
def rowwise_kernels(tmp_path_factory) -> Path:
    """A library of the row-wise kernels for the fake GPU, whose device code coroutines run (rowwise_host_kernels.cpp)."""
    from core.test_core_block_scaled_emulated import cuda_include

    cxx, include = toolchain.find_cxx(), cuda_include()
    if cxx is None or include is None:
        pytest.skip("needs a C++ compiler and the headers of a CUDA toolkit")
    folder = tmp_path_factory.mktemp("rowwise")
    lines, symbols = ['#include "rowwise_host_kernels.cpp"'], []
    sources = {
        "rowwise_quantize": "PlainElements<{x}>, ScaledElements<{x}>",
        "rowwise_norm": "Norm<{x}>",
        "rowwise_activation": "Gated<{x}>",
    }
    for row, dtype in codegen.rowwise_names():
        if row not in sources:
            continue
        symbols.append(codegen.symbol(row, dtype))
        of = codegen.OUT_DTYPES[dtype]
        lines.append(f'HOST_ROWWISE_KERNEL({symbols[-1]}, "{row}", {of.code}, {sources[row].format(x=of.cxx)})')
    (folder / "entries.cpp").write_text("\n".join(lines) + "\n")
    (folder / "index.cpp").write_text(codegen.library_source("sm90", symbols))
    checks = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    includes = [f"-I{HERE / 'emulated'}", f"-I{HERE}", f"-isystem{include}"]
    flags = [*compile.cxx_flags(), "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", *checks, *includes]
    compile.run_ninja(folder, "host", cxx, [folder / "entries.cpp", folder / "index.cpp"], flags, ["-shared"])
    return folder / cache.LIBRARY
