"""C programs over the public header alone: no Python and no torch in them."""

from __future__ import annotations

import subprocess

import pytest

from scaled_mm.jit import library
from scaled_mm.tables import load_table

TABLE = load_table("sm90")


def test_a_c_program_validates_on_a_machine_without_a_gpu(c_program):
    done = subprocess.run([c_program("validate")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "validate: everything held\n"


def test_the_core_links_neither_python_nor_torch_nor_cuda(c_program):
    linked = subprocess.run(["ldd", str(c_program("validate"))], capture_output=True, text=True, check=True).stdout
    assert "scaled_mm" in linked or "library.so" in linked
    assert not any(name in linked for name in ("libpython", "libtorch", "libc10", "libcuda", "libcudart"))


def multiply(program, row, kernels) -> list:
    return [program, TABLE.arch, row.name, row.alignment[0], TABLE.fallback, 33, 96, 272, *kernels]


def check_every_run(done: subprocess.CompletedProcess, row: str) -> None:
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 12 and all(": 0 of " in line for line in lines), done.stdout
    assert [line.split(" ")[0] for line in lines] == [row, TABLE.fallback, TABLE.fallback] * 4
    assert "so the fallback row runs" in lines[1] and "forced by name" in lines[2]


def test_a_c_program_multiplies_on_the_fake_gpu(c_program, fake_gpu):
    row = TABLE.select(33, 96, 272).row
    check_every_run(fake_gpu.run(multiply(c_program("multiply"), row, [fake_gpu.kernels])), row.name)


def test_without_a_driver_the_c_program_says_so(c_program, fake_gpu):
    row = TABLE.select(33, 96, 272).row
    done = fake_gpu.run(multiply(c_program("multiply"), row, [fake_gpu.kernels]), FAKE_CUINIT="100")
    assert done.returncode == 77 and "there is no GPU" in done.stderr


def test_without_arguments_the_c_program_says_what_it_takes(c_program):
    done = subprocess.run([c_program("multiply")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("usage: ") and "<kernel library> ..." in done.stderr


@pytest.mark.gpu
def test_a_c_program_multiplies_on_the_gpu_and_gets_the_same_bits(c_program):
    import scaled_mm as sm

    if sm.Handle("cuda:0").arch != TABLE.arch:
        pytest.skip(f"the kernels of {TABLE.arch} need its GPU, this one is {sm.Handle('cuda:0').arch}")
    row = TABLE.select(33, 96, 272).row
    names = [(row.name, "fp32"), (TABLE.fallback, "fp32"), ("zero_point_terms", None)]
    kernels = library.build_kernels(TABLE, names).values()
    command = [str(word) for word in multiply(c_program("multiply"), row, kernels)]
    check_every_run(subprocess.run(command, capture_output=True, text=True, timeout=300), row.name)
