"""The device code of the generic kernels, run by coroutines (emulated/gpu.h), against the reference: no GPU needed."""

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


def placed(t: torch.Tensor, pitch: int, offset: int, stride_k: int = 1) -> torch.Tensor:
    """t's values in rows of `pitch` elements, which start `offset` elements after a 16-byte boundary."""
    memory = torch.zeros(t.shape[0] * pitch + offset + 16, dtype=t.dtype)
    start = -memory.data_ptr() % 16 // t.element_size() + offset
    view = memory[start:].as_strided(t.shape, (pitch, stride_k))
    return view.copy_(t)


def check(library, rows: int, shape: tuple[int, int, int], pitch: int, offset: int, taken: bool, stride_k: int = 1) -> None:
    """The kernel's product of random operands in rows of `pitch` elements."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k + pitch)
    a, b = (torch.randint(-128, 128, (size, k), dtype=torch.int8, generator=generator) for size in (m, n))
    a_scale, b_scale, bias = (torch.rand(size, generator=generator) + 0.01 for size in (m, n, n))
    at = placed(a, pitch, offset, stride_k), placed(b, pitch, offset, stride_k)
    for dtype in (torch.bfloat16, torch.int32):
        scales = (None, None, None) if dtype is torch.int32 else (a_scale, b_scale, bias)
        memory = torch.full((m, n + 2), 7, dtype=dtype)
        product = (m, n, k, at[0].data_ptr(), pitch, at[1].data_ptr(), pitch, stride_k, memory.data_ptr(), n + 2)
        pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in scales]
        status = library.emulate(rows, dtype is torch.int32, *map(ctypes.c_int64, product), *pointers)
        assert status == (0 if taken else 1), shape
        if taken:
            scale_of_rows = None if dtype is torch.int32 else a_scale.view(-1, 1)
            expected = reference.scaled_mm(a, b.t(), scale_of_rows, scales[1], bias=scales[2], out_dtype=dtype)
            assert reference.same_bits(memory[:, :n], expected), (shape, dtype)
            assert (memory[:, n:] == 7).all(), f"{shape}: wrote beside its output"


@pytest.mark.parametrize("pad, offset", [(0, 0), (16, 0), (1, 0), (5, 3), (4, 8)])
@pytest.mark.parametrize("rows", ROWS)
def test_few_rows_have_the_bits_of_the_reference(library, rows, pad, offset):
    for m, n, k in ((1, 1, 1), (rows, 17, 64), (rows - 3, 40, 63), (rows + 1, 33, 600), (2 * rows, 16, 1031), (5, 3, 16), (3, 70, 0), (7, 32, 4096)):
        pitch = -(-k // 16) * 16 + pad  # a multiple of 16, plus the pad
        aligned = offset % 16 == 0 and (pitch % 16 == 0 or m == n == 1)
        check(library, rows, (m, n, k), pitch, offset, aligned or rows in TAKES_ANY)


@pytest.mark.parametrize("pad, offset, stride_k", [(0, 0, 1), (1, 0, 1), (5, 3, 1), (0, 0, 2), (7, 1, 3)])
def test_tiles_have_the_bits_of_the_reference(library, pad, offset, stride_k):
    for m, n, k in ((1, 1, 1), (64, 64, 64), (65, 130, 63), (70, 3, 200), (3, 70, 0), (100, 66, 129)):
        check(library, 0, (m, n, k), -(-k // 16) * 16 * stride_k + pad, offset, True, stride_k)
