"""The operators around the products of experts through the C interface on a machine that pretends to have a GPU: their launchers and kernels get
what gives the bits of the CPU, and write nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_gpu import HERE

from scaled_mm.jit import cache, codegen, compile, toolchain


@pytest.fixture(scope="module")
def moe_kernels(tmp_path_factory) -> Path:
    """A library of these kernels for the fake GPU, whose device code coroutines run (moe_host_kernels.cpp)."""
    from core.test_core_block_scaled_emulated import cuda_include

    cxx, include = toolchain.find_cxx(), cuda_include()
    if cxx is None or include is None:
        pytest.skip("needs a C++ compiler and the headers of a CUDA toolkit")
    folder = tmp_path_factory.mktemp("moe")
    units = [(row, dtype) for row, dtype in codegen.rowwise_names() if row.startswith("moe_") or row == "topk_softmax"]
    (folder / "entries.cpp").write_text('#include "moe_host_kernels.cpp"\n' + "".join(codegen.rowwise_source(*unit) for unit in units))
    (folder / "index.cpp").write_text(codegen.library_source("sm90", [codegen.symbol(*unit) for unit in units]))
    checks = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    flags = [*compile.cxx_flags(), "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", *checks]
    flags += [f"-I{HERE / 'emulated'}", f"-I{HERE}", f"-isystem{include}"]
    compile.run_ninja(folder, "host", cxx, [folder / "entries.cpp", folder / "index.cpp"], flags, ["-shared"])
    return folder / cache.LIBRARY


def test_every_operator_is_launched_with_what_gives_the_bits_of_the_cpu(fake_gpu, moe_kernels):
    done = fake_gpu.python("operators", fake_gpu.kernels, moe_kernels, 320, script="fake_gpu_moe.py")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert json.loads(done.stdout) == {"MOE_SORT": 80, "MOE_QUANTIZE": 80, "MOE_COMBINE": 80, "TOPK_SOFTMAX": 80}
