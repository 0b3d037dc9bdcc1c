"""C programs linked with the core, and the fake GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_gpu import FakeGpu, compile_c

from scaled_mm.jit import library


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
