"""The device code of block-scaled rows, run by coroutines (emulated/gpu.h), against the reference: no GPU needed.

What the instructions do is written down a second time there, from the PTX ISA. That they do it on a GPU, only a GPU shows.
The emulation knows mma.sync and cp.async; it has no wgmma and no TMA.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from operands.block_scaled_cases import BlockCase

from scaled_mm.core import binding
from scaled_mm.jit import codegen, toolchain
from scaled_mm.jit.paths import csrc_dir, include_dir
from scaled_mm.tables import available_tables, load_table

HERE = Path(__file__).resolve().parent
# The macro of block_scaled_emulated.cpp that emulates a row of the family; None: not emulated, tests/kernels runs it on a GPU.
MACROS = {"generic": "EMULATE_GENERIC", "c2x": "EMULATE_C2X", "wgmma": None}
# A row is emulated once, whatever tables it is in.
ROWS = {row.name: row for arch, _ in available_tables() for row in load_table(arch).block_scaled.rows if MACROS[row.family]}
SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
STRIDES = (
    "a_stride_m",
    "a_stride_k",
    "b_stride_k",
    "b_stride_n",
    "out_stride_m",
    "out_stride_n",
    "a_scale_stride_m",
    "a_scale_stride_k",
    "b_scale_stride_k",
    "b_scale_stride_n",
    "bias_stride",
)


class Product(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("M", "N", "K")),
        *((name, ctypes.c_void_p) for name in ("a", "b", "out", "a_scale", "b_scale", "bias")),
        *((name, ctypes.c_int64) for name in STRIDES),
        ("bias_dtype", ctypes.c_int32),
        ("eager", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
    ]


def cuda_include() -> Path | None:
    nvcc = toolchain.find_nvcc()
    folders = [nvcc.path.resolve().parent.parent / "include"] if nvcc else []
    return next((folder for folder in [*folders, Path("/usr/local/cuda/include")] if (folder / "cuda_fp16.h").is_file()), None)


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """emulate(row, operands, out, eager): the row's kernel into out."""
    cxx, include = toolchain.find_cxx(), cuda_include()
    if cxx is None or include is None:
        pytest.skip("needs a C++ compiler and the headers of a CUDA toolkit")
    lines = ['#include "block_scaled_emulated.cpp"']
    for row in ROWS.values():
        for suffix in SUFFIXES.values():
            source = codegen.kernel_source(row, suffix)
            config = source.split("using Row = ")[1].split(";\n")[0]
            if row.family == "generic":
                config = f"{row.tile.m}, {row.tile.n}, {codegen.OUT_DTYPES[suffix].cxx}"
            lines.append(f"{MACROS[row.family]}({row.name}_{suffix}, {config})")
    folder = tmp_path_factory.mktemp("emulated")
    (folder / "rows.cpp").write_text("\n".join(lines) + "\n")
    includes = [f"-I{HERE / 'emulated'}", f"-I{HERE}", f"-I{csrc_dir()}", f"-I{include_dir()}", f"-isystem{include}"]
    command = [
        str(cxx),
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Wno-unknown-pragmas",
        *includes,
        str(folder / "rows.cpp"),
        "-o",
        str(folder / "rows.so"),
    ]
    subprocess.run(command, check=True, timeout=600)
    library = ctypes.CDLL(str(folder / "rows.so"))

    def emulate(row: str, operands, out: torch.Tensor, eager: bool) -> None:
        t = operands.inputs
        bias = t["bias"]
        product = Product(
            *out.shape, t["a"].shape[1], *(None if x is None else x.data_ptr() for x in (t["a"], t["b"], out, t["a_scale"], t["b_scale"], bias))
        )
        strides = [
            *t["a"].stride(),
            *t["b"].stride(),
            *out.stride(),
            *t["a_scale"].stride(),
            *t["b_scale"].stride(),
            bias.stride(-1) if bias is not None else 0,
        ]
        for name, stride in zip(STRIDES, strides):
            setattr(product, name, stride)
        product.bias_dtype = binding.DTYPES[str(bias.dtype).removeprefix("torch.")] if bias is not None else 0
        product.eager, product.block_size = eager, operands.case.block_size
        assert getattr(library, f"{row}_{SUFFIXES[out.dtype]}")(ctypes.byref(product)) == 0

    return emulate


