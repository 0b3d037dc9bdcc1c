"""The device code of the generic kernels for few rows, run by coroutines (emulated/gpu.h), against the reference: no GPU needed."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch
from core.test_core_block_scaled_emulated import HERE, cuda_include

from scaled_mm import reference
from scaled_mm.jit import toolchain
from scaled_mm.jit.paths import csrc_dir, include_dir

ROWS = (8, 16, 32, 64)  # of the tile of each kernel
TAKES_ANY = (16, 64)  # those that take any alignment


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    cxx, include = toolchain.find_cxx(), cuda_include()
    if cxx is None or include is None:
        pytest.skip("needs a C++ compiler and the headers of a CUDA toolkit")
    path = tmp_path_factory.mktemp("emulated") / "generic.so"
    includes = [f"-I{HERE / 'emulated'}", f"-I{HERE}", f"-I{csrc_dir()}", f"-I{include_dir()}", f"-isystem{include}"]
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas"]
    subprocess.run([str(cxx), *options, *includes, str(HERE / "generic_emulated.cpp"), "-o", str(path)], check=True, timeout=600)
    return ctypes.CDLL(str(path))


def placed(t: torch.Tensor, pitch: int, offset: int) -> torch.Tensor:
    """t's values in rows of `pitch` elements, from an element `offset` behind an aligned address on."""
    memory = torch.zeros(t.shape[0] * pitch + offset + 16, dtype=t.dtype)
    start = -memory.data_ptr() % 16 // t.element_size() + offset
    view = memory[start:].as_strided(t.shape, (pitch, 1))
    return view.copy_(t)


@pytest.mark.parametrize("pad, offset", [(0, 0), (16, 0), (1, 0), (5, 3), (4, 8)])
@pytest.mark.parametrize("rows", ROWS)
def test_few_rows_have_the_bits_of_the_reference(library, rows, pad, offset):
    generator = torch.Generator().manual_seed(rows + pad)
    for m, n, k in ((1, 1, 1), (rows, 17, 64), (rows - 3, 40, 63), (rows + 1, 33, 600), (2 * rows, 16, 1031), (5, 3, 16), (3, 70, 0), (7, 32, 4096)):
        a = torch.randint(-128, 128, (m, k), dtype=torch.int8, generator=generator)
        b = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
        a_scale, b_scale, bias = (torch.rand(size, generator=generator) + 0.01 for size in (m, n, n))
        step = -(-k // 16) * 16 + pad  # a multiple of 16, or whatever the pad makes of it
        at = placed(a, step, offset), placed(b, step, offset)
        aligned = step % 16 == 0 and offset % 16 == 0
        for dtype in (torch.bfloat16, torch.int32):
            scales = (None, None, None) if dtype is torch.int32 else (a_scale, b_scale, bias)
            memory = torch.full((m, n + 2), 7, dtype=dtype)
            pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in scales]
            product = (m, n, k, at[0].data_ptr(), step, at[1].data_ptr(), step, memory.data_ptr(), n + 2)
            status = library.emulate(rows, dtype is torch.int32, *map(ctypes.c_int64, product), *pointers)
            taken = (aligned or (m == 1 and n == 1 and offset % 16 == 0)) or rows in TAKES_ANY
            assert status == (0 if taken else 1)
            if taken:
                scales_of_rows = None if dtype is torch.int32 else a_scale.view(-1, 1)
                expected = reference.scaled_mm(a, b.t(), scales_of_rows, scales[1], bias=scales[2], out_dtype=dtype)
                assert reference.same_bits(memory[:, :n], expected), (m, n, k, dtype)
                assert (memory[:, n:] == 7).all(), f"{m} x {n} x {k}: wrote beside its output"
