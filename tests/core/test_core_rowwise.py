"""Row-wise operators through the C interface on a machine that pretends to have a GPU: what a launch is handed, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from core.test_core_block_scaled_emulated import cuda_include

from scaled_mm.jit import cache, codegen, compile, toolchain
from scaled_mm.jit.provide import When

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


def check_refusals(answer: dict[str, list[str]]) -> None:
    for what, (expected, status, message) in answer.items():
        assert expected == f"{status} {message.partition(':')[0]}".strip(), (what, status, message)
        assert status == "SUCCESS" or ("expected" in message and "got" in message), message


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_create_refuses_what_the_header_does_not_allow_and_names_it(ask, fake_gpu, rowwise, device):
    answer = ask("create_refusals", fake_gpu.kernels, rowwise, device)
    check_refusals(answer)
    assert answer["scale [1, M]"][2].endswith("; x is flat, so reshape it to [4, 1]")
    assert "scaledMMCreateRowwiseDescriptor" in answer["scaledMMCreateDescriptor NORM None"][2]


def test_calculate_refuses_memory_that_outputs_share_and_pointers_that_do_not_fit(ask, fake_gpu, rowwise):
    answer = ask("calculate_refusals", fake_gpu.kernels, rowwise)
    check_refusals(answer)
    assert [what for what, (_, status, _) in answer.items() if status == "SUCCESS"] == [
        "fine",
        "total is x",
        "total is residual",
        "total is x and residual",
        "one row in place",
        "nothing within the weight",
    ]


def test_a_plan_names_its_kernel_which_no_table_lists(ask, fake_gpu, rowwise):
    answer = ask("names", fake_gpu.kernels, rowwise)
    for kind, rows in itertools.product(("QUANTIZE", "NORM", "ACTIVATION"), (4, 0)):
        kernel = [f"rowwise_{kind.lower()}", "the kernel of this operator; no table lists it", -1, 0]
        assert answer.pop(f"{kind}, {rows} rows, GPU") == kernel
        assert answer.pop(f"{kind}, {rows} rows, CPU") == ["cpu", "the device is a CPU", -1, 0]
        assert answer.pop(f"calculate {kind}, {rows} rows") == "DEVICE_NOT_SUPPORTED"
    assert answer == {}


def test_the_provider_is_asked_for_the_kernel_of_the_dtype_of_x(ask, fake_gpu):
    answer = ask("missing", fake_gpu.kernels)
    assert answer["answer"][0] == "KERNEL_NOT_BUILT" and "row rowwise_norm of sm90" in answer["answer"][1]
    assert answer["asked"] == [["sm90", "rowwise_norm", codegen.OUT_DTYPES["fp16"].code, When.NOW]]