def check(emulate, row: str, case: BlockCase, eager: bool) -> None:
    operands = case.make()
    out = operands.poisoned()
    around = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage())
    emulate(row, operands, out, eager)
    operands.check(out, row)
    out.fill_(float("nan"))
    assert around.isnan().all(), f"{row} {case}: wrote beside its output"


@pytest.mark.parametrize("eager", [False, True], ids=["copies land late", "copies land at once"])
@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_the_bits_of_the_reference(emulate, row, eager):
    tile = ROWS[row].tile
    shapes = [
        (tile.m, tile.n, 128),
        (tile.m + 1, tile.n + 1, 128 * 12 + 1),
        (1, tile.n + 7, 255),
        (tile.m - 3, 130, 17),
        (2 * tile.m + 5, 5 * tile.n - 9, 300),
        (3, 3, 1),
        (5, 64, 1000),
    ]
    for seed, (m, n, k) in enumerate(shapes):
        out_dtype = list(SUFFIXES)[seed % 3]
        check(emulate, row, BlockCase(m, n, k, out_dtype, pad=16, bias=(None, "float32", "out")[seed % 3], seed=seed), eager)


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row.block_size <= 64])
def test_blocks_of_64_have_the_bits_of_the_reference(emulate, row):
    tile = ROWS[row].tile
    for seed, (m, n, k) in enumerate([(tile.m, tile.n, 64), (tile.m + 1, 130, 64 * 13 + 1), (1, 193, 191), (2 * tile.m + 5, 70, 17), (5, 64, 1000)]):
        options = dict(scale_layout="columns", bias=(None, "float32", "out")[seed % 3], values=("full", "minimum")[seed % 2], seed=seed)
        check(emulate, row, BlockCase(m, n, k, list(SUFFIXES)[seed % 3], pad=16, block_size=64, **options), seed % 2 == 0)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_takes_any_scales(emulate, row):
    for seed, (layout, values) in enumerate(
        [("columns", "signed"), ("padded", "wide"), ("broadcast", "positive"), ("rows", "special"), ("columns", "special")]
    ):
        check(emulate, row, BlockCase(19, 150, 400, pad=16, scale_layout=layout, scale_values=values, bias="strided", seed=seed), False)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_sums_the_largest_values_of_a_block_exactly(emulate, row):
    for values in ("minimum", "extremes"):
        check(emulate, row, BlockCase(17, 33, 384, torch.float32, pad=16, values=values), False)


@pytest.mark.parametrize(
    "a_layout, b_layout, out_layout",
    [
        ("offset_rows", "offset_columns", "rows"),
        ("columns", "rows", "columns"),
        ("every_second", "every_second", "every_second"),
        ("padded_rows", "every_second_row", "padded_columns"),
        ("rows", "columns", "offset_rows"),
        ("offset_columns", "offset_rows", "rows"),
    ],
)
def test_the_generic_row_takes_any_layout(emulate, a_layout, b_layout, out_layout):
    row = next(name for name, row in ROWS.items() if row.family == "generic")
    for seed, (m, n, k) in enumerate([(1, 1, 1), (5, 7, 130), (65, 70, 300), (64, 64, 256), (2, 3, 0)]):
        case = BlockCase(m, n, k, list(SUFFIXES)[seed % 3], a_layout, b_layout, out_layout, bias="float32", seed=seed)
        operands = case.make()
        out = operands.poisoned()
        emulate(row, operands, out, False)
        operands.check(out, row)
