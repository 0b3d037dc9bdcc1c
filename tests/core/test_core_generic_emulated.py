"""The device code of the generic kernels, run by coroutines (emulated/gpu.h), against the reference: no GPU needed."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass

import pytest
import torch
from core.test_core_block_scaled_emulated import HERE, cuda_include

from scaled_mm import reference
from scaled_mm.jit import toolchain
from scaled_mm.jit.paths import csrc_dir, include_dir
from scaled_mm.kernels.dtypes import C_DTYPES

ROWS = (8, 16, 32, 64)  # of the tile of each kernel
TAKES_ANY = (16, 64)  # those that take any alignment
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32)


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


class Product(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "batch", "M", "N", "K")),
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("lda", "ldb", "stride_k", "a_batch", "b_batch")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out_stride_m", "out_stride_n", "out_batch")),
        *((name, ctypes.c_void_p) for name in ("a_scale", "b_scale", "bias", "row_terms", "col_terms")),
    ]


@dataclass(frozen=True)
class Layout:
    """Elements beyond a multiple of 16 from row to row, and from a 16-byte boundary to the first row, of a and of b."""

    a_pad: int = 0
    a_offset: int = 0
    b_pad: int = 0
    b_offset: int = 0
    stride_k: int = 1

    @property
    def aligned(self) -> bool:
        return not any(size % 16 for size in (self.a_pad, self.a_offset, self.b_pad, self.b_offset))


def random_int8(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def placed(t: torch.Tensor, pad: int, offset: int, stride_k: int, generator: torch.Generator) -> torch.Tensor:
    """t's values [batch, rows, K] in memory of random numbers: what lies beside a row is not 0, so that reading it changes a sum."""
    batch, rows, k = t.shape
    pitch = -(-k * stride_k // 16) * 16 + pad
    each = rows * pitch
    memory = random_int8((batch * each + offset + 64,), generator)
    start = 16 + -memory.data_ptr() % 16 + offset
    return memory[start:].as_strided(t.shape, (each, pitch, stride_k)).copy_(t)


def check(library, rows: int, shape: tuple[int, int, int], layout: Layout, dtype: torch.dtype, batch: int = 1, spread: int = 1, points: bool = False):
    """The kernel's product of random operands. spread: from column to column of out. points: both operands have zero points."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = random_int8((batch, m, k), generator), random_int8((batch, n, k), generator)
    a_at = placed(a, layout.a_pad, layout.a_offset, layout.stride_k, generator)
    b_at = placed(b, layout.b_pad, layout.b_offset, layout.stride_k, generator)
    scales = {name: torch.rand(size, generator=generator) + 0.01 for name, size in (("a_scale", m), ("b_scale", n), ("bias", n))}
    za, zb = (random_int8((size,), generator).to(torch.int32) if points else torch.zeros(size, dtype=torch.int32) for size in (m, n))
    if points:  # one pair of every row, which all products of the batch share: their sums must be those of the first
        a_at.copy_(a := a[:1].expand(a.shape).clone()), b_at.copy_(b := b[:1].expand(b.shape).clone())
    terms = {
        "row_terms": torch.stack([za, a[0].sum(1, dtype=torch.int32)], 1).contiguous(),
        "col_terms": torch.stack([b[0].sum(1, dtype=torch.int32) - k * zb, zb], 1).contiguous(),
    }
    memory = torch.full((batch, m, n * spread + 2), 7, dtype=dtype)
    out = memory[:, :, : n * spread : spread]
    given = {name: t.data_ptr() for name, t in {**({} if dtype is torch.int32 else scales), **(terms if points else {})}.items()}
    given |= dict(rows=rows, batch=batch, M=m, N=n, K=k, a=a_at.data_ptr(), b=b_at.data_ptr(), out=memory.data_ptr(), stride_k=layout.stride_k)
    given |= dict(lda=a_at.stride(1), ldb=b_at.stride(1), a_batch=a_at.stride(0), b_batch=b_at.stride(0))
    given |= dict(out_stride_m=memory.stride(1), out_stride_n=spread, out_batch=memory.stride(0))
    status = library.emulate(ctypes.byref(Product(**given)), C_DTYPES[str(dtype).removeprefix("torch.")])
    if status == 1:
        assert rows not in (0, *TAKES_ANY) and not layout.aligned
        return
    for i in range(batch):
        exact = (a[i].long() - za[:, None]) @ (b[i].long() - zb[:, None]).t()
        expected = exact.to(torch.int32)
        if dtype is not torch.int32:
            expected = reference.scaled(exact, scales["a_scale"][:, None], scales["b_scale"], scales["bias"], dtype)
        assert reference.same_bits(out[i].contiguous(), expected), (shape, layout, dtype, i)
    untouched = memory.clone()
    untouched[:, :, : n * spread : spread] = 7
    assert (untouched == 7).all(), f"{shape}: wrote beside its output"


LAYOUTS = [
    Layout(),
    Layout(a_pad=16, b_pad=48),
    Layout(a_pad=1, b_pad=1),
    Layout(a_pad=5, a_offset=3, b_pad=11, b_offset=9),
    Layout(b_pad=8),
    Layout(a_pad=4, a_offset=8),
    Layout(b_offset=15),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.a_pad}-{layout.a_offset}-{layout.b_pad}-{layout.b_offset}")
@pytest.mark.parametrize("rows", ROWS)
def test_few_rows_have_the_bits_of_the_reference(library, rows, layout):
    shapes = ((1, 1, 1), (rows, 17, 64), (rows - 3, 40, 63), (rows + 1, 33, 600), (2 * rows, 16, 1031), (5, 3, 16), (3, 70, 0), (7, 32, 4096))
    for i, shape in enumerate(shapes):
        check(library, rows, shape, layout, DTYPES[i % 4], batch=1 + i % 3, spread=1 + i % 2, points=i % 2 == 1)
        check(library, rows, shape, layout, torch.int32, batch=2, points=i % 2 == 0)


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(stride_k=2), Layout(a_pad=7, a_offset=1, stride_k=3)], ids=str)
def test_tiles_have_the_bits_of_the_reference(library, layout):
    for i, shape in enumerate(((1, 1, 1), (64, 64, 64), (65, 130, 63), (70, 3, 200), (3, 70, 0), (100, 66, 129))):
        check(library, 0, shape, layout, DTYPES[i % 4], batch=1 + i % 2, spread=1 + i % 3, points=i % 2 == 1)
